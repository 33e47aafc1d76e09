"""The worker: claims attempts, has task processes run them, and reports their results.

`core.tasks.worker_slots` makes the decisions; this module feeds it events and carries out its effects, on one loop.
Invariants:

- One turn is in flight at a time; it is repeated with the same number until the store answers.
- A report is kept until the store has it; a running attempt does not notice an outage of the store.
- An attempt is returned to the queue (`Loss`) only when its process has exited.
- Once the store has ended the session, none of its processes keeps running.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from tidemill.config.known_secrets import KnownSecrets
from tidemill.core.errors import InvariantError, RemoteError, TidemillError, describe_error
from tidemill.core.tasks.endings import AttemptEnding, Failure, Loss
from tidemill.core.tasks.worker_slots import (
    Attempt,
    Died,
    Effect,
    Interrupt,
    InterruptReason,
    KillProcess,
    RetireProcess,
    RunAttempt,
    StartProcess,
    WorkerSlots,
)
from tidemill.services.worker.attempt_signals import END_SIGNAL, KILL_SIGNAL, TIMEOUT_SIGNAL
from tidemill.services.worker.endings import explain_end, report_callback
from tidemill.services.worker.file_secrets import FileSecrets
from tidemill.services.worker.log_budget import LogBudget
from tidemill.services.worker.log_store import LogStore
from tidemill.services.worker.logs import AttemptLog
from tidemill.services.worker.messages import (
    AskStore,
    AttemptFinished,
    AttemptOrder,
    FileLoaded,
    ForkedTask,
    StoreAnswered,
    StoreNotAnswered,
    encode_answer,
)
from tidemill.services.worker.reports import Reports
from tidemill.services.worker.signatures import sign_files
from tidemill.services.worker.store_link import SCAN_SECONDS, beat, call_unfenced, listen
from tidemill.services.worker.task_handle import TaskHandle
from tidemill.services.worker.templates import Templates
from tidemill.services.worker.worker_config import WorkerConfig
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Exited
from tidemill.store.calls.asked_secrets import find_secrets
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt, LogPart, WorkerTurn
from tidemill.store.database import StoreCalls
from tidemill.store.doorbell import StoreBell
from tidemill.store.wire.remote import call_patiently

log = structlog.get_logger(__name__)

#: How long attempts that end at about the same time wait for each other.
COMPANY_SECONDS = 0.005
#: Only attempts shorter than this wait, because longer ones rarely end together.
_SHORT_SECONDS = 0.05
CALLBACK_SECONDS = 60.0
#: How long the store may be unreachable at the very end.
_LAST_SECONDS = 10.0


@dataclass(slots=True)
class _Running:
    """An attempt that is running, or has ended and is not reported yet."""

    claim: ClaimedAttempt
    log: AttemptLog
    started: float


class Worker:
    """The worker of one session.

    Args:
        session: Its number in the store.
        config: Its configuration.
        calls: The store.
        bell: Rings for new work.
        zygote: Forks task processes; started and closed by the caller.
        secrets: Collects the secrets that tasks are given, which the log of this process must not show.
    """

    def __init__(
        self,
        session: int,
        config: WorkerConfig,
        calls: StoreCalls,
        bell: StoreBell,
        zygote: ZygoteClient,
        secrets: KnownSecrets,
    ) -> None:
        self._session, self._config = session, config
        self._calls, self._bell, self._zygote = calls, bell, zygote
        self._loop = asyncio.get_running_loop()
        self._slots = WorkerSlots(config.limits)
        self._templates = Templates(zygote, config.folder, config.limits.import_seconds, config.reparse_seconds)
        self._handles: dict[int, TaskHandle] = {}
        #: The files read by the last process that imported each DAG file; the next one will probably read the same.
        self._read: dict[str, tuple[str, ...]] = {}
        self._running: dict[tuple[int, int], _Running] = {}
        self._secrets = FileSecrets(secrets)
        self._reports = Reports(secrets.mask)
        self._budget = LogBudget(config.max_log_bytes)
        self._logs = LogStore(calls, lambda: [each.log for each in self._running.values()])
        self._request = 0
        self._wanted = True
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._short = False

    @property
    def running(self) -> int:
        """The number of running attempts."""
        return len(self._slots.held)

    @property
    def pids(self) -> list[int]:
        """The process ids of the task processes."""
        return [handle.process.pid for handle in self._handles.values() if handle.process is not None]

    def measure(self) -> dict[str, float]:
        """Return the measures of this worker for the metrics of `dev`."""
        busy, free = len(self._slots.held), self._slots.capacity
        return {"slots_busy": busy, "slots_free": free, "processes": len(self.pids)}

    async def run(self) -> None:
        """Claim and run attempts until `drain` was called and everything is reported.

        Raises:
            WorkerFencedError: The store has ended the session.
        """
        helpers = [
            self._loop.create_task(each) for each in (self._listen(), beat(self._calls, self._session, self.measure))
        ]
        turns = self._loop.create_task(self._take_turns())
        try:
            await asyncio.wait([turns, *helpers], return_when=asyncio.FIRST_COMPLETED)
            for each in (turns, *helpers):
                if each.done():
                    each.result()
        finally:
            for each in (turns, *helpers):
                each.cancel()
            await asyncio.wait([turns, *helpers])
            await self._kill_all()

    def drain(self) -> None:
        """Stop claiming; `run` ends when all attempts have ended."""
        if not self._draining:
            self._draining = True
            self._do(self._slots.drain(self._now()))
            self._wake.set()

    def end_all(self) -> None:
        """Return all running attempts to the queue."""
        self.drain()
        self._do(self._slots.end_all(self._now()))

    def _now(self) -> float:
        return self._loop.time()

    # -- turns -----------------------------------------------------------------------------------------------------

    async def _take_turns(self) -> None:
        while not (self._draining and not self._slots.held and not self._reports):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SCAN_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            if self._short and self._slots.held:
                await self._wait_for_company()
            self._short = False
            if await self._take_turn():
                self._wake.set()
        await self._logs.close(_LAST_SECONDS)

    async def _wait_for_company(self) -> None:
        """Wait until every attempt has ended, for at most a few milliseconds."""
        until = self._now() + COMPANY_SECONDS
        while self._slots.held and (left := until - self._now()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
            self._wake.clear()

    async def _take_turn(self) -> bool:
        """Report and claim; return whether there may be more to do at once."""
        reports, callbacks = self._reports.take()
        self._request += 1
        turn = WorkerTurn(
            self._session,
            self._request,
            reports,
            callbacks,
            # Negative keys are callbacks.
            tuple(key for key in self._list_held() if key[0] > 0),
            # No process can be started while the zygote restarts.
            self._slots.capacity if self._zygote.ready.is_set() else 0,
            self._config.queues,
        )
        try:
            answer = await call_unfenced(self._calls, turn)
        except (RemoteError, InvariantError) as error:
            self._reports.note_refused(error)
            return True
        self._reports.note_stored()
        for report, outcome in zip(reports, answer.outcomes, strict=True):
            if outcome.reason:
                log.warning("the store refuses a report", task=report.task, epoch=report.epoch, reason=outcome.reason)
        for key in answer.end:
            self._do(self._slots.end(key, self._now()))
        for claim in answer.claimed:
            self._claim(claim, answer.now_us)
        return self._reports.more or bool(answer.claimed and self._slots.capacity)

    def _list_held(self) -> list[tuple[int, int]]:
        """Return the attempts whose processes still exist: until these have exited, cleared tasks do not run again."""
        ending = [handle.replaced for handle in self._handles.values() if handle.replaced is not None]
        return [attempt.key for attempt in self._slots.held] + ending

    async def _listen(self) -> None:
        while True:
            await listen(self._bell)
            self._wake.set()

    # -- attempts --------------------------------------------------------------------------------------------------

    def _claim(self, claim: ClaimedAttempt, now_us: int) -> None:
        now = self._now()
        key, epoch, timeout = (claim.task, claim.epoch), claim.epoch, None
        if claim.callback is not None:
            # The key distinguishes the callback from attempts; the epoch orders its log among other logs.
            key, epoch, timeout = (-claim.callback.id, claim.epoch), claim.callback.id, CALLBACK_SECONDS
        elif claim.deadline_us is not None:
            timeout = (claim.deadline_us - now_us) / 1e6
        if key in self._running:
            return  # the answer to a repeated turn contains it again
        checked: dict[int, bool] = {}
        for handle in list(self._handles.values()):
            if handle.task.file == claim.file and not self._is_fresh(handle, checked):
                self._do(self._slots.note_stale(handle.number, now))
        try_number = 0 if claim.callback is not None else claim.try_number
        attempt_log = self._budget.open_log(claim.task, try_number, epoch, self._secrets.find(claim.file))
        self._running[key] = _Running(claim, attempt_log, now)
        deadline = None if timeout is None else now + timeout
        self._do(self._slots.claim(Attempt(key, claim.file, deadline, self._config.reuses(claim.dag_id)), now))

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
                    self._start(number, file)
                case RunAttempt(number, attempt):
                    if (handle := self._handles.get(number)) is not None:
                        handle.log = self._running[attempt.key].log
                        handle.tell(AttemptOrder(self._running[attempt.key].claim, attempt.reuses))
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

    def _start(self, number: int, file: str) -> None:
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

    async def _answer(self, handle: TaskHandle, ask: AskStore) -> None:
        call: Any = ask.call
        try:
            value = await call_patiently(self._calls, call)
        except TidemillError as error:
            handle.tell(StoreNotAnswered(ask.number, str(error), refused=not isinstance(error, InvariantError)))
        except Exception as error:
            log.exception("a call of a task failed", call=type(call).__name__)
            handle.tell(StoreNotAnswered(ask.number, describe_error(error), refused=False))
        else:
            self._secrets.add(handle.task.file, find_secrets(call, value))
            handle.tell(StoreAnswered(ask.number, encode_answer(value)))

    def on_written(self) -> None:
        """Store new log lines soon."""
        self._logs.note_written()

    def on_finished(self, handle: TaskHandle, finished: AttemptFinished) -> None:
        """Report the result of an attempt."""
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
            result = Loss()  # interrupted by the shutdown: the store queues it again
        handle.replaced = attempt.key if result is None else None
        self._report(attempt, result, finished)
        self._do(effects)

    def on_exited(self, handle: TaskHandle, exited: Exited | None) -> None:
        """Report how the attempt ended, after its process has exited."""
        del self._handles[handle.number]
        handle.drop_answers()
        if handle.replaced is not None:
            self._wake.set()
        for effect in self._slots.note_exited(handle.number, lost=exited is None):
            if isinstance(effect, Died):
                self._note_died(effect.attempt, effect.why, exited, handle)
        self._set_timer()

    def _note_died(
        self, attempt: Attempt, why: InterruptReason, exited: Exited | None, handle: TaskHandle | None
    ) -> None:
        broke_off = handle is not None and handle.broke_off
        result = explain_end(why, exited, attempt.file, self._config.limits, broke_off=broke_off)
        if isinstance(result, Failure):
            self._running[attempt.key].log.say("error", result.error)
        self._report(attempt, result, None)

    def _report(self, attempt: Attempt, result: AttemptEnding | None, finished: AttemptFinished | None) -> None:
        running = self._running.pop(attempt.key)
        if isinstance(result, Failure):
            result = self._secrets.mask_failure(attempt.file, result)
        parts = running.log.finish(time.time_ns() // 1000)
        self._budget.note_finished(running.log)
        self._wake.set()
        if result is None:
            self._logs.add(parts)
            return  # its task has moved on
        self._logs.add(parts[:-1])
        log_end: LogPart | None = parts[-1] if parts else None
        if self._now() - running.started < _SHORT_SECONDS:
            self._short = True
        claim = running.claim
        if claim.callback is not None:
            self._reports.add(report_callback(claim, claim.callback, result, log_end))
            return
        said = finished or AttemptFinished(result)
        self._reports.add(
            AttemptReport(
                claim.task,
                claim.epoch,
                result,
                said.xcoms,
                said.skip,
                said.skip_all_downstream,
                log_end,
                map_index=claim.map_index,
                label=said.label,
            )
        )

    async def _kill_all(self) -> None:
        """End all processes at once, without reports."""
        for handle in list(self._handles.values()):
            handle.signal(signal.SIGKILL, group=True)
        if self._timer is not None:
            self._timer.cancel()
        until = self._now() + _LAST_SECONDS
        while self._handles and self._now() < until:  # noqa: ASYNC110 - the very end
            await asyncio.sleep(0.005)
        self._templates.close()
