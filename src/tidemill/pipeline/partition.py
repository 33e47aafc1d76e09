"""One owned partition of an engine: its pending tasks, its unresolved messages, and all ways for messages to leave.

Invariants: a message is resolved once: when its work is delivered, when it is skipped, or when its dead letter is
confirmed. Nothing changes a closed partition. No task of a partition starts during its handover.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.handover import Handover
from tidemill.core.pipeline.record_times import RecordTimes
from tidemill.deadletters.letter import Letter, LetterKind
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.delivery.routing import encode_payloads
from tidemill.pipeline.handler.models import ExecutorError, ExecutorResult, ExecutorTask
from tidemill.pipeline.key_order import OrderedTasks
from tidemill.pipeline.reports.report import NO_WINDOW, WindowTimes
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.runtime.kafka.source_message import SourceMessage, list_sizes
from tidemill.sinks.payloads import CollectResult
from tidemill.sources.base import TopicPartition, name_partition


class OwnedPartition:
    """One owned partition.

    Args:
        partition: Its topic and number.
        context: The engine's parts.

    Attributes:
        partition: Its topic and number.
        name: Topic and number as one text, for logs.
        pending: Tasks without a final outcome, by key (the task id, or an internal key for a repeated id).
        unresolved: How many messages were taken and have not left the pipeline.
        undelivered: How many results wait for sinks.
        undelivered_bytes: The total size of these results.
        starved: Whether the intake found no room for its messages at the last visit.
        parked: Tasks that wait until fewer bytes wait for sinks.
        windows: Windows whose own hook or delivery is not done, whether or not their messages are; without held ones.
        held: How many failures the brake holds of a message, by its offset.
        stuck: Messages that are held, or wait for the key of a held message: a shutdown need not wait for them.
        order: Holds tasks back until the tasks of earlier messages with their key are done; None: tasks are unordered.
        taken: Which messages were taken, and when they were written.
        closed: Whether the partition was given up: late results change nothing.
        handover: The work that is still waited for; None until the partition is about to be given up.
    """

    __slots__ = (
        "_context",
        "_handed_over",
        "closed",
        "handover",
        "held",
        "name",
        "order",
        "parked",
        "partition",
        "pending",
        "starved",
        "stuck",
        "taken",
        "undelivered",
        "undelivered_bytes",
        "unresolved",
        "windows",
    )

    def __init__(self, partition: TopicPartition, context: EngineContext) -> None:
        self._context = context
        self.partition = partition
        self.name = name_partition(partition)
        self.pending: dict[object, TaskInFlight] = {}
        self.unresolved = 0
        self.undelivered = 0
        self.undelivered_bytes = 0
        self.starved = False
        self.parked: list[TaskInFlight] = []
        self.windows = 0
        self.held: dict[int, int] = {}
        self.stuck = 0
        self.order: OrderedTasks | None = None
        if context.settings.executor.order_by == "key":
            hooked = context.overridden.on_message_complete
            self.order = OrderedTasks(self._waits, self.launch, hooked=hooked)
        self.taken = RecordTimes()
        self.closed = False
        self.handover: Handover | None = None
        self._handed_over: asyncio.Event | None = None

    @property
    def busy(self) -> bool:
        """Whether work is in flight that can still end."""
        return self.unresolved > self.stuck or self.windows > 0

    @property
    def leaving(self) -> bool:
        """Whether it is being handed over: no more of its tasks start."""
        return self.handover is not None

    # -- tasks ------------------------------------------------------------------------------------------------

    def list_pending_tasks(self) -> Iterator[ExecutorTask]:
        """Yield the tasks that have no final outcome yet."""
        return (flight.task for flight in self.pending.values())

    def launch(self, flight: TaskInFlight) -> None:
        """Start a task whose turn it is, or use its precomputed result."""
        known = flight.task.precomputed
        if known is None:
            self._context.pool.submit(flight)
            return
        # `surrogatepass` encodes any text, including lone surrogates (from file names, for example).
        stdout = known.stdout.encode("utf-8", "surrogatepass") if isinstance(known.stdout, str) else known.stdout
        flight.attempts, flight.is_known = 1, True
        if self.order is not None or flight.generation:  # otherwise the arrangement of its window sets the end
            flight.ended_at = time.time_ns() // 1000
        if (known.exit_code or flight.task.labels) and self._context.recorder is not None:
            self._context.recorder.note_known(flight, known.exit_code, len(stdout) + len(known.stderr))
        flight.owner.succeeded(flight, ExecutorResult(known.exit_code, stdout, known.stderr, 0.0, flight.task, None))

    @property
    def may_start(self) -> bool:
        """Whether tasks of the partition may start; False while too many bytes wait for sinks."""
        return not self.undelivered_bytes or not self._is_full()

    def _is_full(self) -> bool:
        """Return whether so many bytes wait for sinks that no task may start."""
        context = self._context
        if not context.mode.waits_for_sinks:
            return False
        return self.undelivered_bytes * context.load.lanes >= context.settings.executor.max_queued_bytes

    def park(self, flight: TaskInFlight) -> None:
        """Hold a task until fewer results wait for sinks."""
        self.parked.append(flight)
        self._context.counters.parked += 1

    def tasks_done(self, count: int = 1) -> None:
        """Count messages whose tasks have ended: they no longer count against the watermarks."""
        self._context.load.note_finished(self.partition, count, 0)
        self._context.room_freed(self.partition)

    def _waits(self, count: int) -> None:
        """Count messages that start (negative: stop) waiting for their key; the watermarks exclude them."""
        self._context.load.note_waiting(self.partition, count)
        if self.held:
            self._count_stuck()
        if count > 0:
            self._context.room_freed(self.partition)

    # -- results ----------------------------------------------------------------------------------------------

    def submitted(self, size_bytes: int, count: int = 1) -> None:
        """Count results that wait for their sink from now on."""
        self.undelivered += count
        self.undelivered_bytes += size_bytes

    def delivered(self, size_bytes: int, count: int = 1) -> None:
        """Stop counting results that their sink confirmed."""
        self.undelivered -= count
        self.charge(-size_bytes)

    def charge(self, size_bytes: int) -> None:
        """Change the size of the waiting results; if it falls below the limit, parked tasks start."""
        self.undelivered_bytes += size_bytes
        if self.parked and not self._is_full():
            parked = self._take_parked()
            for flight in parked:
                self._context.pool.submit(flight)
        if self.starved:
            self._context.room_freed(self.partition)

    def _take_parked(self) -> list[TaskInFlight]:
        parked, self.parked = self.parked, []
        self._context.counters.parked -= len(parked)
        return parked

    # -- messages and windows -----------------------------------------------------------------------------------

    def take(self, messages: Sequence[SourceMessage], size_bytes: int) -> None:
        """Count messages that were taken from the source; `size_bytes` covers their keys and values."""
        count, context = len(messages), self._context
        context.counters.consumed += count
        context.counters.in_flight += count
        self.unresolved += count
        first = messages[0]
        self.taken.note(first.offset, messages[-1].offset, first.timestamp)
        context.commits.flow.add(self.name, taken=count)
        context.load.note_handed_over(self.partition, count, size_bytes)

    def resolve(
        self,
        message: SourceMessage,
        entry: LedgerEntry[TopicPartition, int],
        flights: Sequence[TaskInFlight] = (),
        window: WindowTimes = NO_WINDOW,
        rejected: str | None = None,
    ) -> None:
        """Resolve a message: its work is delivered, it was skipped, or its letter is confirmed.

        Args:
            message: The message.
            entry: Its entry in the ledger.
            flights: Its tasks.
            window: When its window was arranged, if it was.
            rejected: Why it was dead-lettered before it had any task, if it was.
        """
        context, size_bytes = self._context, message.size_bytes
        context.commits.resolve(entry)
        if context.finished is not None:
            context.finished.add(self.partition, message, size_bytes, flights, window, rejected)
        context.counters.messages_done += 1
        context.counters.in_flight -= 1
        self.unresolved -= 1
        if self.handover is not None:
            self.handover.note_resolved(message.offset)
            self._look()
        if not self.busy:
            context.became_idle()
        context.load.note_finished(self.partition, 0, size_bytes)
        context.room_freed(self.partition)

    def resolve_all(
        self,
        messages: Sequence[SourceMessage],
        entries: Sequence[LedgerEntry[TopicPartition, int]],
        flights: Sequence[Sequence[TaskInFlight]],
        window: WindowTimes,
    ) -> None:
        """Resolve messages of a window together; see `resolve`."""
        context, count = self._context, len(messages)
        sizes = list_sizes(messages)
        context.commits.resolve_all(entries)
        if context.finished is not None:
            context.finished.add_all(self.partition, messages, sizes, flights, window)
        if self.handover is not None:
            for message in messages:
                self.handover.note_resolved(message.offset)
        context.counters.messages_done += count
        context.counters.in_flight -= count
        self.unresolved -= count
        self._look()
        if not self.busy:
            context.became_idle()
        context.load.note_finished(self.partition, 0, sum(sizes))
        context.room_freed(self.partition)

    def reject(
        self,
        message: SourceMessage,
        entry: LedgerEntry[TopicPartition, int],
        kind: LetterKind,
        text: str,
        refused: object = None,
    ) -> None:
        """Dead-letter a message before it has any task; it is resolved when the letter is confirmed."""

        def confirmed() -> None:
            if not self.closed:
                self.resolve(message, entry, rejected=text)

        self.tasks_done()
        self.dead_letter(kind, text, (message,), confirmed, refused=refused)

    def dead_letter(
        self,
        kind: LetterKind,
        text: str,
        messages: Sequence[SourceMessage],
        confirmed: Callable[[], None],
        flight: TaskInFlight | None = None,
        error: ExecutorError | None = None,
        refused: object = None,
    ) -> None:
        """Write one dead letter.

        Args:
            kind: The kind of failure.
            text: The failure in words.
            messages: The messages concerned.
            confirmed: Called later, on the loop, when the letter is stored.
            flight: The task concerned, if there is one.
            error: The error of the task, if it failed.
            refused: The result of a hook that was refused, if that is the failure.
        """
        letter = Letter.about(
            messages,
            kind,
            text,
            payloads=encode_payloads(refused) if isinstance(refused, (CollectResult, list)) else (),
            attempts=max(1, flight.attempts) if flight is not None else 1,
            task_id=flight.task.task_id if flight is not None else None,
            args=flight.task.args if flight is not None else (),
            exit_code=error.exit_code if error is not None else None,
            stderr=error.stderr if error is not None else "",
        )
        self._context.letters.put(letter, confirmed)

    def window_done(self) -> None:
        """Stop counting a window whose own hook has run and whose payloads or letter are confirmed."""
        self.windows -= 1
        self._look()
        if not self.busy:
            self._context.became_idle()

    # -- messages that the brake holds ------------------------------------------------------------------------

    def hold(self, offsets: Sequence[int], *, is_window: bool) -> None:
        """Count a failure that the brake holds: its messages, or its window's hook (`is_window`), are not awaited."""
        for offset in offsets:
            self.held[offset] = self.held.get(offset, 0) + 1
        self.windows -= is_window
        self._count_stuck()

    def unhold(self, offsets: Sequence[int], *, is_window: bool) -> None:
        """Stop counting a failure that is no longer held."""
        self.windows += is_window
        for offset in offsets:
            self.held[offset] -= 1
            if not self.held[offset]:
                del self.held[offset]
        self._count_stuck()

    def _count_stuck(self) -> None:
        """Recount the messages that do not end by themselves: a shutdown need not wait for them."""
        waiting = self.order.find_waiting_offsets() if self.order is not None and self.held else ()
        self.stuck = len(self.held.keys() | waiting)
        if self.handover is not None and self.held:
            self.withdraw(self.held)
        self._context.became_idle()

    # -- giving the partition up ------------------------------------------------------------------------------

    def hand_over(self, unarranged: Iterable[int]) -> None:
        """Drop the work that has not started, and start no more.

        Args:
            unarranged: The first offsets of its windows that are not arranged.
        """
        context = self._context
        unstarted = [*context.pool.withdraw(self), *self._take_parked()]
        if self.order is not None:  # tasks that wait for their key
            unstarted += [flight for flight in self.pending.values() if not flight.attempts]
        waiting = self.order.find_unstarted_offsets() if self.order is not None else ()
        self.handover = Handover(context.commits.find_unresolved(self.partition), [*unarranged, *self.held, *waiting])
        for flight in unstarted:
            flight.owner.park(flight)  # withdraws its messages, because the partition is leaving

    def withdraw(self, offsets: Iterable[int]) -> None:
        """Leave messages to the next owner, because their work would have to start now; only during a handover."""
        assert self.handover is not None
        self.handover.note_withdrawn(offsets)
        self._look()

    @property
    def finishing(self) -> int:
        """The number of messages that the handover still waits for."""
        return self.handover.left if self.handover is not None else 0

    def _look(self) -> None:
        if self._handed_over is not None and self._is_over():
            self._handed_over.set()

    def _is_over(self) -> bool:
        return self.closed or self.handover is None or not (self.handover.left or self.windows)

    async def finish(self) -> None:
        """Wait until the handover is complete, or the partition is closed; the caller limits the time."""
        while not self._is_over():
            self._handed_over = asyncio.Event()
            await self._handed_over.wait()

    def close(self) -> None:
        """Ignore all further events, and forget its payloads."""
        self.closed = True
        if self._context.recorder is not None:
            self._context.recorder.note_kept(self.partition)
        self._take_parked()
        if self.order is not None:
            self.order.close()
        self._look()
        self._context.outbox.abandon(self.partition)

    def abandon(self) -> None:
        """Give the partition up: kill its running tasks; late results change nothing."""
        context = self._context
        self.close()
        context.counters.in_flight -= self.unresolved
        context.pool.abandon(self)
        context.commits.abandon(self.partition)
        if context.brake is not None:
            context.brake.abandon(self)
            self.held.clear()
