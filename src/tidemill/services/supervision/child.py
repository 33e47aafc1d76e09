"""Supervises a service in its own process: starts it, watches it and restarts it when it dies.

Invariants:
- The process ends with this one, however this one ends; it watches its standard input, a pipe from here.
- Its exit is detected at once.
- Before a restart, all processes it had started have ended and its work is released, so nothing runs twice at the same
  time.
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

#: A process that lived longer than this is restarted without backoff.
_HEALTHY_SECONDS = 30.0
#: Added to the service's own drain timeout.
_KILL_SECONDS = 5.0
#: The interval between attempts to report a death to the store.
_STORE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Death:
    """An unexpected exit of a process.

    Attributes:
        pid: The process id.
        exit: A description of the exit, for users.
        lived_seconds: The time since the start.
        at: The time of the exit, by the clock of the event loop.
        killed: Whether the process was killed by SIGKILL, from any source.
        explained: Whether the process named the trigger that made it exit; that trigger has failed.
    """

    pid: int
    exit: str
    lived_seconds: float
    at: float
    killed: bool
    explained: bool = False


class Child:
    """A service in its own process.

    Args:
        name: The name for messages: `worker`, `triggerer`.
        arguments: The arguments of the Python interpreter.
        env: The environment.
        output: The descriptor for standard output and standard error.
        on_death: Called for each unexpected exit before the next start, and again if the store cannot be reached.

    Attributes:
        arguments: The arguments of the next start.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        output: int,
        on_death: Callable[[Death], Awaitable[None]],
    ) -> None:
        self.name = name
        self.arguments = tuple(arguments)
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
        """The process id; None while no process runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self) -> None:
        """Keep the service running until `stop`; returns when it has exited.

        Raises:
            ConfigError: It exited because of its configuration, and a restart would fail in the same way.
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
            # Starts with this process's pid, by which the next `dev` recognises it if this one is killed.
            owner = f"{os.getpid()}-{secrets.token_hex(8)}"
            try:
                process = await self._start(owner)
            except OSError as error:
                what, why = "cannot be started; retrying", str(error)
            else:
                code = await self._wait(process, owner, began)
                if self._stopping.is_set():
                    return
                if code == ExitCode.CONFIG:
                    raise ConfigError(
                        f"the {self.name} cannot run with this configuration; see its messages in the log"
                    )
                what, why = "has exited; restarting it", describe_exit(code)
            failures = 1 if asyncio.get_running_loop().time() - began > _HEALTHY_SECONDS else failures + 1
            pause = self._backoff.compute_delay(failures, random.getrandbits(JITTER_BITS))
            log.warning(f"the {self.name} {what}", code=why, seconds=round(pause, 1))
            await self._pause(pause)

    async def _pause(self, seconds: float) -> None:
        """Wait for some seconds, or until the service is to stop."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _start(self, owner: str) -> asyncio.subprocess.Process:
        process = self._process = await start_service(self.arguments, self._env | {OWNER_VARIABLE: owner}, self._output)
        if self._stopping.is_set():
            stop_service(process)
        return process

    async def _wait(self, process: asyncio.subprocess.Process, owner: str, began: float) -> int:
        """Wait for the exit, and release the service's work."""
        code = await process.wait()
        now = asyncio.get_running_loop().time()
        killed, explained = code == -signal.SIGKILL, code == BLOCKED
        death = Death(process.pid, describe_exit(code), now - began, now, killed, explained)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        if code:
            # The zygote and its warden kill these processes, too, but the work must not be released before they have
            # ended.
            await asyncio.to_thread(end_forked, owner)
        while True:
            try:
                await self._on_death(death)
            except RemoteError as error:
                log.warning(f"cannot release the work of the {self.name} yet; retrying", error=str(error))
            else:
                return code
            await self._pause(_STORE_SECONDS)
            if self._stopping.is_set():
                return code  # the next start of tidemill releases it

    async def stop(self, drain_seconds: float) -> None:
        """Let the service drain, then end it; `run` returns.

        Args:
            drain_seconds: The service's own drain timeout.
        """
        self._stopping.set()
        if self._process is not None:
            stop_service(self._process)
        try:
            # This also covers a process that is just starting, and a death that is being reported.
            await asyncio.wait_for(self._ended.wait(), drain_seconds + _KILL_SECONDS)
        except TimeoutError:
            log.warning(f"the {self.name} does not stop; killing it", pid=self.pid)
            self._signal(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _KILL_SECONDS)

    def replace(self) -> None:
        """Kill a hanging process; another one is started."""
        self._signal(signal.SIGKILL)

    def kill(self) -> None:
        """Kill the service without a restart."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


async def start_service(arguments: Sequence[str], env: Mapping[str, str], output: int) -> asyncio.subprocess.Process:
    """Start a service with the given interpreter arguments, environment and output descriptor."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={**env, RELAY_VARIABLE: "1"},
        # Ctrl-C in a terminal must reach only `dev`, which stops its services in order.
        start_new_session=True,
    )


def stop_service(process: asyncio.subprocess.Process) -> None:
    """Ask a service to stop. The word marks the SIGTERM as ours; any process may send SIGTERM."""
    if process.returncode is None:
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.write(STOP_WORD)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)


def describe_exit(code: int) -> str:
    """Return a description of a process's exit for users: the name of the signal, or the exit code.

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
