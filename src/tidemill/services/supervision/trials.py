"""Finds the trigger that crashes the triggerer by running the suspects in separate processes.

`core.triggers.suspects` chooses the suspects and the culprit among the triggers of this host, whose process has died.
Suspects that the store has found, because whole hosts were lost, are tried in the same way. The store reserves the
triggers of a trial for the trial's session, so that the triggerer runs all others meanwhile.

Invariants:
- Suspects are reserved before the dead process's work is released.
- A decision is stored before the next one is made.
- The process of a trial has ended before another process may run its triggers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields

import structlog
from msgspec.structs import replace

from tidemill.core.errors import RemoteError, TidemillError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.triggers.suspects import ProcessEnd, Suspects, Trial, Verdict, compute_patience
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.process.exitcode import BLOCKED
from tidemill.services.sessions.beginning import begin_session
from tidemill.services.sessions.releasing import release_rest
from tidemill.services.supervision.child import Death, describe_exit, start_service, stop_service
from tidemill.services.supervision.silence import wait_until_silent
from tidemill.store.calls.service_calls import BeginSession, ListSessions, LoseSession, TrialKind
from tidemill.store.calls.trigger_calls import (
    ClearDeaths,
    FailTrigger,
    FindSuspects,
    ListOwnedTriggers,
    OwnedTrigger,
    ReserveTriggers,
    TakeSuspects,
)
from tidemill.store.database import StoreClient
from tidemill.store.wire.remote import call_patiently

log = structlog.get_logger(__name__)

#: Time allowed in addition to the trial: for the start on a busy machine, and for the cleanup of triggers.
_GRACE_SECONDS = 60.0
#: The interval between looks for suspects in the store.
_LOOK_SECONDS = 2.0
#: How long a process may take that calls `on_kill` of triggers: longer than `on_kill` and `cleanup` may take together,
#: since calls that it does not report are repeated.
_KILL_SECONDS = 120.0
#: How long a dropped trial may take to clean up its triggers.
_DROP_SECONDS = 10.0


@dataclass(slots=True)
class _Attempt:
    """One process of a trial.

    Attributes:
        session: Its session; 0 until that begins.
        dropped: Asks the process to end at once.
        solo_until: When another trial may begin beside it, by the loop's clock.
        kind: What the process runs.
    """

    session: int
    dropped: asyncio.Event
    solo_until: float = 0.0
    kind: TrialKind = TrialKind.KILLS


class Trials:
    """Runs the trials of triggers that may have crashed the triggerer.

    Args:
        store: The store.
        arguments: The arguments of the Python interpreter for a triggerer.
        env: The environment.
        output: The descriptor for standard output and standard error.
        about: The call that begins the session of a trial.
        queues: The queues whose suspects it takes from the store.
        capacity: How many triggers a process runs at once.
        silent_seconds: A process without a heartbeat for this long hangs.
        look_seconds: The interval between looks for suspects in the store.
    """

    def __init__(
        self,
        store: StoreClient,
        arguments: Sequence[str],
        env: Mapping[str, str],
        output: int,
        about: BeginSession,
        *,
        queues: tuple[str, ...] = ("default",),
        capacity: int = 10_000,
        silent_seconds: float = math.inf,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._silent_seconds, self._queues, self._look_seconds = silent_seconds, queues, look_seconds
        self._capacity = capacity
        # Whether a process calls `on_kill` of triggers that may kill it.
        self._is_killing = False
        # Whether suspects may be reserved for this process that it does not know.
        self._is_unsure = False
        self._store, self._arguments, self._env, self._output, self._about = store, arguments, env, output, about
        self._holder = 0
        self._suspects = Suspects()
        self._changed = asyncio.Event()
        # Held from a decision until it is stored.
        self._deciding = asyncio.Lock()
        # The last dead triggerer that was judged, and the verdict; its death is reported again if the store could not
        # end its session.
        self._judged = (0, False)
        self._attempts: dict[int, _Attempt] = {}
        # The number of consecutive processes that ended before they ran a trigger.
        self._failures = 0
        self._backoff = Backoff(0.2, 10.0)

    async def note_death(self, session: int, death: Death) -> bool:
        """Reserve the suspects among the triggers of a dead triggerer; return whether the others have had a death, too.

        Args:
            session: Its session, which has not ended in the store yet.
            death: Its exit.

        Raises:
            RemoteError: The store cannot be reached; the caller must report the death again.
        """
        owned = await self._store.call(ListOwnedTriggers(session))
        async with self._deciding:
            if self._judged[0] == session:
                return self._judged[1]
            verdict = self._suspects.note_death(_build_end(owned, death.lived_seconds, death.at, death.killed))
            self._judged = session, verdict.is_death
            if verdict.held:
                log.warning(
                    "a trigger may have crashed the triggerer; its triggers continue in two separate processes",
                    triggers=len(verdict.held),
                )
            await self._settle(session, verdict)
            return verdict.is_death

    async def run(self, holder: int) -> None:
        """Try suspects whenever there are any.

        Args:
            holder: The session of this process, which holds the suspects between trials.

        Raises:
            TidemillError: The store refused a decision.
        """
        self._holder = holder
        self._about = replace(self._about, parent=holder)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                while True:
                    async with self._deciding:
                        self._changed.clear()
                        for trial in self._suspects.begin_trials():
                            solo_seconds = min(trial.seconds, compute_patience(trial.losses))
                            until = asyncio.get_running_loop().time() + solo_seconds
                            attempt = self._attempts[trial.number] = _Attempt(0, asyncio.Event(), until)
                            group.create_task(self._try(trial, attempt))
                    try:
                        await asyncio.wait_for(self._changed.wait(), self._look_seconds)
                    except TimeoutError:
                        await self._take()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _take(self) -> None:
        """Take suspects from the store for a trial, unless others are to be tried without any beside them."""
        async with self._deciding:
            now = asyncio.get_running_loop().time()
            is_solo = any(now < attempt.solo_until for attempt in self._attempts.values())
            try:
                if self._is_unsure:
                    await self._free_unknown()
                found = await self._store.call(FindSuspects(self._queues, self._suspects.trials))
                if found.kills and not self._is_killing:
                    self._is_killing = True
                    self._group.create_task(self._call_kills())
                if not found.triggers or is_solo:
                    return
                self._is_unsure = True
                taken = await self._store.call(
                    TakeSuspects(self._holder, self._queues, self._capacity, self._suspects.trials)
                )
                self._is_unsure = False
            except RemoteError as error:
                throttle(log, 60.0).warning("cannot look for suspects; retrying", error=str(error))
                return
            if taken.triggers:
                log.warning(
                    "triggers may have killed their hosts; trying them in a separate process",
                    triggers=len(taken.triggers),
                    seconds=taken.seconds,
                )
                self._suspects.adopt(taken.triggers, taken.seconds, taken.deaths, is_split=taken.is_split)

    async def _free_unknown(self) -> None:
        """Release triggers that were reserved by a call whose answer was lost."""
        owned = await self._store.call(ListOwnedTriggers(self._holder))
        known = self._suspects.tried
        await self._free(tuple(one.id for one in owned if one.id not in known))
        self._is_unsure = False

    async def _settle(self, session: int, verdict: Verdict) -> None:
        """Store the verdict on a dead session's triggers, and end the trials that it drops."""
        if verdict.explained:
            await call_patiently(self._store, ClearDeaths(verdict.explained))
        if verdict.held:
            await call_patiently(self._store, ReserveTriggers(session, self._holder, verdict.held))
        for trial in verdict.dropped:
            attempt = self._attempts.pop(trial.number, None)
            if attempt is not None:
                attempt.dropped.set()
            else:
                await self._free(trial.triggers)
        self._changed.set()

    async def _free(self, triggers: tuple[int, ...]) -> None:
        """Release triggers that wait for their trial, by moving them to a session that ends at once."""
        session = await begin_session(self._store, self._about)
        await call_patiently(self._store, ReserveTriggers(self._holder, session, triggers))
        await call_patiently(self._store, LoseSession(session, is_death=False))
        await release_rest(self._store)

    async def _try(self, trial: Trial, attempt: _Attempt) -> None:
        """Run a trial, and decide by its outcome."""
        if self._failures:
            pause = self._backoff.compute_delay(self._failures, random.getrandbits(JITTER_BITS))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(attempt.dropped.wait(), pause)
        kind = TrialKind.SPLIT if trial.is_split else TrialKind.WHOLE
        attempt.kind = kind
        session = attempt.session = await begin_session(self._store, replace(self._about, trial=kind))
        try:
            await call_patiently(self._store, ReserveTriggers(self._holder, session, trial.triggers))
            began = asyncio.get_running_loop().time()
            code, exit = await self._run(attempt, trial.seconds)
            now = asyncio.get_running_loop().time()
            owned = await call_patiently(self._store, ListOwnedTriggers(session))
            # A trigger may exit its process with code 0; only a proper stop also ends the session.
            outlived = not code and not await self._is_live(session)
            async with self._deciding:
                if attempt.dropped.is_set():
                    return
                del self._attempts[trial.number]
                if outlived:
                    deaths = self._suspects.note_survived(trial.number, now)
                    await call_patiently(self._store, ClearDeaths(trial.triggers, deaths))
                    self._changed.set()
                else:
                    # A hanging process may be the machine's fault. One that exited cleanly but late may have found no
                    # store to report to, or may have started slowly.
                    is_doubtful = code == -signal.SIGKILL or (not code and now - began >= trial.seconds)
                    end = _build_end(owned, now - began, now, is_doubtful)
                    if code == BLOCKED:  # the process named the culprit, which has failed, so none of the others is one
                        end = replace_fields(end, running={}, waiting=[one.id for one in owned])
                    await self._judge(trial, session, owned, end, exit)
        finally:
            # Releases all triggers that the verdict does not hold back.
            await self._end(session)

    async def _call_kills(self) -> None:
        """Have a process of its own call `on_kill` of triggers whose triggerers were lost while they called it."""
        session = await begin_session(self._store, replace(self._about, trial=TrialKind.KILLS))
        try:
            code, exit = await self._run(_Attempt(session, asyncio.Event()), _KILL_SECONDS)
            if code:
                log.warning("a process that called on_kill of triggers has exited; the calls are repeated", exit=exit)
        finally:
            await self._end(session)
            self._is_killing = False

    async def _end(self, session: int) -> None:
        """End the session of a process, however long the store is away: nothing else ends it before its parent's.

        At shutdown the parent's session ends soon, and nothing waits for the store.
        """
        request, task = LoseSession(session, is_death=False), asyncio.current_task()
        is_cancelled = task is not None and task.cancelling() > 0
        with contextlib.suppress(TidemillError, TimeoutError):
            await (self._store.call(request) if is_cancelled else call_patiently(self._store, request))
            async with asyncio.timeout(_DROP_SECONDS):
                await release_rest(self._store)

    async def _is_live(self, session: int) -> bool:
        return any(one.id == session for one in await call_patiently(self._store, ListSessions(self._about.kind)))

    async def _run(self, attempt: _Attempt, seconds: float) -> tuple[int, str]:
        """Run the process of a trial; returns its exit code and a description of the exit for users."""
        trial = ["--session", str(attempt.session), "--seconds", str(seconds), "--trial", str(int(attempt.kind))]
        arguments = [*self._arguments, *trial]
        try:
            process = await start_service(arguments, self._env, self._output)
        except OSError as error:
            return 1, str(error)
        ending = asyncio.ensure_future(process.wait())
        dropping = asyncio.ensure_future(attempt.dropped.wait())
        silent = asyncio.ensure_future(
            wait_until_silent(self._store, lambda one: one.id == attempt.session, self._silent_seconds)
        )
        try:
            await asyncio.wait(
                {ending, dropping, silent}, timeout=seconds + _GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if attempt.dropped.is_set() and not ending.done():
                stop_service(process)
                await asyncio.wait({ending}, timeout=_DROP_SECONDS)
            hangs = not ending.done()
        finally:
            silent.cancel()
            dropping.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            code = await ending
            if process.stdin is not None:
                process.stdin.close()
        return code, "a kill, because it did not stop in time" if hangs else describe_exit(code)

    async def _judge(
        self, trial: Trial, session: int, owned: Sequence[OwnedTrigger], end: ProcessEnd, exit: str
    ) -> None:
        """Fail the task of the culprit, or reserve the triggers for another trial."""
        verdict = self._suspects.note_fatal(trial.number, end)
        self._failures = 0 if end.running else self._failures + 1
        log.warning("a process of suspected triggers has exited", triggers=len(end.running), exit=exit)
        for one in owned:
            if one.id == verdict.culprit:
                error = (
                    f"the process that ran only this trigger ended with {exit}, {trial.deaths + 1} times in "
                    "a row; a trigger must not exit or crash its process, block it forever, or use up the memory"
                )
                log.error("a trigger crashes its process; failing its task", trigger=one.id, exit=exit)
                with contextlib.suppress(TidemillError):  # the task has already left its deferral
                    await call_patiently(self._store, FailTrigger(session, one.id, one.token, error))
        await self._settle(session, verdict)


def _build_end(owned: Sequence[OwnedTrigger], lived_seconds: float, at: float, killed: bool) -> ProcessEnd:
    running = {one.id: one.stream for one in owned if one.running}
    waiting = [one.id for one in owned if not one.running]
    return ProcessEnd(running, lived_seconds, at, killed, waiting, {one.id: one.deaths for one in owned if one.deaths})
