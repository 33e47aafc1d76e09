"""The owner's side of a zygote: starts it, requests forks, receives exits, and replaces it when it dies.

All work happens in callbacks of the owner's loop. Invariant: each forked process is reported as ended exactly once,
even if its zygote died with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

import structlog

from tidemill.runtime.process.table import read_state
from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE, end_all
from tidemill.services.zygote.link import ForkedProcess, ForkLink
from tidemill.services.zygote.messages import Setup, Started

log = structlog.get_logger(__name__)

#: The first and the longest pause before a dead zygote is restarted.
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
#: A zygote that is not ready after this long is checked, repeatedly; it may be importing the user's modules.
START_SECONDS = 60.0
#: How long a zygote may take to end its processes and exit.
LEAVE_SECONDS = 5.0
#: Variables hidden from tasks: settings, which may contain secrets.
_PRIVATE = ("TIDEMILL_", "_TIDEMILL_")
#: Set by the parent of this process to an id by which it can kill the processes that zygotes of this process leave
#: behind.
OWNER_VARIABLE = "_TIDEMILL_ZYGOTE_OWNER"


def clean_environment(environ: Mapping[str, str], mark: str) -> dict[str, str]:
    """Return the environment of a zygote and all its forks: without settings, and with the warden's mark.

    Example:
        >>> clean_environment({"HOME": "/", "TIDEMILL_STORE__URL": "postgresql://me:secret@host/db"}, "s1")
        {'HOME': '/', 'TIDEMILL_ENGINE_ID': 's1'}
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(_PRIVATE)}
    return kept | {ENGINE_ID_VARIABLE: mark}


def build_mark(environ: Mapping[str, str]) -> str:
    """Return a unique mark for a new zygote or triggerer and all its descendants."""
    return f"tree-{environ.get(OWNER_VARIABLE) or os.getpid()}-{secrets.token_hex(8)}"


class ZygoteClient:
    """Owns a zygote; must be used on one loop only.

    Args:
        setup: The modules that the zygote imports.
        environ: The environment of the zygote; settings of tidemill are removed.
    """

    def __init__(self, setup: Setup, environ: Mapping[str, str] | None = None) -> None:
        self._setup = setup
        self._environ = dict(os.environ if environ is None else environ)
        self._pause = FIRST_PAUSE_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._mark = ""
        self.pid: int | None = None
        self.ready = asyncio.Event()
        self.link = ForkLink(self._note_started, self._die, self._kill_stuck)

    @property
    def processes(self) -> Mapping[int, ForkedProcess]:
        """The running processes by pid."""
        return self.link.processes

    async def start(self) -> None:
        """Start the zygote and wait until it is ready.

        Raises:
            OSError: The system cannot start another process.
        """
        self._loop = asyncio.get_running_loop()
        self._spawn()
        await self.ready.wait()

    async def fork(self, target: str, request: bytes = b"", fds: Sequence[int] = ()) -> ForkedProcess:
        """Fork a process; see `ForkLink.fork`."""
        return await self.link.fork(target, request, fds)

    def signal(self, process: ForkedProcess, number: signal.Signals | int, *, group: bool = False) -> None:
        """Send a signal to a process; see `ForkLink.signal`."""
        self.link.signal(process, number, group=group)

    async def close(self) -> None:
        """End all forked processes and the zygote."""
        self._closing = True
        for timer in (self._timer, self._start_timer):
            if timer is not None:
                timer.cancel()
        pid = self.pid
        self.ready.clear()
        self.link.lose()
        if pid is not None:
            await self._wait(pid)
            self.pid = None

    # -- the program -----------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        mark = self._mark = build_mark(self._environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                # -P: a file in the current folder must not shadow a module.
                [sys.executable, "-P", "-m", "tidemill.services.zygote"],
                clean_environment(self._find_environment(), mark),
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0), (os.POSIX_SPAWN_DUP2, 2, 1)],
                setsid=True,
                setsigmask=(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.link.attach(ours, self._setup)
        self._watch_start(self.pid)

    def _watch_start(self, pid: int) -> None:
        """Log that a zygote is slow to start; kill one that is suspended."""

        def look() -> None:
            if self.pid != pid or self.ready.is_set() or self._closing:
                return
            if read_state(pid) == "T":
                self._kill_stuck()
                return
            modules = ", ".join(self._setup.user_preload) or "none"
            log.warning(
                f"the zygote, which starts task processes, is still importing; worker.preload: {modules}", pid=pid
            )
            self._watch_start(pid)

        self._start_timer = self._loop.call_later(START_SECONDS, look)

    def _find_environment(self) -> dict[str, str]:
        """Return the environment with this package's location on PYTHONPATH, however this process found it."""
        source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120
        folders = self._environ.get("PYTHONPATH", "").split(os.pathsep)
        if "site-packages" in source or source in folders:
            return self._environ
        return self._environ | {"PYTHONPATH": os.pathsep.join([source, *filter(None, folders)])}

    def _note_started(self, started: Started) -> None:
        for problem in started.problems:
            log.warning(problem)
        self._pause = FIRST_PAUSE_SECONDS
        if self._start_timer is not None:
            self._start_timer.cancel()
        self.ready.set()

    def _die(self) -> None:
        """Handle the death of the zygote, which kills all its forks, and start another one."""
        pid = self.pid
        self.ready.clear()
        if pid is not None:
            self._reap_soon(pid)
        # The zygote's warden does this, too, unless it was killed at the same time.
        self._loop.run_in_executor(None, end_all, self._mark, 0.0, frozenset((os.getpgrp(),)))
        if not self._closing:
            log.error("the zygote, which starts task processes, died; restarting it", pid=pid)
            self._timer = self._loop.call_later(self._pause, self._start_again)
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)

    def _kill_stuck(self) -> None:
        """Kill a zygote that does not respond, for example because it was suspended; another one replaces it."""
        log.error("the zygote, which starts task processes, does not respond; killing it", pid=self.pid)
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _start_again(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            log.warning("cannot start the zygote; retrying", error=str(error))
            self._timer = self._loop.call_later(self._pause, self._start_again)
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)

    def _reap_soon(self, pid: int) -> None:
        """Reap a zygote that has closed its socket and is about to exit."""
        if not self._reap(pid):
            self._loop.call_later(FIRST_PAUSE_SECONDS, self._reap_soon, pid)

    async def _wait(self, pid: int) -> None:
        """Wait until the zygote, which has lost its owner, has exited."""
        deadline = self._loop.time() + LEAVE_SECONDS
        while not self._reap(pid):
            if self._loop.time() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.005)

    @staticmethod
    def _reap(pid: int) -> bool:
        try:
            return os.waitpid(pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True  # other code in this process has reaped it
