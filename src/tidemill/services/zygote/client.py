"""A zygote as its owner sees it: starts it, has it fork, hears which processes have ended, replaces it when it dies.

Everything happens in callbacks of the owner's loop. Invariants: each process that was forked is reported as ended
once, also if its zygote died with it.
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

#: Between the starts of zygotes that die, at first and at most.
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
#: After this long, one that has not begun is looked at, again and again: it imports what users preload.
START_SECONDS = 60.0
#: How long a zygote may take to end its processes and itself.
LEAVE_SECONDS = 5.0
#: The variables that no task sees: settings, and with them secrets.
_PRIVATE = ("TIDEMILL_", "_TIDEMILL_")
#: What the parent of this process calls it, so that it can end what zygotes of this process leave behind.
OWNER_VARIABLE = "_TIDEMILL_ZYGOTE_OWNER"


def clean_environment(environ: Mapping[str, str], mark: str) -> dict[str, str]:
    """Return the environment of a zygote, and so of all that it forks: without settings, with the warden's mark.

    Example:
        >>> clean_environment({"HOME": "/", "TIDEMILL_STORE__URL": "postgresql://me:secret@host/db"}, "s1")
        {'HOME': '/', 'TIDEMILL_ENGINE_ID': 's1'}
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(_PRIVATE)}
    return kept | {ENGINE_ID_VARIABLE: mark}


def build_mark(environ: Mapping[str, str]) -> str:
    """Return what a new zygote, or a triggerer, and all that it starts carry; another one each time."""
    return f"tree-{environ.get(OWNER_VARIABLE) or os.getpid()}-{secrets.token_hex(8)}"


class ZygoteClient:
    """Owns a zygote; use it on one loop only.

    Args:
        setup: What the zygote imports.
        environ: What it is started with; settings of tidemill are left out.
    """

    def __init__(self, setup: Setup, environ: Mapping[str, str] | None = None) -> None:
        """Start nothing yet."""
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
        """The processes that run, by their ids."""
        return self.link.processes

    async def start(self) -> None:
        """Start the zygote and wait until it is ready.

        Raises:
            OSError: The system has no room for another process.
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
        """End all processes and the zygote."""
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
                # -P: a file in the current folder must not take the place of a module.
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
        """Say that a zygote takes long to begin; kill one that was stopped."""

        def look() -> None:
            if self.pid != pid or self.ready.is_set() or self._closing:
                return
            if read_state(pid) == "T":
                self._kill_stuck()
                return
            modules = ", ".join(self._setup.user_preload) or "none"
            log.warning(f"the zygote, which starts task processes, still imports; worker.preload: {modules}", pid=pid)
            self._watch_start(pid)

        self._start_timer = self._loop.call_later(START_SECONDS, look)

    def _find_environment(self) -> dict[str, str]:
        """Return the environment with the place of this package, wherever this process found it."""
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
        """The zygote is gone, with all that it forked: start another one."""
        pid = self.pid
        self.ready.clear()
        if pid is not None:
            self._reap_soon(pid)
        # Its warden does so, too, unless that was killed with it.
        self._loop.run_in_executor(None, end_all, self._mark, 0.0, frozenset((os.getpgrp(),)))
        if not self._closing:
            log.error("the zygote, which starts task processes, died; it is started again", pid=pid)
            self._timer = self._loop.call_later(self._pause, self._start_again)
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)

    def _kill_stuck(self) -> None:
        """Kill a zygote that does not answer, because it was stopped, say; another one takes its place."""
        log.error("the zygote, which starts task processes, does not answer; it is killed", pid=self.pid)
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _start_again(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            log.warning("the zygote cannot be started yet", error=str(error))
            self._timer = self._loop.call_later(self._pause, self._start_again)
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)

    def _reap_soon(self, pid: int) -> None:
        """Reap a zygote that has closed its socket, and is about to be gone."""
        if not self._reap(pid):
            self._loop.call_later(FIRST_PAUSE_SECONDS, self._reap_soon, pid)

    async def _wait(self, pid: int) -> None:
        """Wait until the zygote, which has lost its owner, is gone."""
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
            return True  # something else in this process did
