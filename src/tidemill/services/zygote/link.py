"""The owner's side of the socket to a process that forks on request.

All work happens in callbacks of the owner's loop. Invariants: each forked process is reported as ended exactly once,
even if the forking process died; no other process has the owner's end of the socket, so that the other side notices
when the owner exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.core.errors import RemoteError
from tidemill.runtime.process.table import find_descendants
from tidemill.services.zygote.messages import (
    MAX_PACKET_BYTES,
    Exited,
    Fork,
    Forked,
    NotForked,
    Order,
    Ping,
    Pong,
    Setup,
    Signal,
    Started,
    decode_report,
    encode,
)

#: The forking process normally answers within milliseconds. A request still unanswered at two checks with this pause
#: counts as stuck, for example because the process was suspended. One check would not suffice, since this process may
#: have been suspended itself.
LOOK_SECONDS = 10.0


class ZygoteError(RemoteError):
    """The process could not be forked."""


@dataclass(eq=False, slots=True)
class ForkedProcess:
    """A forked process.

    Attributes:
        pid: The id of the process and of its group.
        ended: Done when the process has ended.
        lost: Whether it was killed because the forking process died or was closed.
    """

    pid: int
    ended: asyncio.Future[Exited] = field(repr=False)
    lost: bool = False


class ForkLink:
    """Requests forks; must be used on one loop only.

    Args:
        on_started: Called when the other side is ready.
        on_gone: Called when the other side has exited; its processes have been killed.
        on_stuck: Called periodically while the other side does not respond; it should be killed.
    """

    def __init__(
        self, on_started: Callable[[Started], None], on_gone: Callable[[], None], on_stuck: Callable[[], None]
    ) -> None:
        self._on_started, self._on_gone, self._on_stuck = on_started, on_gone, on_stuck
        self._loop: asyncio.AbstractEventLoop
        self._socket: socket.socket | None = None
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._forks: dict[int, asyncio.Future[ForkedProcess]] = {}
        self._processes: dict[int, ForkedProcess] = {}
        self._number = 0
        #: The numbers of unanswered requests, oldest first, and the oldest of them at the last check.
        self._unanswered: dict[int, None] = {}
        self._overdue: int | None = None
        self._is_ready = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def processes(self) -> Mapping[int, ForkedProcess]:
        """The running processes by pid."""
        return self._processes

    @property
    def is_busy(self) -> bool:
        """Whether processes are running or being forked."""
        return bool(self._processes or self._forks)

    def attach(self, connection: socket.socket, setup: Setup) -> None:
        """Use a connected socket, which the link closes in the end."""
        self._loop = asyncio.get_running_loop()
        connection.setblocking(False)
        self._socket = connection
        self._loop.add_reader(connection, self._read)
        self._tell(setup)

    async def fork(self, target: str, request: bytes = b"", fds: Sequence[int] = ()) -> ForkedProcess:
        """Fork a process that calls `module:function` with the request and its own copies of the descriptors.

        Args:
            target: The function to call; the process exits with the code that it returns.
            request: At most 100,000 bytes.
            fds: Descriptors to pass; the caller still has to close its own.

        Raises:
            ZygoteError: The system cannot start another process, or the zygote died.
            OSError: The process has too many open descriptors.
            ValueError: The request is too long.
        """
        packet = encode(Fork(self._number + 1, target, request))
        if self._socket is None:
            raise ZygoteError("the zygote, which starts task processes, is not running")
        copies = _copy_all(fds)
        self._expect_answer()
        waiting: asyncio.Future[ForkedProcess] = self._loop.create_future()
        self._forks[self._number] = waiting
        self._send(packet, copies)
        return await waiting

    def signal(self, process: ForkedProcess, number: signal.Signals | int, *, group: bool = False) -> None:
        """Send a signal to a process or its whole group; no effect if the process has ended."""
        if process.pid in self._processes and self._socket is not None:
            self._tell(Signal(process.pid, int(number), group))
            if number == signal.SIGKILL:  # an undelivered SIGKILL would go unnoticed, so expect an answer
                self._expect_answer()
                self._tell(Ping(self._number))

    def _expect_answer(self) -> None:
        """Allocate the next number and expect an answer to it."""
        self._number += 1
        self._unanswered[self._number] = None
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Check whether the other side is stuck; until it is ready, it may take any time."""
        self._timer = None
        oldest = next(iter(self._unanswered), None) if self._is_ready else None
        if oldest is not None and oldest == self._overdue:
            self._on_stuck()
        self._overdue = oldest
        if self._unanswered:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

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
            return  # the other side has exited; `_read` handles that
        self._loop.remove_writer(self._socket)

    # -- reports ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while self._socket is not None:
            try:
                packet = self._socket.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._kill_processes()
                self.lose()
                self._on_gone()
                return
            self._note(packet)

    def _note(self, packet: bytes) -> None:
        match decode_report(packet):
            case Started() as started:
                self._is_ready = True
                self._on_started(started)
            case Pong(number):
                del self._unanswered[number]
            case Forked(number, pid):
                del self._unanswered[number]
                process = self._processes[pid] = ForkedProcess(pid, self._loop.create_future())
                waiting = self._forks.pop(number)
                if waiting.done():  # the caller was cancelled
                    self.signal(process, signal.SIGKILL, group=True)
                else:
                    waiting.set_result(process)
            case NotForked(number, error):
                del self._unanswered[number]
                if not (waiting := self._forks.pop(number)).done():
                    waiting.set_exception(ZygoteError(f"a task process cannot be started: {error}"))
            case Exited(pid) as exited:
                self._end(self._processes.pop(pid), exited)

    @staticmethod
    def _end(process: ForkedProcess, exited: Exited) -> None:
        if not process.ended.done():
            process.ended.set_result(exited)

    def _kill_processes(self) -> None:
        # Descendants that left their groups and carry no mark are unknown to the warden, but are below these processes
        # as long as those live.
        below = find_descendants(*self._processes)
        for pid in self._processes:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def lose(self) -> None:
        """Close the socket; all forked processes count as lost."""
        self._is_ready, self._overdue = False, None
        self._unanswered.clear()
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


def _copy_all(fds: Sequence[int]) -> tuple[int, ...]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))  # noqa: PERF401 - those before a failure are closed
    except OSError:
        _close_all(copies)
        raise
    return tuple(copies)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
