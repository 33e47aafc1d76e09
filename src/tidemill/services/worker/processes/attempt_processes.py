"""Runs the attempts of a worker in task processes: starts, interrupts, kills and replaces them.

`core.tasks.worker_slots` makes the decisions; this module feeds it events and carries out its effects, on one loop. It
does not know the store: its listener answers the calls of attempts and reports their results. Invariants:

- An attempt ends once, with one call of `AttemptListener.on_ended`.
- An attempt whose process does not report its end ends only when the process has exited.
- After `close`, no process is running.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import structlog

from tidemill.core.errors import InvariantError, TidemillError, describe_error
from tidemill.core.tasks.endings import AttemptEnding, Failure, Loss
from tidemill.core.tasks.worker_slots import (
    Attempt,
    Died,
    Effect,
    GoOn,
    Interrupt,
    InterruptReason,
    Key,
    KillProcess,
    RetireProcess,
    RunAttempt,
    StartProcess,
    WorkerSlots,
)
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.services.worker.attempt_signals import END_SIGNAL, KILL_SIGNAL, TIMEOUT_SIGNAL
from tidemill.services.worker.endings import explain_end
from tidemill.services.worker.logs.logs import AttemptLog
from tidemill.services.worker.messages import (
    AskStore,
    AttemptFinished,
    AttemptOrder,
    FileLoaded,
    ForkedTask,
    PlaceAwaited,
    PlaceGiven,
    StoreAnswered,
    StoreNotAnswered,
    encode_answer,
)
from tidemill.services.worker.processes.task_handle import TaskHandle
from tidemill.services.worker.processes.templates import Templates
from tidemill.services.worker.signatures import sign_files
from tidemill.services.worker.worker_config import WorkerConfig
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Exited
from tidemill.store.calls.worker_calls import ClaimedAttempt

log = structlog.get_logger(__name__)

#: How long killed processes may take to exit at the very end.
_EXIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """An attempt that is running.

    Attributes:
        attempt: Its key, file and deadline.
        claim: The claim, which its process receives.
        log: Its log.
        started: When it was started.
    """

    attempt: Attempt
    claim: ClaimedAttempt
    log: AttemptLog
    started: float


class AttemptListener(Protocol):
    """Receives the events of attempts; the worker implements it."""

    async def call_store(self, file: str, call: Any) -> Any:
        """Return the store's answer to a call of an attempt. `file`: the DAG file of the attempt."""

    def on_written(self) -> None:
        """There are log lines to store."""

    def on_blocked(self) -> None:
        """An attempt waits at its `yield`."""

    def on_went_on(self, key: Key) -> None:
        """An attempt has gone on after its `yield`."""

    def on_ended(self, running: RunningAttempt, result: AttemptEnding | None, finished: AttemptFinished | None) -> None:
        """An attempt has ended.

        Args:
            running: The attempt.
            result: How it ended; None: its task has moved on, and there is nothing to report.
            finished: The message of its process; None: the process sent none.
        """

    def on_released(self) -> None:
        """A process has exited whose attempt ended before, because its task had moved on."""


class AttemptProcesses:
    """The task processes of a worker and the attempts in them.

    Args:
        config: The configuration of the worker.
        zygote: Forks task processes; started and closed by the caller.
        listener: Receives the events of attempts.
    """

    def __init__(self, config: WorkerConfig, zygote: ZygoteClient, listener: AttemptListener) -> None:
        self._config, self._zygote, self._listener = config, zygote, listener
        self._loop = asyncio.get_running_loop()
        self._slots = WorkerSlots(config.limits)
        self._templates = Templates(zygote, config.folder, config.limits.import_seconds, config.reparse_seconds)
        self._handles: dict[int, TaskHandle] = {}
        #: The files read by the last process that imported each DAG file; the next one will probably read the same.
        self._read: dict[str, tuple[str, ...]] = {}
        self._running: dict[Key, RunningAttempt] = {}
        #: The numbers of the waits of attempts at their `yield`.
        self._waits: dict[Key, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._draining = False

    @property
    def running(self) -> int:
        """The number of running attempts."""
        return len(self._slots.held)

    @property
    def busy(self) -> int:
        """The number of attempts that run and do not wait at their `yield`."""
        return self._slots.busy

    @property
    def blocked(self) -> list[Key]:
        """The attempts that wait at their `yield`."""
        return list(self._waits)

    @property
    def held(self) -> list[Key]:
        """The attempts whose processes still exist: until these have exited, cleared tasks do not run again."""
        ending = [handle.replaced for handle in self._handles.values() if handle.replaced is not None]
        return [attempt.key for attempt in self._slots.held] + ending

    @property
    def capacity(self) -> int:
        """The number of attempts that can be started now; 0 while the zygote restarts."""
        return self._slots.capacity if self._zygote.ready.is_set() else 0

    @property
    def draining(self) -> bool:
        """Whether no more attempts are started."""
        return self._draining

    @property
    def pids(self) -> list[int]:
        """The process ids of the task processes."""
        return [handle.process.pid for handle in self._handles.values() if handle.process is not None]

    def list_logs(self) -> list[AttemptLog]:
        """Return the logs of the running attempts."""
        return [running.log for running in self._running.values()]

    def measure(self) -> dict[str, float]:
        """Return the measures of the worker for the metrics of `dev`."""
        busy, free = self._slots.busy, self._slots.capacity
        return {"slots_busy": busy, "slots_free": free, "processes": len(self.pids)}

    def runs(self, key: Key) -> bool:
        """Return whether an attempt is running."""
        return key in self._running

    def start(self, running: RunningAttempt) -> None:
        """Start an attempt, in a process whose files are unchanged."""
        checked: dict[int, bool] = {}
        for handle in list(self._handles.values()):
            if handle.task.file == running.attempt.file and not self._is_fresh(handle, checked):
                self._do(self._slots.note_stale(handle.number, running.started))
        self._running[running.attempt.key] = running
        self._do(self._slots.claim(running.attempt, running.started))

    def end(self, key: Key) -> None:
        """Interrupt an attempt, because its task has moved on."""
        self._do(self._slots.end(key, self._now()))

    def unblock(self, key: Key) -> None:
        """Let an attempt that waits at its `yield` go on as soon as there is a place for it."""
        self._do(self._slots.unblock(key, self._now()))

    def drain(self) -> None:
        """Start no more attempts, and retire idle processes."""
        self._draining = True
        self._do(self._slots.drain(self._now()))

    def end_all(self) -> None:
        """Start no more attempts, and interrupt all, so that the store queues them again."""
        self._draining = True
        self._do(self._slots.end_all(self._now()))

    async def close(self) -> None:
        """Kill all processes at once, and wait until they have exited."""
        for handle in list(self._handles.values()):
            handle.signal(signal.SIGKILL, group=True)
        if self._timer is not None:
            self._timer.cancel()
        until = self._now() + _EXIT_SECONDS
        while self._handles and self._now() < until:  # noqa: ASYNC110 - the very end
            await asyncio.sleep(0.005)
        self._templates.close()

    def _now(self) -> float:
        return self._loop.time()

    # -- decisions -------------------------------------------------------------------------------------------------

    def _is_fresh(self, handle: TaskHandle, checked: dict[int, bool]) -> bool:
        """Return whether a process has read its files recently, and they have not changed since.

        Args:
            handle: The process.
            checked: Results for other processes, by the identity of their `FileLoaded`, which forks of one template
                share.
        """
        loaded = handle.loaded
        if loaded is None:  # it is importing them, or has not begun
            return handle.began_with == sign_files(self._config.folder, handle.began_with)
        if (known := checked.get(id(loaded))) is None:
            known = checked[id(loaded)] = self._templates.is_current(loaded) and not loaded.broken
        return known

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartProcess(number, file):
                    self._start_process(number, file)
                case RunAttempt(number, attempt):
                    if (handle := self._handles.get(number)) is not None:
                        running = self._running[attempt.key]
                        handle.log = running.log
                        handle.tell(AttemptOrder(running.claim, attempt.reuses, STORE_CLOCK.reading))
                case GoOn(number):
                    self._go_on(number)
                case Interrupt(number, why):
                    self._handles[number].signal(TIMEOUT_SIGNAL if why is InterruptReason.TIMEOUT else END_SIGNAL)
                    # For code that cannot be interrupted.
                    half = self._config.limits.grace_seconds / 2
                    self._loop.call_later(half, self._handles[number].signal, KILL_SIGNAL)
                case RetireProcess(number):
                    self._handles[number].leave()
                case KillProcess(number):
                    self._handles[number].signal(signal.SIGKILL, group=True)
                case Died(attempt, why):
                    self._note_died(attempt, why, None, None)
        self._set_timer()

    def _go_on(self, number: int) -> None:
        attempt = self._slots.find_attempt(number)
        if attempt is not None and (wait := self._waits.pop(attempt.key, None)) is not None:
            self._listener.on_went_on(attempt.key)
            self._handles[number].tell(PlaceGiven(wait))

    def _start_process(self, number: int, file: str) -> None:
        task = ForkedTask(str(self._config.folder), file, self._config.log_level)
        handle = self._handles[number] = TaskHandle(number, task, partial(self._templates.find, task), self)
        handle.began_with = sign_files(self._config.folder, self._read.get(file, (file,)))
        try:
            handle.start()
        except OSError as error:
            log.warning("a task process cannot be started", error=str(error))
            self._loop.call_soon(self.on_exited, handle, None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self._slots.next_due) is not None:
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._do(self._slots.tick(self._now()))

    # -- events of task processes ----------------------------------------------------------------------------------

    def on_loaded(self, handle: TaskHandle, loaded: FileLoaded) -> None:
        """Handle that a process has imported its file."""
        self._read[handle.task.file] = (handle.task.file, *loaded.files)
        self._slots.note_loaded(handle.number)

    def on_ask(self, handle: TaskHandle, ask: AskStore) -> None:
        """Call the store for an attempt."""
        handle.keep_answer(self._loop.create_task(self._answer(handle, ask)))

    def on_awaited(self, handle: TaskHandle, awaited: PlaceAwaited) -> None:
        """Give the place of an attempt that waits at its `yield` to another one."""
        attempt = self._slots.find_attempt(handle.number)
        if attempt is not None:
            self._waits[attempt.key] = awaited.number
            self._do(self._slots.block(handle.number, self._now()))
            self._listener.on_blocked()

    async def _answer(self, handle: TaskHandle, ask: AskStore) -> None:
        try:
            value = await self._listener.call_store(handle.task.file, ask.call)
        except TidemillError as error:
            handle.tell(StoreNotAnswered(ask.number, str(error), refused=not isinstance(error, InvariantError)))
        except Exception as error:
            log.exception("a call of a task failed", call=type(ask.call).__name__)
            handle.tell(StoreNotAnswered(ask.number, describe_error(error), refused=False))
        else:
            handle.tell(StoreAnswered(ask.number, encode_answer(value)))

    def on_written(self) -> None:
        """Pass on that there are new log lines."""
        self._listener.on_written()

    def on_finished(self, handle: TaskHandle, finished: AttemptFinished) -> None:
        """End an attempt with the result that its process reported."""
        attempt = self._slots.find_attempt(handle.number)
        if attempt is None:
            return
        handle.log = None
        handle.drop_answers()
        clean = not finished.changed
        if finished.changed:
            log.debug("replacing a task process", changed=finished.changed, file=handle.task.file)
        effects = self._slots.note_ended(handle.number, self._now(), clean=clean)
        result = finished.result
        if result is None and self._draining:
            result = Loss(is_return=True)  # interrupted by the shutdown: the store queues it again
        handle.replaced = attempt.key if result is None else None
        self._end_attempt(attempt, result, finished)
        self._do(effects)

    def on_exited(self, handle: TaskHandle, exited: Exited | None) -> None:
        """End the attempt of a process that has exited without a result."""
        del self._handles[handle.number]
        handle.drop_answers()
        if handle.replaced is not None:
            self._listener.on_released()
        effects = self._slots.note_exited(handle.number, self._now(), lost=exited is None)
        for effect in effects:
            if isinstance(effect, Died):
                self._note_died(effect.attempt, effect.why, exited, handle)
        self._do([effect for effect in effects if not isinstance(effect, Died)])

    def _note_died(
        self, attempt: Attempt, why: InterruptReason, exited: Exited | None, handle: TaskHandle | None
    ) -> None:
        broke_off = handle is not None and handle.broke_off
        result = explain_end(why, exited, attempt.file, self._config.limits, broke_off=broke_off)
        if isinstance(result, Failure):
            self._running[attempt.key].log.say("error", result.error)
        self._end_attempt(attempt, result, None)

    def _end_attempt(self, attempt: Attempt, result: AttemptEnding | None, finished: AttemptFinished | None) -> None:
        self._waits.pop(attempt.key, None)
        self._listener.on_ended(self._running.pop(attempt.key), result, finished)
