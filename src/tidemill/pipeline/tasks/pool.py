"""Tasks in flight: the queue by age, the slots, and the backoff between attempts.

A task waits in the queue, oldest arrival first, until a slot is free, and runs as a process. Its outcome goes to its
owner; its group decides whether it may start. A task in backoff holds no slot and keeps its age.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable

import msgspec
import structlog

from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.pipeline.handler.models import ErrorKind, ExecutorError, ExecutorResult, ExecutorTask
from tidemill.pipeline.tasks.process import ProcessOutcome, TaskExecutor
from tidemill.pipeline.tasks.task_in_flight import InFlightGroup, TaskInFlight
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.loop.durations import Durations
from tidemill.runtime.loop.engine_tasks import EngineTasks

log = structlog.get_logger(__name__)

#: The queue pauses this long when the machine cannot start a process (no memory, no descriptors).
SPAWN_PAUSE_SECONDS = 0.5


class PoolStatistics(msgspec.Struct, frozen=True):
    """The number of tasks in each state.

    Attributes:
        running: Running processes.
        queued: Tasks that wait for a slot.
        retrying: Tasks that wait for their next attempt.
        retried: How often a failed task was queued again.
        timeouts: Attempts that timed out.
        attempts: How long attempts ran.
        queue_waits: How long tasks waited for a slot.
        spawns: How long it took to start an attempt.
    """

    running: int
    queued: int
    retrying: int
    retried: int
    timeouts: int
    attempts: Durations
    queue_waits: Durations
    spawns: Durations


class TaskPool:
    """Runs tasks in the engine's slots.

    Args:
        executor: Starts the processes.
        settings: Slots and limits.
        tasks: Runs asyncio tasks.
    """

    def __init__(self, executor: TaskExecutor, settings: ExecutorSettings, tasks: EngineTasks) -> None:
        self._tasks = tasks
        self._executor = executor
        self._settings = settings
        self._slots = executor.capacity
        self._free_slots = list(range(executor.capacity))
        #: Called with every attempt that has ended, unless its outcome is stored for later.
        self.on_attempt: Callable[[TaskInFlight, ProcessOutcome], None] | None = None
        #: A task that succeeds in less time stores its outcome, which is recorded together with others when their
        #: messages leave. Tasks of several messages are excluded, because their owner has forgotten the messages by
        #: then.
        self.kept_below_seconds = 0.0
        #: Called with every attempt that has ended, while a live view is watching; None: no one is.
        self.on_ended: Callable[[TaskInFlight, ProcessOutcome], None] | None = None
        self._queue: list[tuple[float, int, TaskInFlight]] = []
        self._order = itertools.count()
        self._running: set[TaskInFlight] = set()
        self._retrying: set[TaskInFlight] = set()
        #: How often a failed task was queued again.
        self._retried = 0
        self._timeouts = 0
        self._attempts, self._queue_waits, self._spawns = Durations(), Durations(), Durations()
        self._killing: set[asyncio.Future[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._dispatching = False
        self._closed = False

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            len(self._running),
            len(self._queue),
            len(self._retrying),
            self._retried,
            self._timeouts,
            self._attempts.copy(),
            self._queue_waits.copy(),
            self._spawns.copy(),
        )

    def list_queued(self) -> frozenset[TaskInFlight]:
        """Return the tasks that wait for a slot; takes time linear in their number."""
        return frozenset(flight for _, _, flight in self._queue)

    def list_first_queued(self, most: int) -> list[TaskInFlight]:
        """Return up to `most` tasks, in the order in which they will start."""
        return [flight for _, _, flight in heapq.nsmallest(most, self._queue)]

    def list_running(self, most: int) -> list[tuple[TaskInFlight, float]]:
        """Return up to `most` running tasks, by slot, and the loop's time at which each was started."""
        running = sorted(self._running, key=lambda flight: flight.slot or 0)[:most]
        started = [(flight, getattr(flight.process, "started_at", 0.0)) for flight in running]
        return [(flight, at) for flight, at in started if at]

    def list_retrying(self, most: int) -> list[tuple[TaskInFlight, float]]:
        """Return up to `most` tasks that wait for their next attempt, and the loop's time at which each is due."""
        waiting = [(flight.timer.when(), id(flight), flight) for flight in self._retrying if flight.timer is not None]
        return [(flight, due) for due, _, flight in heapq.nsmallest(most, waiting)]

    def submit(self, flight: TaskInFlight) -> None:
        """Queue a task; it starts when it is the oldest and a slot is free, unless its group is leaving."""
        if flight.owner.group.leaving:
            flight.owner.park(flight)
            return
        flight.queued_at = time.monotonic()
        heapq.heappush(self._queue, (flight.age, next(self._order), flight))
        self._dispatch_soon()

    def retry(self, flight: TaskInFlight, delay_seconds: float) -> None:
        """Queue a task again after a delay, unless its group is leaving."""
        if flight.owner.group.leaving:
            flight.owner.park(flight)
            return
        self._retried += 1
        self._retrying.add(flight)
        flight.timer = asyncio.get_running_loop().call_later(delay_seconds, self._again, flight)

    def _again(self, flight: TaskInFlight) -> None:
        flight.timer = None
        self._retrying.discard(flight)
        self.submit(flight)

    def _dispatch_soon(self) -> None:
        # Once per turn of the loop, so that all tasks of a window are queued before the oldest is chosen.
        if not self._dispatching and len(self._running) < self._slots:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        if self._pause is not None or self._closed:
            return
        queue = self._queue
        while queue and len(self._running) < self._slots:
            flight = heapq.heappop(queue)[2]
            group = flight.owner.group
            if group.closed:
                continue
            if group.may_start:
                self._start(flight)
            else:
                flight.owner.park(flight)

    def _start(self, flight: TaskInFlight) -> None:
        task, started_at = flight.task, time.monotonic()
        self._queue_waits.add(started_at - flight.queued_at)
        flight.attempts += 1
        flight.slot = heapq.heappop(self._free_slots)
        self._running.add(flight)
        try:
            stdin = task.stdin.encode() if isinstance(task.stdin, str) else task.stdin or b""
        except UnicodeEncodeError as error:
            flight.input_bytes = 0
            failure = ProcessOutcome(None, b"", b"", 0.0, None, ErrorKind.EXIT, f"cannot be started: stdin: {error}")
            asyncio.get_running_loop().call_soon(self._ended, flight, failure)
            return
        flight.input_bytes = len(stdin)
        flight.process = self._executor.start(
            (task.binary_path or self._settings.binary_path, *task.args),
            stdin,
            task.env,
            self._settings.task_timeout_seconds if task.timeout_seconds is None else task.timeout_seconds,
            lambda outcome: self._ended(flight, outcome),
        )
        self._spawns.add(time.monotonic() - started_at)

    def _ended(self, flight: TaskInFlight, outcome: ProcessOutcome) -> None:
        if flight in self._running:  # otherwise it was abandoned with its group
            self._release(flight)
        flight.process = None
        flight.ended_at = time.time_ns() // 1000
        is_late = flight.owner.group.closed or self._closed  # another engine owns the work by now
        # Fast successes without details are stored, and recorded in bulk when their message leaves.
        if (
            outcome.duration_seconds < self.kept_below_seconds
            and outcome.kind is None
            and outcome.exit_code is not None
            and not outcome.stderr
            and len(flight.named_offsets) == 1
            and not flight.has_details
            and not is_late
        ):
            flight.waited_seconds = time.monotonic() - flight.queued_at
            flight.outcome = outcome
        elif self.on_attempt is not None and not (outcome.kind is None and outcome.exit_code is None):
            flight.waited_seconds = time.monotonic() - flight.queued_at
            self.on_attempt(flight, outcome)
        if self.on_ended is not None and outcome.pid is not None:
            self.on_ended(flight, outcome)
        if outcome.pid is not None:
            self._attempts.add(outcome.duration_seconds)
            self._timeouts += outcome.kind is ErrorKind.TIMEOUT
        if is_late:
            pass
        elif outcome.kind is None and outcome.exit_code is None:
            self._cannot_spawn(flight, outcome)
        elif outcome.kind is None:
            assert outcome.exit_code is not None
            flight.owner.succeeded(
                flight,
                ExecutorResult(
                    outcome.exit_code,
                    outcome.stdout,
                    outcome.stderr.decode("utf-8", "replace"),
                    outcome.duration_seconds,
                    flight.task,
                    outcome.pid,
                ),
            )
        else:
            flight.owner.failed(flight, _make_error(flight.task, outcome, outcome.kind))
        if self._queue:
            self._dispatch()

    def _release(self, flight: TaskInFlight) -> None:
        self._running.discard(flight)
        if flight.slot is not None:
            heapq.heappush(self._free_slots, flight.slot)

    def _cannot_spawn(self, flight: TaskInFlight, outcome: ProcessOutcome) -> None:
        """Queue the task again with its old age: the machine lacks a resource, which is not the task's fault."""
        throttle(log, 10.0).error("processes cannot be started; waiting", error=outcome.exception)
        flight.attempts -= 1
        self.submit(flight)
        if self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(SPAWN_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._dispatch()

    def withdraw(self, group: InFlightGroup) -> list[TaskInFlight]:
        """Remove a group's waiting tasks from the queue and from backoff; return them."""
        waiting = [flight for flight in self._retrying if flight.owner.group is group]
        for flight in waiting:
            self._retrying.discard(flight)
            if flight.timer is not None:
                flight.timer.cancel()
        waiting += [flight for _, _, flight in self._queue if flight.owner.group is group]
        self._queue = [item for item in self._queue if item[2].owner.group is not group]
        heapq.heapify(self._queue)
        return waiting

    def abandon(self, group: InFlightGroup) -> None:
        """Kill the running tasks of a closed group and drop the waiting ones."""
        assert group.closed
        theirs = [flight for flight in self._running if flight.owner.group is group]
        if theirs:
            for flight in theirs:
                self._release(flight)
            processes = [flight.process for flight in theirs if flight.process is not None]
            course = self._executor.kill(processes, self._settings.term_grace_seconds)
            killing = self._tasks.run(f"the end of the tasks of {group.name}", course)
            self._killing.add(killing)
            killing.add_done_callback(self._killed)
        self.withdraw(group)

    def _killed(self, killing: asyncio.Future[None]) -> None:
        self._killing.discard(killing)
        self._dispatch_soon()

    async def close(self, grace_seconds: float) -> None:
        """Kill all running tasks, with `grace_seconds` between SIGTERM and SIGKILL; no outcome is reported.

        If this is cancelled, the remaining processes get SIGKILL at once.
        """
        self._closed = True
        for flight in self._retrying:
            if flight.timer is not None:
                flight.timer.cancel()
        self._retrying.clear()
        self._queue.clear()
        if self._pause is not None:
            self._pause.cancel()
        try:
            await self._executor.kill_all(grace_seconds)
        finally:
            self._executor.close()


def _make_error(task: ExecutorTask, outcome: ProcessOutcome, kind: ErrorKind) -> ExecutorError:
    return ExecutorError(
        task,
        outcome.exit_code,
        outcome.stderr.decode("utf-8", "replace"),
        outcome.exception,
        outcome.pid,
        kind,
        outcome.duration_seconds,
    )
