"""Finds the stage of an open message of this engine, for the driver and for the stall watch.

Nothing is tracked while messages pass. An `EngineSnapshot` reads the current contents of queues, hooks and sinks, each
of them once, and only if an answer needs it.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tidemill.core.errors import escape_surrogates
from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.message_stage import MessageStage, OpenStage
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.handler.base import WINDOW_HOOKS
from tidemill.pipeline.hooks import OpenCall
from tidemill.pipeline.intake import Intake
from tidemill.pipeline.key_order import ReservedTurn
from tidemill.pipeline.partition import OwnedPartition
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.pipeline.windows.window import WindowInFlight
from tidemill.sources.base import Source, TopicPartition

#: The texts of an answer are cut to this length.
_MAX_CHARS = 2_000
_BUSY = "is queued: all executors are busy"


class MessageLocator:
    """Finds messages of an engine.

    Args:
        context: The engine's parts.
        intake: The engine's partitions.
        source: The source of an engine's messages.
        describe_waits: Returns the external causes that the engine waits for, by name.
    """

    def __init__(
        self, context: EngineContext, intake: Intake, source: Source, describe_waits: Callable[[], Mapping[str, str]]
    ) -> None:
        self._context = context
        self._intake = intake
        self._source = source
        self._describe_waits = describe_waits

    def look(self, now: float) -> EngineSnapshot:
        """Return a view of the engine at this moment.

        Args:
            now: The loop's time.
        """
        return EngineSnapshot(self._context, self._intake, self._source, self._describe_waits, now)

    def find(self, partition: TopicPartition, offset: int, now: float) -> MessageStage | None:
        """Return the stage of a message; None: it is not open, or another engine owns its partition."""
        owned = self._intake.partitions.get(partition)
        if owned is None:
            return None
        look = self.look(now)
        entry = self._context.commits.find_entry(partition, offset)
        if entry is not None:
            return _make_sendable(look.find_stage(owned, entry))
        if owned.taken.last >= offset:
            return None
        first = self._source.peek(partition)
        if first is not None and first.offset <= offset < first.offset + self._source.buffered(partition):
            return look.find_buffered_stage(owned)
        if first is not None and offset < first.offset:
            return None  # committed before this engine owned the partition, or deleted from the topic
        return MessageStage(
            stage=OpenStage.NOT_READ, why=look.find_why_not_taken(owned) if self._intake.is_paused(partition) else ""
        )


def _make_sendable(stage: MessageStage) -> MessageStage:
    """Return a stage whose texts can be encoded, whatever users and servers put into them."""
    task_id = None if stage.task_id is None else stage.task_id[:_MAX_CHARS]
    return replace(stage, task_id=task_id, why=escape_surrogates(stage.why)[:_MAX_CHARS])


class EngineSnapshot:
    """A view of an engine for one turn of the loop; see `MessageLocator.look`."""

    def __init__(
        self,
        context: EngineContext,
        intake: Intake,
        source: Source,
        describe_waits: Callable[[], Mapping[str, str]],
        now: float,
    ) -> None:
        self._context = context
        self._intake = intake
        self._source = source
        self._describe_waits = describe_waits
        self._now = now

    # Each of these takes time linear in its size, and serves all messages.

    @functools.cached_property
    def _waits(self) -> Mapping[str, str]:
        return self._describe_waits()

    @functools.cached_property
    def _calls(self) -> Mapping[str, Sequence[OpenCall]]:
        found: dict[str, list[OpenCall]] = {}
        for call in self._context.hooks.calls.list_open():
            found.setdefault(call.span.partition, []).append(call)
        return found

    @functools.cached_property
    def _queued(self) -> frozenset[TaskInFlight]:
        return self._context.pool.list_queued()

    @functools.cached_property
    def _at_sinks(self) -> Mapping[TopicPartition, Sequence[tuple[str, int, int]]]:
        return self._context.outbox.list_waiting()

    # -- messages that were not taken ---------------------------------------------------------------------------

    def find_buffered_stage(self, owned: OwnedPartition) -> MessageStage:
        """Return why a buffered message is not taken."""
        return MessageStage(stage=OpenStage.BUFFERED, why=self.find_why_not_taken(owned))

    def find_why_not_taken(self, owned: OwnedPartition) -> str:
        """Return why the engine takes no messages of a partition."""
        if self._intake.is_paused(owned.partition):
            return "a user paused it"
        if owned.leaving:
            return "the partition is being handed over"
        brake = self._context.brake
        if brake is not None and (text := brake.describe_wait()) is not None:
            return f"the brake is on ({text})"
        return "the engine is at its limits"

    # -- messages that were taken -------------------------------------------------------------------------------

    def find_stage(self, owned: OwnedPartition, entry: LedgerEntry[TopicPartition, int]) -> MessageStage:
        """Return the stage of a message that was taken and whose commit is not confirmed."""
        offset = entry.item
        if entry.resolved:
            return self._find_commit_stage(entry)
        if offset in owned.held:
            return MessageStage(stage=OpenStage.BRAKE)
        if (unarranged := self._intake.find_unarranged(owned.partition, offset)) is not None:
            is_called = unarranged.stage is OpenStage.ARRANGE and not unarranged.why
            return self._find_call_stage(OpenStage.ARRANGE, owned, offset) if is_called else unarranged
        for flight in find_runs(owned, offset):
            if (stage := self._find_task_stage(owned, flight)) is not None:
                return stage
        if owned.order is not None and (span := owned.order.find_waiting(entry)) is not None:
            return MessageStage(stage=OpenStage.BEHIND_KEY, behind=self._find_blocker(owned, span))
        if any(call.hook not in WINDOW_HOOKS for call in self._find_calls(owned, offset)):
            return self._find_call_stage(OpenStage.HOOK, owned, offset)
        return self._find_delivery_stage(owned, offset)

    def _find_commit_stage(self, entry: LedgerEntry[TopicPartition, int]) -> MessageStage:
        ahead = self._context.commits.find_first_unresolved(entry.lane)
        if ahead is not None and ahead < entry.item:
            return MessageStage(stage=OpenStage.COMMIT, behind=ahead, why=f"offset {ahead} goes first")
        stage = OpenStage.COMMIT if self._context.mode.cut is None else OpenStage.TRANSACTION
        return MessageStage(stage=stage, why=self._waits.get("kafka", ""))

    def _find_calls(self, owned: OwnedPartition, offset: int) -> list[OpenCall]:
        calls = self._calls.get(owned.name, ())
        return [call for call in calls if call.span.first <= offset <= call.span.last]

    def _find_call_stage(self, stage: OpenStage, owned: OwnedPartition, offset: int) -> MessageStage:
        """Return the hook that has not returned for a message; if there are several, the oldest."""
        is_arrange = stage is OpenStage.ARRANGE
        for call in self._find_calls(owned, offset):
            if (call.hook in WINDOW_HOOKS) is is_arrange:
                return MessageStage(stage=stage, seconds=call.seconds, hook=call.hook, why=call.span.messages)
        return MessageStage(stage=stage, hook=self._context.overridden.window_hook, why="it is about to be called")

    def _find_task_stage(self, owned: OwnedPartition, flight: TaskInFlight) -> MessageStage | None:
        """Return what a task waits for; None: it has ended, and its hook is next."""
        task_id, most = flight.task.task_id, self._context.settings.executor.max_retries + 1

        def queued(why: str) -> MessageStage:
            return MessageStage(
                stage=OpenStage.QUEUED, task_id=task_id, attempt=flight.attempts + 1, attempts=most, why=why
            )

        if flight.process is not None:
            pid, started_at = getattr(flight.process, "pid", None), getattr(flight.process, "started_at", 0.0)
            if not started_at:
                return queued("waits for a resident program")
            seconds = self._now - started_at
            return MessageStage(
                stage=OpenStage.TASK, task_id=task_id, seconds=seconds, pid=pid, attempt=flight.attempts, attempts=most
            )
        if flight.timer is not None:
            due = max(0.0, flight.timer.when() - self._now)
            return MessageStage(
                stage=OpenStage.BACKOFF, task_id=task_id, attempt=flight.attempts, attempts=most, next_seconds=due
            )
        if flight in owned.parked:
            return queued("waits: too many results of its partition are waiting for sinks")
        if flight in self._queued:
            return queued(_BUSY)
        if owned.order is not None and flight.attempts == 0:
            return MessageStage(stage=OpenStage.BEHIND_KEY, task_id=task_id, behind=self._find_blocker(owned, flight))
        return None

    def _find_blocker(self, owned: OwnedPartition, flight: TaskInFlight | ReservedTurn) -> int | None:
        """Return the offset of the message that a task or placeholder waits for."""
        position = owned.order.find_blocker(flight) if owned.order is not None else None
        return None if position is None else self._context.commits.find_offset(owned.partition, position)

    def _find_delivery_stage(self, owned: OwnedPartition, offset: int) -> MessageStage:
        results = self._at_sinks.get(owned.partition, ())
        sinks = dict.fromkeys(sink for sink, first, last in results if first <= offset <= last)
        if sinks:  # a sink that fails is a better reason than one that is busy
            sink = next((each for each in sinks if each in self._waits), next(iter(sinks)))
            return MessageStage(stage=OpenStage.SINK, sink=sink, why=self._waits.get(sink, ""))
        if text := self._waits.get("dead letters"):
            return MessageStage(stage=OpenStage.DEAD_LETTER, why=text)
        if owned.leaving:
            return MessageStage(stage=OpenStage.NO_OWNER, why="it is being handed over")
        if self._context.holds_windows:
            return MessageStage(stage=OpenStage.WINDOW, why="the rest of its window")
        return MessageStage(stage=OpenStage.HOOK)


def find_runs(owned: OwnedPartition, offset: int) -> list[TaskInFlight]:
    """Return the tasks of a message that have not ended."""
    found = []
    for flight in owned.pending.values():
        window = flight.owner
        if not isinstance(window, WindowInFlight):
            continue
        index = bisect_left(window.messages, offset, key=lambda message: message.offset)
        if (
            index < len(window.messages)
            and window.messages[index].offset == offset
            and flight in window.flights_of[index]
        ):
            found.append(flight)
    return found
