"""Calls the hooks of tasks whose results were precomputed, and delivers their payloads.

Hooks that return without suspending are called one after another, and their payloads are delivered together.

Invariant: a hook that suspends delays no other. In the next turn of the loop the payloads collected so far are
delivered, and another job continues with the rest.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Sequence

from tidemill.pipeline.delivery.routing import RoutedPayload
from tidemill.pipeline.handler.models import ExecutorTask
from tidemill.pipeline.hooks import BURST, begin_hook, call_hook
from tidemill.pipeline.key_order import ReservedTurn
from tidemill.pipeline.reports.report import stand_for
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.pipeline.windows import failures
from tidemill.pipeline.windows.batches import may_start_as_batch, release_batch, resolve_batch
from tidemill.pipeline.windows.hooked import TASK_HOOK
from tidemill.pipeline.windows.window import WindowInFlight
from tidemill.sinks.sending.delivery_batch import BatchPart, DeliveryBatch


def start_tasks(window: WindowInFlight, tasks: list[ExecutorTask], reserved: ReservedTurn | None) -> None:
    """Start a window; see `WindowInFlight.start`."""
    if window.partition.order is not None or not may_start_as_batch(window):
        window.start(tasks, reserved)
        return
    known = window.known = []
    window.start(tasks, reserved)
    window.known = None
    if known:
        _KnownResults(window, known).start()


def _has_one_each(window: WindowInFlight, known: Sequence[TaskInFlight]) -> bool:
    """Return whether each message of a window has exactly one task, all of them with precomputed results."""
    return len(known) == len(window.messages) and set(map(len, window.flights_of)) == {1}


class _KnownResults:
    """The tasks of a window that have precomputed results.

    Args:
        window: The window.
        flights: The tasks, of one message each.
    """

    __slots__ = ("_are_alike", "_batch", "_ended", "_left", "_parts", "_routed", "_window")

    def __init__(self, window: WindowInFlight, flights: list[TaskInFlight]) -> None:
        self._window = window
        self._left = deque(flights)
        self._batch = DeliveryBatch(TASK_HOOK, functools.partial(release_batch, window))
        # Payloads of hooks that are not delivered yet, and their tasks.
        self._parts: list[BatchPart] = []
        self._routed: list[Sequence[RoutedPayload]] = []
        self._ended: list[TaskInFlight] = []
        #: Whether one of these tasks can represent all of them in reports.
        self._are_alike = window.context.finished is not None and _has_one_each(window, flights)

    def start(self) -> None:
        """Submit a job that works on the tasks."""
        self._window.context.hooks.submit(self._work)

    async def _work(self) -> None:
        if not self._left:
            return
        loop, turn, hooks = asyncio.get_running_loop(), asyncio.Event(), self._window.context.hooks
        # Runs in the next turn if a hook suspends, and then hands the rest to another job.
        timer = loop.call_soon(self._pass_on, turn)
        for _ in range(BURST):
            await self._collect(self._left.popleft())
            if not self._left or turn.is_set() or hooks.is_turn_due:
                break
        self._hand_over()
        if not turn.is_set():  # no hook suspended, so `_pass_on` has not run
            timer.cancel()
            self._go_on()

    def _pass_on(self, turn: asyncio.Event) -> None:
        """Take over from a job whose hook suspends, or that has called enough hooks in a row."""
        turn.set()
        self._hand_over()
        self._go_on()

    def _go_on(self) -> None:
        """Let another job continue with the remaining tasks, before the tasks of later windows."""
        if self._left:
            self._window.context.hooks.submit_first(self._work)

    async def _collect(self, flight: TaskInFlight) -> None:
        window, returned = self._window, None
        context, partition = window.context, window.partition
        if partition.closed:
            return
        if context.overridden.on_task_complete:
            assert flight.result is not None
            try:
                hook = begin_hook(context.handler.on_task_complete, flight.result)
                returned = await call_hook(hook, context.hooks.calls, TASK_HOOK, window.locate, flight)
                routed = context.route(returned)
            except Exception as error:
                self._tell_apart()
                if not partition.closed:
                    failures.handle_hook_failure(window, TASK_HOOK, error, flight, returned)
                return
            if routed:
                (index,) = window.graph.find_indexes(flight)
                flight.payloads = len(routed)
                self._parts.append(BatchPart(self._batch, index, window.messages[index], len(routed), flight.task))
                self._routed.append(routed)
        self._ended.append(flight)

    def _hand_over(self) -> None:
        """Deliver the collected payloads, and end their tasks."""
        parts, routed, ended = self._parts, self._routed, self._ended
        self._parts, self._routed, self._ended = [], [], []
        window, partition = self._window, self._window.partition
        if not ended or partition.closed:
            return
        if self._are_alike:
            self._compare(parts, len(ended))
        if parts:
            window.graph.hold([part.index for part in parts])
            window.context.outbox.submit_run(parts, routed)
            partition.submitted(sum([part.size_bytes for part in parts]), len(parts))
        complete, resolved, is_over = window.graph.end_tasks(ended)
        for flight in ended:
            partition.pending.pop(flight.key, None)
            flight.leave_owner()
        partition.tasks_done(complete)
        resolve_batch(window, resolved)
        if is_over:
            window.end_messages()

    def _compare(self, parts: Sequence[BatchPart], count: int) -> None:
        """Record for reports how many payloads each message has, as long as all have the same number."""
        counts = [part.pending for part in parts]
        each = counts[0] if counts else 0
        stand_in, before = stand_for(1, each, True), self._window.times.known_runs
        if (counts and counts.count(each) < count) or (before is not None and before is not stand_in):
            self._tell_apart()
        else:
            self._window.times.known_runs = stand_in

    def _tell_apart(self) -> None:
        self._are_alike = False
        self._window.times.known_runs = None
