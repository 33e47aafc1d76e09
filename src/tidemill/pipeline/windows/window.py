"""A window in flight: its tasks, hooks and deliveries, until every message is resolved.

`core.pipeline.arrangement` decides when a message and the window are complete and when a message is resolved. This
shell calls the hooks, passes their payloads to the outbox, and turns every failure into a dead letter. After the
partition was given up, nothing changes the window.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import msgspec

from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.arrangement import Arrangement, Effect, MessageComplete, MessageResolved
from tidemill.pipeline.checks import find_source_indexes
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.delivery.routing import Origin, RoutedPayload
from tidemill.pipeline.handler.models import ErrorAction, ExecutorError, ExecutorResult, ExecutorTask
from tidemill.pipeline.hooks import call_hook
from tidemill.pipeline.key_order import ReservedTurn
from tidemill.pipeline.partition import OwnedPartition
from tidemill.pipeline.reports.report import WindowTimes
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.pipeline.windows import failures
from tidemill.pipeline.windows.batches import deliver_part
from tidemill.pipeline.windows.hooked import Hooked, call_hook_for, name_hook
from tidemill.runtime.kafka.source_message import MessageSpan, SourceMessage, span_messages
from tidemill.sinks.sending.delivery_batch import DeliveryBatch
from tidemill.sources.base import TopicPartition


class WindowInFlight:
    """An arranged window of messages of one partition.

    Args:
        context: The engine's parts.
        partition: Its partition.
        messages: Its messages, in order.
        entries: Their entries in the ledger.
        arrived: The loop's time when its first message arrived.
        times: When it was arranged.

    Attributes:
        results: Results and errors of its tasks, for `on_window_complete`; empty if the handler has no such hook.
        deliveries: Shared by the deliveries of one-message tasks, as long as more of them may follow.
        causes: The causes of failure of its messages, by index, if there is a brake.
        known: During `start`, collects the one-message tasks with precomputed results; None: the window ends them
            itself.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "causes",
        "context",
        "deliveries",
        "entries",
        "flights_of",
        "graph",
        "held_for_window",
        "known",
        "messages",
        "partition",
        "results",
        "times",
        "topic_partition",
    )

    def __init__(
        self,
        context: EngineContext,
        partition: OwnedPartition,
        messages: list[SourceMessage],
        entries: Sequence[LedgerEntry[TopicPartition, int]],
        arrived: float,
        times: WindowTimes,
    ) -> None:
        """Prepare; nothing runs before `start`."""
        self.context = context
        self.partition = partition
        self.topic_partition = partition.partition
        self.messages = messages
        self.entries = entries
        self.arrived = arrived
        self.graph = Arrangement(len(messages))
        self.flights_of: list[list[TaskInFlight]] = [[] for _ in messages]
        self.results: list[ExecutorResult | ExecutorError] = []
        self.times = times
        self.held_for_window = False
        self.causes: dict[int, str] = {}
        self.known: list[TaskInFlight] | None = None
        self.deliveries: DeliveryBatch | None = None

    def start(self, tasks: list[ExecutorTask], reserved: ReservedTurn | None) -> None:
        """Launch the tasks of the window, each when its turn comes.

        Args:
            tasks: The tasks that `arrange` returned.
            reserved: The placeholder of the window's only message in the order of its key, if any.
        """
        self.hold_window()
        indexes_by_offset = {message.offset: index for index, message in enumerate(self.messages)} if tasks else {}
        flights: list[tuple[TaskInFlight, Sequence[int]]] = []
        for task in tasks:
            indexes, ignored = find_source_indexes(task.source_offsets, indexes_by_offset)
            if ignored:
                text = "source_offsets outside the task's window are ignored"
                self.context.warn(text, task_id=task.task_id, partition=self.partition.name, ignored=ignored[:10])
            flight = self._make_run(task)
            if len(indexes) == 1 and not ignored:
                flight.named_offsets = (self.messages[indexes[0]].offset,)
            for index in indexes or range(len(self.messages)):
                self.flights_of[index].append(flight)
            flights.append((flight, indexes))
        if flights and self.context.recorder is not None:
            self.context.recorder.note_window(self)
        effects = self.graph.set_tasks(flights)
        if self.partition.order is None:
            for flight, _ in flights:
                self.partition.launch(flight)
        else:
            self.partition.order.arranged(list(zip(self.messages, self.entries, strict=True)), flights, reserved)
        self.apply(effects)

    def hold_window(self) -> None:
        """Hold all messages until the window's own hook is done, if the engine is configured so."""
        if self.context.holds_windows:
            self.held_for_window = True
            self.graph.hold(range(len(self.messages)))

    def _make_run(self, task: ExecutorTask) -> TaskInFlight:
        flight = TaskInFlight(task, self, self.arrived)
        if task.task_id in self.partition.pending:
            self.context.warn(
                "a task with this id is already pending; this one runs under an internal key",
                task_id=task.task_id,
                partition=self.partition.name,
            )
            flight.key = flight
        self.partition.pending[flight.key] = flight
        return flight

    @property
    def group(self) -> OwnedPartition:
        """Its partition: tasks are withdrawn and abandoned with it."""
        return self.partition

    def park(self, flight: TaskInFlight) -> None:
        """Hold a task until it may start, or leave its messages to the partition's next owner."""
        if self.partition.leaving:
            self.partition.withdraw(self._find_offsets(flight))
        else:
            self.partition.park(flight)

    def succeeded(self, flight: TaskInFlight, result: ExecutorResult) -> None:
        """Handle the result of a task; the task is terminal once its hook has returned."""
        flight.result = result
        context = self.context
        if context.overridden.on_window_complete:
            self.results.append(result)
        context.counters.tasks_done += 1
        context.slowest.add(result)
        if self.known is not None and len(self.graph.find_indexes(flight)) == 1:
            self.known.append(flight)
        else:  # even without a hook in a later turn: a window of precomputed results must not recurse
            context.hooks.submit(self.collect if context.overridden.on_task_complete else self._end_task, flight)

    async def _end_task(self, flight: TaskInFlight) -> None:
        self._make_terminal(flight)

    def failed(self, flight: TaskInFlight, error: ExecutorError) -> None:
        """Handle the failure of a task, by `on_error` or by the default."""
        if self.context.overridden.on_error:
            self.context.hooks.submit(self._call_error_hook, flight, error)
        else:
            failures.retry_or_fail(self, flight, error)

    async def _call_error_hook(self, flight: TaskInFlight, error: ExecutorError) -> None:
        if self.partition.closed:
            return
        action = await failures.ask_on_error(self.context, flight, error, self.locate)
        if self.partition.closed:
            return
        if action is ErrorAction.RETRY:
            failures.retry_or_fail(self, flight, error)
        elif action in (ErrorAction.SKIP, []):
            self.context.counters.skipped += 1
            self._give_up(flight, error)
        elif isinstance(action, list):
            self._replace(flight, error, action)
        else:
            failures.handle_task_failure(self, flight, error)

    def _replace(self, flight: TaskInFlight, error: ExecutorError, tasks: list[ExecutorTask]) -> None:
        most = self.context.settings.executor.max_replacements
        if flight.generation >= most:
            why = f"on_error has already replaced it {most} times (executor.max_replacements): "
            failures.handle_task_failure(self, flight, error, why)
            return
        if self.context.recorder is not None:
            self.context.recorder.note_failure("task_replaced", flight, error, tasks=len(tasks))
        flight.replaced = True
        flight.error = error
        self.partition.pending.pop(flight.key, None)
        indexes = self.graph.find_indexes(flight)
        children = []
        for task in tasks:
            child = self._make_run(msgspec.structs.replace(task, parent_task_id=flight.task.task_id))
            child.generation = flight.generation + 1
            children.append(child)
            for index in indexes:
                self.flights_of[index].append(child)
        effects = self.graph.replace(flight, children)
        if self.partition.order is None:
            for child in children:
                self.partition.launch(child)
        else:
            self.partition.order.replaced(flight, children)
        flight.leave_owner()
        self.apply(effects)

    def _give_up(self, flight: TaskInFlight, error: ExecutorError) -> None:
        """End a task that failed for good."""
        if self.context.recorder is not None:
            self.context.recorder.note_failure("task_failed", flight, error)
        flight.error = error
        if self.context.overridden.on_window_complete:
            self.results.append(error)
        self.context.counters.tasks_failed += 1
        self._make_terminal(flight)

    def _make_terminal(self, flight: TaskInFlight) -> None:
        self.partition.pending.pop(flight.key, None)
        if not self.partition.closed:
            self.apply(self.graph.note_task_done(flight))
            if (order := self.partition.order) is not None:
                order.ended(flight)
        flight.leave_owner()

    def find_indexes(self, of: Hooked) -> Sequence[int]:
        """Return the indexes of the messages of a task or hook."""
        if of is None:
            return range(len(self.messages))
        return (of,) if isinstance(of, int) else self.graph.find_indexes(of)

    def _find_offsets(self, flight: TaskInFlight) -> list[int]:
        """Return the offsets of the messages that cannot leave the pipeline before a task is done."""
        return [self.messages[index].offset for index in self.find_indexes(None if self.held_for_window else flight)]

    def find_task_offsets(self, flight: TaskInFlight) -> Sequence[int]:
        """Return the offsets of the messages of a task that has no final outcome yet."""
        return [self.messages[index].offset for index in self.graph.find_indexes(flight)]

    # -- hooks that return payloads ---------------------------------------------------------------------------

    async def collect(self, of: Hooked) -> None:
        """Call the hook of a task, a message or the window, and deliver its payloads."""
        context, partition = self.context, self.partition
        if partition.closed:
            self.deliveries = None  # break the reference cycle with the window
            return
        hook, returned = name_hook(of), None
        try:
            returned = await call_hook(call_hook_for(self, of), context.hooks.calls, hook, self.locate, of)
            routed = context.route(returned)
        except Exception as error:
            if not partition.closed:
                failures.handle_hook_failure(self, hook, error, of, returned)
            return
        if partition.closed:
            self.deliveries = None
            return
        if isinstance(of, TaskInFlight):
            if routed:
                of.payloads, indexes = len(routed), self.graph.find_indexes(of)
                if len(indexes) == 1 < len(self.messages):
                    deliver_part(self, indexes[0], routed, of.task)
                else:
                    self.deliver(routed, indexes, of.task, hook)
            self._make_terminal(of)
        elif of is None:
            self._end_window_hook(routed)
        else:
            if routed:
                self.times.count_payloads(self.messages[of].offset, len(routed))
                self.deliver(routed, (of,), None, hook)
            self._end_message(of)

    # -- failures: see `failures.FailingWindow` ---------------------------------------------------------------

    def hold(self, of: Hooked) -> Callable[[], None]:
        """Hold the messages of a step until its letter is confirmed; return the callback that releases them."""
        if of is None:
            return self._window_done
        indexes = self.find_indexes(of)
        self.graph.hold(indexes)
        return functools.partial(self._released, indexes)

    def end(self, of: Hooked, error: ExecutorError | None) -> None:
        """Continue after a step whose letter is handed over; the window's own hook ends only when it is confirmed."""
        if isinstance(of, int):
            self._end_message(of)
        elif of is not None and error is not None:
            self._give_up(of, error)
        elif of is not None:
            self._make_terminal(of)

    def deliver(
        self, routed: Sequence[RoutedPayload], indexes: Sequence[int], task: ExecutorTask | None, hook: str
    ) -> None:
        """Deliver the payloads of a hook; the messages are held until they are settled."""
        self.graph.hold(indexes)
        origin = Origin([self.messages[index] for index in indexes], task, hook=hook)
        self._submit(routed, origin, functools.partial(self._released, indexes, origin))

    def _submit(self, routed: Sequence[RoutedPayload], origin: Origin, done: Callable[[], None]) -> None:
        self.context.outbox.submit(routed, origin, done)
        self.partition.submitted(origin.size_bytes)

    def _released(self, indexes: Sequence[int], origin: Origin | None = None) -> None:
        """Release messages from a hold: their payloads are settled, or their letter is confirmed."""
        if not self.partition.closed:
            if origin is not None:
                self.partition.delivered(origin.size_bytes)
            self.apply(self.graph.release(indexes))

    # -- messages and the window ------------------------------------------------------------------------------

    def apply(self, effects: Sequence[Effect]) -> None:
        """Carry out the effects of the graph."""
        for effect in effects:
            if isinstance(effect, MessageComplete):
                self._message_complete(effect.index)
            elif isinstance(effect, MessageResolved):
                self._resolve(effect.index)
            else:
                self.end_messages()

    def _resolve(self, index: int) -> None:
        """Resolve a single message."""
        flights = self.flights_of[index]
        if len(self.messages) > 1:  # free its results before the window's slowest task ends
            self.flights_of[index] = []
        self.partition.resolve(self.messages[index], self.entries[index], flights, self.times)

    def _message_complete(self, index: int) -> None:
        self.partition.tasks_done()
        if self.context.overridden.on_message_complete:
            self.context.hooks.submit(self.collect, index)
        else:
            self.apply(self.graph.note_hook_done(index))
            if self.context.brake is not None:
                self._tell_brake(index)

    def _end_message(self, index: int) -> None:
        self.apply(self.graph.note_hook_done(index))
        if self.partition.order is not None:
            self.partition.order.message_ended(self.entries[index])
        if self.context.brake is not None:
            self._tell_brake(index)

    def _tell_brake(self, index: int) -> None:
        cause, messages = self.causes.get(index), self.messages
        if (brake := self.context.brake) is not None:
            brake.ended(self.partition, messages[index].offset, cause, is_alone=len(messages) == 1)

    def end_messages(self) -> None:
        """Continue after the hooks of all messages: call the window's own hook."""
        self.deliveries = None  # break the reference cycle with the window
        self.context.counters.batches.add(max(0.0, time.monotonic() - self.arrived))
        if self.context.overridden.on_window_complete:
            self.partition.windows += 1
            self.context.hooks.submit(self.collect, None)
        else:
            self._release_window()

    def _end_window_hook(self, routed: list[RoutedPayload]) -> None:
        if (brake := self.context.brake) is not None:
            brake.window_ended(self.partition, self.messages[0].offset)
        if routed and not self.partition.closed:
            origin = Origin(self.messages, None, hook="on_window_complete")
            self._submit(routed, origin, functools.partial(self._window_done, origin))
        else:
            self._window_done()

    def _window_done(self, origin: Origin | None = None) -> None:
        """Continue after the payloads of the window's own hook are settled or dead-lettered."""
        if not self.partition.closed:
            if origin is not None:
                self.partition.delivered(origin.size_bytes)
            self._release_window()
            self.partition.window_done()

    def _release_window(self) -> None:
        if self.held_for_window:
            self.held_for_window = False
            self.apply(self.graph.release(range(len(self.messages))))

    def locate(self, of: Hooked) -> MessageSpan:
        """Return the messages that a hook runs for."""
        return span_messages([self.messages[index] for index in self.find_indexes(of)])
