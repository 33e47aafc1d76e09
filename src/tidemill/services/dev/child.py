"""A service that `dev` runs as a process of its own: started, watched, and started again when it dies.

Invariants: the process ends with this one, however that ends (its standard input is a pipe whose end it watches); its
end is noticed at once; what it held is freed before it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from tidemill.core.errors import ConfigError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.runtime.exitcode import ExitCode
from tidemill.runtime.log import RELAY_VARIABLE

log = structlog.get_logger(__name__)

#: One that has lived this long is started again without a pause.
_HEALTHY_SECONDS = 30.0
#: Beyond what the service itself allows for its drain.
_KILL_SECONDS = 5.0


class Child:
    """A service in a process of its own.

    Args:
        name: What it is, for people: `worker`, `triggerer`.
        arguments: What follows the Python interpreter on its command line.
        env: Its environment.
        output: Where its standard output and standard error go.
        on_death: Called with the process id of each one that ended without being told to, before the next starts.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        output: int,
        on_death: Callable[[int], Awaitable[None]],
    ) -> None:
        """Start nothing yet."""
        self.name = name
        self._arguments = arguments
        self._env = {**env, RELAY_VARIABLE: "1"}
        self._output = output
        self._on_death = on_death
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
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
        failures = 0
        while not self._stopping.is_set():
            began = asyncio.get_running_loop().time()
            code = await self._run_once()
            if self._stopping.is_set():
                return
            if code == ExitCode.CONFIG:
                raise ConfigError(f"the {self.name} cannot be run with this configuration; the log says why")
            failures = 1 if asyncio.get_running_loop().time() - began > _HEALTHY_SECONDS else failures + 1
            pause = self._backoff.compute_delay(failures, random.getrandbits(JITTER_BITS))
            log.warning(
                f"the {self.name} has ended; it is started again", code=_describe(code), seconds=round(pause, 1)
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _run_once(self) -> int:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            env=self._env,
            # Ctrl-C in a terminal is for `dev`, which stops its services in order.
            start_new_session=True,
        )
        assert process.stdin is not None
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        code = await process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        await self._on_death(process.pid)
        return code

    async def stop(self, drain_seconds: float) -> None:
        """Let it finish what it does, for some seconds, then end it; `run` returns.

        Args:
            drain_seconds: What its own drain may take.
        """
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), drain_seconds + _KILL_SECONDS)
        except TimeoutError:
            log.warning(f"the {self.name} does not end; it is killed", pid=process.pid)
            self._signal(signal.SIGKILL)
            await process.wait()

    def kill(self) -> None:
        """End it at once."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _describe(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    if code == ExitCode.INTERNAL:
        return "an error inside tidemill"
    return str(code)
