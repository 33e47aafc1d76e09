"""Finds the trigger that ends the triggerer, by running those that may have done so in processes of their own.

`core.triggers.suspects` decides whom to try, and whom to blame. The triggers of a trial are reserved in the store for
its service, so that the triggerer runs all others meanwhile.

Invariants: suspects are reserved before what the dead process held is free; what is decided is stored before anything
else is decided; the process of a trial has ended before anybody else may run its triggers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from tidemill.core.errors import TidemillError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.triggers.suspects import ProcessEnd, Suspects, Trial, Verdict
from tidemill.runtime.process.exitcode import BLOCKED
from tidemill.services.dev.child import Death, describe_exit, start_service, stop_service
from tidemill.services.dev.silence import wait_until_silent
from tidemill.store.calls.all_calls import (
    BeginSession,
    FailTrigger,
    ListOwnedTriggers,
    ListSessions,
    LoseSession,
    OwnedTrigger,
    ReserveTriggers,
)
from tidemill.store.database import StoreClient
from tidemill.store.wire.remote import call_patiently

log = structlog.get_logger(__name__)

#: How long a process may take beyond its trial: to start, on a busy machine, and to let triggers clean up.
_GRACE_SECONDS = 60.0
#: How long one that is to end early may take to let triggers clean up.
_DROP_SECONDS = 10.0


@dataclass(slots=True)
class _Attempt:
    """One process of a trial. `session`: 0, it has not begun. `dropped`: it is to end at once."""

    session: int
    dropped: asyncio.Event


class Trials:
    """The trials of the triggers that may end the triggerer.

    Args:
        store: The store.
        arguments: What follows the Python interpreter on the command line of a triggerer.
        env: Its environment.
        output: Where its standard output and standard error go.
        about: How the service of a trial begins.
        silent_seconds: One that has not reported for this long hangs.
    """

    def __init__(
        self,
        store: StoreClient,
        arguments: Sequence[str],
        env: Mapping[str, str],
        output: int,
        about: BeginSession,
        *,
        silent_seconds: float = math.inf,
    ) -> None:
        """Try none yet."""
        self._silent_seconds = silent_seconds
        self._store, self._arguments, self._env, self._output, self._about = store, arguments, env, output, about
        self._holder = 0
        self._suspects = Suspects()
        self._changed = asyncio.Event()
        # Held from a decision until it is stored.
        self._deciding = asyncio.Lock()
        # The last dead triggerer that was judged: its death is told again if it could not be ended in the store.
        self._judged = 0
        self._attempts: dict[int, _Attempt] = {}
        # How many processes in a row ended before they ran a trigger.
        self._failures = 0
        self._backoff = Backoff(0.2, 10.0)

    async def note_death(self, session: int, death: Death) -> None:
        """Reserve the triggers of a triggerer that has died, as far as they are suspects.

        Args:
            session: Its service, which has not been ended in the store yet.
            death: How it died.

        Raises:
            RemoteError: The store cannot be reached; the death is to be noted again.
        """
        owned = await self._store.call(ListOwnedTriggers(session))
        async with self._deciding:
            if self._judged == session:
                return
            self._judged = session
            verdict = self._suspects.note_death(_build_end(owned, death.lived_seconds, death.at, death.killed))
            if verdict.held:
                log.warning(
                    "a trigger may end the triggerer; those that ran in it go on in two processes of their own",
                    triggers=len(verdict.held),
                )
            await self._settle(session, verdict)

    async def run(self, holder: int) -> None:
        """Try suspects whenever there are some.

        Args:
            holder: The service of this process, which has suspects between two trials.

        Raises:
            TidemillError: The store refuses what was decided.
        """
        self._holder = holder
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    async with self._deciding:
                        self._changed.clear()
                        for trial in self._suspects.begin_trials():
                            attempt = self._attempts[trial.number] = _Attempt(0, asyncio.Event())
                            group.create_task(self._try(trial, attempt))
                    await self._changed.wait()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _settle(self, session: int, verdict: Verdict) -> None:
        """Store what was decided about what a dead service had, and end what was dropped."""
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
        """Free triggers that wait for their trial: whatever a service has is free when it ends."""
        session = await call_patiently(self._store, self._about)
        await call_patiently(self._store, ReserveTriggers(self._holder, session, triggers))
        await call_patiently(self._store, LoseSession(session))

    async def _try(self, trial: Trial, attempt: _Attempt) -> None:
        """Run a trial, and decide what follows from its end."""
        if self._failures:
            pause = self._backoff.compute_delay(self._failures, random.getrandbits(JITTER_BITS))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(attempt.dropped.wait(), pause)
        session = attempt.session = await call_patiently(self._store, self._about)
        try:
            await call_patiently(self._store, ReserveTriggers(self._holder, session, trial.triggers))
            began = asyncio.get_running_loop().time()
            code, exit = await self._run(attempt, trial.seconds)
            now = asyncio.get_running_loop().time()
            owned = await call_patiently(self._store, ListOwnedTriggers(session))
            # A trigger may end its process with code 0, but then that has not said that it stops.
            outlived = not code and not await self._is_live(session)
            async with self._deciding:
                if attempt.dropped.is_set():
                    return
                del self._attempts[trial.number]
                if outlived:
                    self._suspects.note_survived(trial.number, now)
                    self._changed.set()
                else:
                    # One that was killed because it hangs may have hung because the machine did; and one that ended
                    # well, but late, may have found no store to say so, or has only started slowly.
                    is_doubtful = code == -signal.SIGKILL or (not code and now - began >= trial.seconds)
                    end = _build_end(owned, now - began, now, is_doubtful)
                    if code == BLOCKED:  # the culprit has failed: none of those that are left is
                        end = replace(end, running={}, waiting=[one.id for one in owned])
                    await self._judge(trial, session, owned, end, exit)
        finally:
            # Whatever of it is not held back is free.
            with contextlib.suppress(TidemillError):
                await self._store.call(LoseSession(session))

    async def _is_live(self, session: int) -> bool:
        return any(one.id == session for one in await call_patiently(self._store, ListSessions(self._about.kind)))

    async def _run(self, attempt: _Attempt, seconds: float) -> tuple[int, str]:
        """Run the process of a trial; return its exit code, and how it ended, for people."""
        arguments = [*self._arguments, "--session", str(attempt.session), "--seconds", str(seconds)]
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
        return code, "a kill, because it did not end when it was to" if hangs else describe_exit(code)

    async def _judge(
        self, trial: Trial, session: int, owned: Sequence[OwnedTrigger], end: ProcessEnd, exit: str
    ) -> None:
        """Fail the task of the culprit, or reserve those that are to be tried again."""
        verdict = self._suspects.note_fatal(trial.number, end)
        self._failures = 0 if end.running else self._failures + 1
        log.warning("the process of triggers that are tried apart has ended", triggers=len(end.running), exit=exit)
        for one in owned:
            if one.id == verdict.culprit:
                error = (
                    f"the process that ran this trigger, and no other, ended with {exit}, {trial.deaths + 1} times in "
                    "a row; a trigger must not end its process, crash it, block it for ever or use up the memory"
                )
                log.error("a trigger ends the process that runs it; its task fails", trigger=one.id, exit=exit)
                with contextlib.suppress(TidemillError):  # its task has moved on
                    await call_patiently(self._store, FailTrigger(session, one.id, one.token, error))
        await self._settle(session, verdict)


def _build_end(owned: Sequence[OwnedTrigger], lived_seconds: float, at: float, killed: bool) -> ProcessEnd:
    running = {one.id: one.stream for one in owned if one.running}
    return ProcessEnd(running, lived_seconds, at, killed, [one.id for one in owned if not one.running])
