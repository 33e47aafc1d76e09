"""A service that `dev` runs as a process of its own: started, watched, and started again when it dies.

Invariants: the process ends with this one, however that ends (its standard input is a pipe whose end it watches); its
end is noticed at once; what it held is freed before it is started again, and what it had started has ended before that,
so that nothing runs twice at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.runtime.log.setup import RELAY_VARIABLE
from tidemill.runtime.process.exitcode import BLOCKED, ExitCode
from tidemill.services.parent import STOP_WORD
from tidemill.services.zygote.client import OWNER_VARIABLE
from tidemill.services.zygote.orphans import end_forked

log = structlog.get_logger(__name__)

#: One that has lived this long is started again without a pause.
_HEALTHY_SECONDS = 30.0
#: Beyond what the service itself allows for its drain.
_KILL_SECONDS = 5.0
#: Before a death that could not be stored is told again.
_STORE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Death:
    """A process that ended without being told to.

    Attributes:
        pid: Its process id.
        exit: How it ended, for people.
        lived_seconds: How long ago it was started.
        at: When it ended, by the clock of the event loop.
        killed: Whether it was killed (SIGKILL), by whomever.
        explained: Whether it has said which trigger made it end, and that has failed.
    """

    pid: int
    exit: str
    lived_seconds: float
    at: float
    killed: bool
    explained: bool = False


class Child:
    """A service in a process of its own.

    Args:
        name: What it is, for people: `worker`, `triggerer`.
        arguments: What follows the Python interpreter on its command line.
        env: Its environment.
        output: Where its standard output and standard error go.
        on_death: Called with each process that ended without being told to, before the next one is started; called
            again if the store cannot be reached.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        output: int,
        on_death: Callable[[Death], Awaitable[None]],
    ) -> None:
        """Start nothing yet."""
        self.name = name
        self._arguments = arguments
        self._env = dict(env)
        self._output = output
        self._on_death = on_death
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._backoff = Backoff(0.2, 10.0)

    @property
    def pid(self) -> int | None:
        """The process id; None: it does not run at this moment."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self) -> None:
        """Keep it running until `stop`; returns once it has ended then.

        Raises:
            ConfigError: It ended because of its configuration, and would do so again.
        """
        self._ended.clear()
        try:
            await self._keep_running()
        finally:
            self._ended.set()

    async def _keep_running(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = asyncio.get_running_loop().time()
            # Begins with the process that the next `dev` knows, in case this one is killed.
            owner = f"{os.getpid()}-{secrets.token_hex(8)}"
            try:
                process = await self._start(owner)
            except OSError as error:
                what, why = "cannot be started; it is tried again", str(error)
            else:
                code = await self._wait(process, owner, began)
                if self._stopping.is_set():
                    return
                if code == ExitCode.CONFIG:
                    raise ConfigError(f"the {self.name} cannot be run with this configuration; the log says why")
                what, why = "has ended; it is started again", describe_exit(code)
            failures = 1 if asyncio.get_running_loop().time() - began > _HEALTHY_SECONDS else failures + 1
            pause = self._backoff.compute_delay(failures, random.getrandbits(JITTER_BITS))
            log.warning(f"the {self.name} {what}", code=why, seconds=round(pause, 1))
            await self._pause(pause)

    async def _pause(self, seconds: float) -> None:
        """Wait, but not beyond the moment in which it is to stop."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _start(self, owner: str) -> asyncio.subprocess.Process:
        process = self._process = await start_service(
            self._arguments, self._env | {OWNER_VARIABLE: owner}, self._output
        )
        if self._stopping.is_set():
            stop_service(process)
        return process

    async def _wait(self, process: asyncio.subprocess.Process, owner: str, began: float) -> int:
        """Wait until it has ended, and free what it held."""
        code = await process.wait()
        now = asyncio.get_running_loop().time()
        killed, explained = code == -signal.SIGKILL, code == BLOCKED
        death = Death(process.pid, describe_exit(code), now - began, now, killed, explained)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        if code:
            # Its zygote and that one's warden do so, too; but the tasks are free for others only when they have.
            await asyncio.to_thread(end_forked, owner)
        while True:
            try:
                await self._on_death(death)
            except RemoteError as error:
                log.warning(f"what the {self.name} held cannot be freed yet; retrying", error=str(error))
            else:
                return code
            await self._pause(_STORE_SECONDS)
            if self._stopping.is_set():
                return code  # the next start frees it

    async def stop(self, drain_seconds: float) -> None:
        """Let it finish what it does, for some seconds, then end it; `run` returns.

        Args:
            drain_seconds: What its own drain may take.
        """
        self._stopping.set()
        if self._process is not None:
            stop_service(self._process)
        try:
            # Also if it is just being started, or its death is being noted.
            await asyncio.wait_for(self._ended.wait(), drain_seconds + _KILL_SECONDS)
        except TimeoutError:
            log.warning(f"the {self.name} does not end; it is killed", pid=self.pid)
            self._signal(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _KILL_SECONDS)

    def replace(self) -> None:
        """Kill a process that hangs; another one is started."""
        self._signal(signal.SIGKILL)

    def kill(self) -> None:
        """End it at once."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


async def start_service(arguments: Sequence[str], env: Mapping[str, str], output: int) -> asyncio.subprocess.Process:
    """Start a process of a service: what follows the interpreter on its command line, its environment, its output."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={**env, RELAY_VARIABLE: "1"},
        # Ctrl-C in a terminal is for `dev`, which stops its services in order.
        start_new_session=True,
    )


def stop_service(process: asyncio.subprocess.Process) -> None:
    """Tell a process of a service to stop: SIGTERM alone may come from whomever."""
    if process.returncode is None:
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.write(STOP_WORD)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)


def describe_exit(code: int) -> str:
    """Return how a process ended, for people: the name of a signal, or its exit code.

    Example:
        >>> describe_exit(-11)
        'SIGSEGV'
    """
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    if code == BLOCKED:
        return "a trigger that blocked it"
    if code == ExitCode.INTERNAL:
        return "an error inside tidemill"
    return f"exit code {code}"
