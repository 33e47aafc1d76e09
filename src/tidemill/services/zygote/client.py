"""A zygote as its owner sees it: starts it, has it fork, hears which processes have ended, replaces it when it dies.

Everything happens in callbacks of the owner's loop. Invariants: each process that was forked is reported as ended
once, also if its zygote died with it; the owner's end of the socket is in no other process, so that the zygote notices
the owner's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from tidemill.core.errors import RemoteError
from tidemill.runtime.warden import ENGINE_ID_VARIABLE
from tidemill.services.zygote.messages import (
    MAX_PACKET_BYTES,
    Exited,
    Fork,
    Forked,
    NotForked,
    Order,
    Setup,
    Signal,
    Started,
    decode_report,
    encode,
)

log = structlog.get_logger(__name__)

#: Between the starts of zygotes that die, at first and at most.
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
#: How long a zygote may take to end its processes and itself.
LEAVE_SECONDS = 5.0
#: The variables that no task sees: settings, and with them secrets.
_PRIVATE = ("TIDEMILL_", "_TIDEMILL_")
#: What the parent of this process calls it, so that it can end what zygotes of this process leave behind.
OWNER_VARIABLE = "_TIDEMILL_ZYGOTE_OWNER"


class ZygoteError(RemoteError):
    """The process could not be forked."""


@dataclass(eq=False, slots=True)
class ForkedProcess:
    """A process that the zygote forked.

    Attributes:
        pid: Its id, and that of its group.
        ended: Done when it has ended.
        lost: Whether it was killed because the zygote died, or was closed.
    """

    pid: int
    ended: asyncio.Future[Exited] = field(repr=False)
    lost: bool = False


def clean_environment(environ: Mapping[str, str], mark: str) -> dict[str, str]:
    """Return the environment of a zygote, and so of all that it forks: without settings, with the warden's mark.

    Example:
        >>> clean_environment({"HOME": "/", "TIDEMILL_STORE__URL": "postgresql://me:secret@host/db"}, "s1")
        {'HOME': '/', 'TIDEMILL_ENGINE_ID': 's1'}
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(_PRIVATE)}
    return kept | {ENGINE_ID_VARIABLE: mark}


def build_mark(environ: Mapping[str, str]) -> str:
    """Return what a new zygote and all that it forks carry in their environment; another one for each zygote."""
    return f"zygote-{environ.get(OWNER_VARIABLE) or os.getpid()}-{secrets.token_hex(8)}"


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
        self._socket: socket.socket | None = None
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._forks: dict[int, asyncio.Future[ForkedProcess]] = {}
        self._processes: dict[int, ForkedProcess] = {}
        self._number = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self.pid: int | None = None
        self.ready = asyncio.Event()

    @property
    def processes(self) -> Mapping[int, ForkedProcess]:
        """The processes that run, by their ids."""
        return self._processes

    async def start(self) -> None:
        """Start the zygote and wait until it is ready.

        Raises:
            OSError: The system has no room for another process.
        """
        self._loop = asyncio.get_running_loop()
        self._spawn()
        await self.ready.wait()

    async def fork(self, target: str, request: bytes = b"", fds: Sequence[int] = ()) -> ForkedProcess:
        """Fork a process that calls `module:function` with the request and its own copies of the descriptors.

        Args:
            target: What it calls; the process ends with the number that this returns.
            request: At most 100,000 bytes.
            fds: Passed to it; the caller still has to close its own.

        Raises:
            ZygoteError: There is no room for another process, or the zygote died.
            ValueError: The request is too long.
        """
        self._number += 1
        packet = encode(Fork(self._number, target, request))
        if self._socket is None:
            raise ZygoteError("the zygote, which starts task processes, is not running")
        waiting: asyncio.Future[ForkedProcess] = self._loop.create_future()
        self._forks[self._number] = waiting
        copies = tuple(os.dup(fd) for fd in fds)
        self._send(packet, copies)
        return await waiting

    def signal(self, process: ForkedProcess, number: signal.Signals | int, *, group: bool = False) -> None:
        """Send a signal to a process, or to all of its group; nothing happens if it has ended."""
        if process.pid in self._processes and self._socket is not None:
            self._tell(Signal(process.pid, int(number), group))

    async def close(self) -> None:
        """End all processes and the zygote."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        pid = self.pid
        self._lose()
        if pid is not None:
            await self._wait(pid)
            self.pid = None

    # -- the program -----------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        mark = build_mark(self._environ)
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
        ours.setblocking(False)
        self._socket = ours
        self._loop.add_reader(ours, self._read)
        self._tell(self._setup)

    def _find_environment(self) -> dict[str, str]:
        """Return the environment with the place of this package, wherever this process found it."""
        source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120
        folders = self._environ.get("PYTHONPATH", "").split(os.pathsep)
        if "site-packages" in source or source in folders:
            return self._environ
        return self._environ | {"PYTHONPATH": os.pathsep.join([source, *filter(None, folders)])}

    def _tell(self, order: Order) -> None:
        self._send(encode(order), ())

    def _send(self, packet: bytes, fds: tuple[int, ...]) -> None:
        self._unsent.append((packet, fds))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            while self._unsent:
                packet, fds = self._unsent[0]
                socket.send_fds(self._socket, [packet], list(fds))
                self._unsent.popleft()
                _close_all(fds)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            return  # it is gone, as reading will tell
        self._loop.remove_writer(self._socket)

    # -- what it says ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while self._socket is not None:
            try:
                packet = self._socket.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._die()
                return
            self._note(packet)

    def _note(self, packet: bytes) -> None:
        match decode_report(packet):
            case Started(problems):
                for problem in problems:
                    log.warning(problem)
                self._pause = FIRST_PAUSE_SECONDS
                self.ready.set()
            case Forked(number, pid):
                process = self._processes[pid] = ForkedProcess(pid, self._loop.create_future())
                waiting = self._forks.pop(number)
                if waiting.done():  # nobody waits for it any more
                    self.signal(process, signal.SIGKILL, group=True)
                else:
                    waiting.set_result(process)
            case NotForked(number, error):
                if not (waiting := self._forks.pop(number)).done():
                    waiting.set_exception(ZygoteError(f"a task process cannot be started: {error}"))
            case Exited(pid) as exited:
                self._end(self._processes.pop(pid), exited)

    @staticmethod
    def _end(process: ForkedProcess, exited: Exited) -> None:
        if not process.ended.done():
            process.ended.set_result(exited)

    def _die(self) -> None:
        """The zygote is gone: end what it forked, and start another one."""
        pid = self.pid
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        self._lose()
        if pid is not None:
            self._reap_soon(pid)
        if not self._closing:
            log.error("the zygote, which starts task processes, died; it is started again", pid=pid)
            self._timer = self._loop.call_later(self._pause, self._start_again)
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)

    def _start_again(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            log.warning("the zygote cannot be started yet", error=str(error))
            self._timer = self._loop.call_later(self._pause, self._start_again)
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)

    def _lose(self) -> None:
        """Forget everything about the zygote but its id."""
        self.ready.clear()
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.lost = True
            self._end(process, Exited(process.pid, -signal.SIGKILL))
        forks, self._forks = self._forks, {}
        for waiting in forks.values():
            if not waiting.done():
                waiting.set_exception(ZygoteError("the zygote, which starts task processes, died"))

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


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
