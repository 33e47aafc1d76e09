"""Finds the trigger that ends the triggerer, by running those that may have done so in processes of their own.

`core.triggers.suspects` decides whom to try, and whom to blame. Suspects are reserved in the store for this process, or
for the service of the trial that they are in, so that the triggerer runs all others meanwhile.

Invariants: suspects are reserved before what the dead triggerer held is free; a trial runs one process at a time, and
that has ended before anybody else may run its triggers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence

import structlog

from tidemill.core.errors import TidemillError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.triggers.suspects import ALONE_DEATHS, Suspects, Trial
from tidemill.services.dev.child import describe_exit, start_service
from tidemill.store.calls import (
    BeginService,
    FailTrigger,
    ListOwnedTriggers,
    LoseService,
    OwnedTrigger,
    ReserveTriggers,
)
from tidemill.store.database import Caller
from tidemill.store.remote import call_patiently

log = structlog.get_logger(__name__)

#: How long a process may take beyond its trial: to start, on a busy machine, and to let triggers clean up.
_GRACE_SECONDS = 60.0


class Trials:
    """The trials of the triggers that may end the triggerer.

    Args:
        store: The store.
        arguments: What follows the Python interpreter on the command line of a triggerer.
        env: Its environment.
        output: Where its standard output and standard error go.
        about: How the service of a trial begins.
    """

    def __init__(
        self, store: Caller, arguments: Sequence[str], env: Mapping[str, str], output: int, about: BeginService
    ) -> None:
        """Try none yet."""
        self._store, self._arguments, self._env, self._output, self._about = store, arguments, env, output, about
        self._holder = 0
        self._suspects = Suspects()
        self._found = asyncio.Event()
        # What was decided about the last dead triggerer: it is asked again if that could not be stored.
        self._decided: tuple[int, tuple[int, ...]] = (0, ())

    async def note_death(self, service: int, lived_seconds: float) -> None:
        """Hold back the triggers of a triggerer that has died, as far as they are suspects.

        Args:
            service: Its service, which has not been ended in the store yet.
            lived_seconds: How long it lived.

        Raises:
            RemoteError: The store cannot be reached; the death is to be noted again.
        """
        owned = await self._store.call(ListOwnedTriggers(service))
        if self._decided[0] != service:
            running = [one.id for one in owned if one.running]
            self._decided = service, self._suspects.note_death(running, lived_seconds)
        held = self._decided[1]
        if held:
            await self._store.call(ReserveTriggers(service, self._holder, held))
            log.warning("a trigger may end the triggerer; those that ran in it are tried apart", triggers=len(held))
            self._found.set()

    async def run(self, holder: int) -> None:
        """Try suspects whenever there are some.

        Args:
            holder: The service of this process, which holds those that wait.
        """
        self._holder = holder
        backoff, failures = Backoff(0.2, 10.0), 0
        while True:
            trial = self._suspects.begin_trial()
            if trial is None:
                await self._found.wait()
                self._found.clear()
                continue
            failures = 0 if await self._try(trial) else failures + 1
            if failures:
                await asyncio.sleep(backoff.compute_delay(failures, random.getrandbits(JITTER_BITS)))

    async def _try(self, trial: Trial) -> bool:
        """Run a trial; return whether its process began to run triggers."""
        service = await call_patiently(self._store, self._about)
        try:
            await call_patiently(self._store, ReserveTriggers(self._holder, service, trial.triggers))
            exit = await self._run(service, trial.seconds)
            if exit is None:
                self._suspects.note_survived()
                return True
            owned = await call_patiently(self._store, ListOwnedTriggers(service))
            await self._judge(service, owned, exit)
            return any(one.running for one in owned)
        finally:
            # Whatever of it is not held back is free.
            with contextlib.suppress(TidemillError):
                await self._store.call(LoseService(service))

    async def _run(self, service: int, seconds: float) -> str | None:
        """Run the process of a trial; return how it ended if it did not outlive that."""
        arguments = [*self._arguments, "--service", str(service), "--seconds", str(seconds)]
        try:
            process = await start_service(arguments, self._env, self._output)
        except OSError as error:
            return str(error)
        try:
            async with asyncio.timeout(seconds + _GRACE_SECONDS):
                code = await process.wait()
        except TimeoutError:
            return "a kill, because it did not end when it was to"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            if process.stdin is not None:
                process.stdin.close()
        return describe_exit(code) if code else None

    async def _judge(self, service: int, owned: Sequence[OwnedTrigger], exit: str) -> None:
        """Fail the task of the culprit, or hold back those that are to be tried again."""
        running = [one.id for one in owned if one.running]
        culprit = self._suspects.note_fatal(running, [one.id for one in owned if not one.running])
        log.warning("the process of triggers that are tried apart has ended", triggers=len(running), exit=exit)
        for one in owned:
            if one.id == culprit:
                error = (
                    f"the process that ran this trigger, and no other, ended with {exit}, {ALONE_DEATHS} times in a "
                    "row; a trigger must not end its process, crash it or use up the memory"
                )
                log.error("a trigger ends the process that runs it; its task fails", trigger=one.id, exit=exit)
                with contextlib.suppress(TidemillError):  # its task has moved on
                    await call_patiently(self._store, FailTrigger(service, one.id, one.token, error))
        waiting = tuple(one.id for one in owned if one.id != culprit)
        await call_patiently(self._store, ReserveTriggers(service, self._holder, waiting))
