"""The worker: takes turns with the store, in which it reports results, claims attempts, and learns which ones to end.

`attempt_processes` runs the attempts. Invariants:

- One turn is in flight at a time; it is repeated with the same number until the store answers.
- An attempt that waits at its `yield` goes on only when the store has admitted it again. Until the store knows that it
  has gone on, it is not reported as waiting again.
- A report is kept until the store has it; if its run is damaged, it is sent again later. A running attempt does not
  notice an outage of the store.
- An attempt whose file the worker lacks is returned, and no other attempt of that file is claimed until it is there.
- Once the store has ended the session, none of its processes keeps running.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import structlog

from tidemill.config.known_secrets import KnownSecrets
from tidemill.core.errors import InvariantError, RemoteError
from tidemill.core.tasks.endings import AttemptEnding, Failure, Loss
from tidemill.core.tasks.worker_slots import Attempt, Key
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.services.worker.endings import report_callback
from tidemill.services.worker.event_taker import EventTaker
from tidemill.services.worker.file_secrets import FileSecrets
from tidemill.services.worker.logs.log_budget import LogBudget
from tidemill.services.worker.logs.log_store import LogStore
from tidemill.services.worker.messages import AttemptFinished
from tidemill.services.worker.own_files import OwnFiles
from tidemill.services.worker.processes.attempt_processes import AttemptProcesses, RunningAttempt
from tidemill.services.worker.reports import Reports
from tidemill.services.worker.store_link import SCAN_SECONDS, beat, call_unfenced, listen
from tidemill.services.worker.worker_config import WorkerConfig
from tidemill.services.zygote.client import ZygoteClient
from tidemill.store.calls.asked_secrets import find_secrets
from tidemill.store.calls.iteration_calls import IterationPage, PartCounts
from tidemill.store.calls.stream_calls import TakeEvents
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt, LogPart, OutcomeKind, WorkerTurn
from tidemill.store.database import StoreCalls
from tidemill.store.doorbell import StoreBell
from tidemill.store.wire.remote import call_patiently

log = structlog.get_logger(__name__)

#: How long attempts that end at about the same time wait for each other.
COMPANY_SECONDS = 0.005
#: Only attempts shorter than this wait, because longer ones rarely end together.
_SHORT_SECONDS = 0.05
CALLBACK_SECONDS = 60.0
#: When a report is sent again whose run cannot be changed.
UNSTORED_SECONDS = 60.0
#: How long the store may be unreachable at the very end.
_LAST_SECONDS = 10.0


class Worker:
    """The worker of one session.

    Args:
        session: Its number in the store.
        config: Its configuration.
        calls: The store.
        bell: Rings for new work.
        zygote: Forks task processes; started and closed by the caller.
        secrets: Collects the secrets that tasks are given, which the log of this process must not show.

    Attributes:
        processes: The processes that run its attempts.
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
        self._calls, self._bell = calls, bell
        self.processes = AttemptProcesses(config, zygote, self)
        self._loop = asyncio.get_running_loop()
        #: The attempts that went on after a `yield` since the last turn.
        self._went_on: set[Key] = set()
        self._secrets = FileSecrets(secrets)
        self._reports = Reports(secrets.mask)
        self._events = EventTaker(calls)
        self._files = OwnFiles(session, config.folder)
        self._budget = LogBudget(config.max_log_bytes)
        self._logs = LogStore(calls, self.processes.list_logs)
        self._request = 0
        self._wake = asyncio.Event()
        self._short = False

    async def run(self) -> None:
        """Claim and run attempts until `drain` was called and everything is reported.

        Raises:
            WorkerFencedError: The store has ended the session.
        """
        helpers = [
            self._loop.create_task(each)
            for each in (
                self._listen(),
                beat(self._calls, self._session, self.processes.measure, self._config.lease.beat_seconds),
            )
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
            await self.processes.close()

    def drain(self) -> None:
        """Stop claiming; `run` ends when all attempts have ended."""
        if not self.processes.draining:
            self.processes.drain()
            self._events.leave()
            self._wake.set()

    def end_all(self) -> None:
        """Return all running attempts to the queue."""
        self.drain()
        self.processes.end_all()

    def _now(self) -> float:
        return self._loop.time()

    # -- turns -----------------------------------------------------------------------------------------------------

    async def _take_turns(self) -> None:
        while not (self.processes.draining and not self.processes.running and not self._reports):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SCAN_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            if self._short and self.processes.busy:
                await self._wait_for_company()
            self._short = False
            if await self._take_turn():
                self._wake.set()
        await self._logs.close(_LAST_SECONDS)

    async def _wait_for_company(self) -> None:
        """Wait until every attempt has ended, for at most a few milliseconds."""
        until = self._now() + COMPANY_SECONDS
        while self.processes.busy and (left := until - self._now()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
            self._wake.clear()

    async def _take_turn(self) -> bool:
        """Report and claim; return whether there may be more to do at once."""
        reports, callbacks = self._reports.take()
        self._request += 1
        self._files.look()
        went_on = set(self._went_on)
        turn = WorkerTurn(
            self._session,
            self._request,
            reports,
            callbacks,
            # Negative keys are callbacks.
            tuple(key for key in self.processes.held if key[0] > 0),
            self.processes.capacity,
            self._config.queues,
            tuple(key for key in self.processes.blocked if key not in went_on),
            self._files.missing,
        )
        try:
            answer = await call_unfenced(self._calls, turn)
        except (RemoteError, InvariantError) as error:
            self._reports.note_refused(error)
            return True
        self._reports.note_stored()
        self._went_on -= went_on
        if not went_on.isdisjoint(self.processes.blocked):
            self._wake.set()
        for report, outcome in zip(reports, answer.outcomes, strict=True):
            if outcome.reason:
                log.warning("the store refuses a report", task=report.task, epoch=report.epoch, reason=outcome.reason)
            if outcome.kind is OutcomeKind.UNSTORED:
                self._loop.call_later(UNSTORED_SECONDS, self._reports.add, report)
        for key in answer.end:
            self.processes.end(key)
        for key in answer.unblocked:
            self.processes.unblock(key)
        for claim in answer.claimed:
            if self._files.lacks(claim.file):
                self._give_back(claim)
            else:
                self._claim(claim, answer.now_us)
        await self._tell_files()
        return self._reports.more or bool(answer.claimed and self.processes.capacity)

    async def _listen(self) -> None:
        while True:
            await listen(self._bell)
            self._wake.set()
            self._events.note_ring()

    # -- claims ----------------------------------------------------------------------------------------------------

    def _claim(self, claim: ClaimedAttempt, now_us: int) -> None:
        now = self._now()
        key, epoch, timeout = (claim.task, claim.epoch), claim.epoch, None
        if claim.callback is not None:
            # The key distinguishes the callback from attempts; the epoch orders its log among other logs.
            key, epoch, timeout = (-claim.callback.id, claim.epoch), claim.callback.id, CALLBACK_SECONDS
        elif claim.deadline_us is not None:
            timeout = (claim.deadline_us - now_us) / 1e6
        if self.processes.runs(key):
            return  # the answer to a repeated turn contains it again
        try_number = 0 if claim.callback is not None else claim.try_number
        attempt_log = self._budget.open_log(claim.task, try_number, epoch, self._secrets.find(claim.file))
        deadline = None if timeout is None else now + timeout
        attempt = Attempt(key, claim.file, deadline, self._config.reuses(claim.dag_id))
        self.processes.start(RunningAttempt(attempt, claim, attempt_log, now))

    def _give_back(self, claim: ClaimedAttempt) -> None:
        """Return an attempt whose file this worker lacks."""
        result = Loss(is_return=True)
        if claim.callback is not None:
            self._reports.add(report_callback(claim, claim.callback, result, None))
        else:
            self._reports.add(AttemptReport(claim.task, claim.epoch, result, map_index=claim.map_index))

    async def _tell_files(self) -> None:
        report = self._files.build_report()
        if report is not None:
            await call_unfenced(self._calls, report)
            self._files.note_told(report)

    # -- events of attempts ----------------------------------------------------------------------------------------

    async def call_store(self, file: str, call: Any) -> Any:
        """Return the store's answer to a call of an attempt, however long the store is unreachable."""
        if isinstance(call, TakeEvents) and (call.wait_us or self._events.leaves):
            return (await self._events.take(call.wants[0], call.wait_us / 1e6),)
        answer = await call_patiently(self._calls, call)
        if isinstance(answer, IterationPage | PartCounts) and self.processes.draining:
            # The elements that are left run elsewhere at once.
            answer = msgspec.structs.replace(answer, leaves=True)
        self._secrets.add(file, find_secrets(call, answer))
        return answer

    def on_written(self) -> None:
        """Store new log lines soon."""
        self._logs.note_written()

    def on_blocked(self) -> None:
        """Tell the store soon that an attempt waits at its `yield`."""
        self._wake.set()

    def on_went_on(self, key: Key) -> None:
        """Note what the next turn tells the store."""
        self._went_on.add(key)

    def on_released(self) -> None:
        """Tell the store soon that the worker no longer holds an attempt whose task has moved on."""
        self._wake.set()

    def on_ended(self, running: RunningAttempt, result: AttemptEnding | None, finished: AttemptFinished | None) -> None:
        """Report the result of an attempt."""
        self._went_on.discard(running.attempt.key)
        if isinstance(result, Failure):
            result = self._secrets.mask_failure(running.attempt.file, result)
        parts = running.log.finish(STORE_CLOCK.now_us())
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
        if finished is not None:
            self._files.note_difference(claim.file, differs=finished.differs)
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
