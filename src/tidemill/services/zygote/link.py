"""The socket between a process that forks on request and its owner, as the owner sees it.

Everything happens in callbacks of the owner's loop. Invariants: each process that was forked is reported as ended
once, also if what forked it died; the owner's end of the socket is in no other process, so that the other side notices
the owner's end.
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

#: What forks answers within milliseconds. What has not been answered at two looks with this pause is not expected any
#: more: the other side was stopped, say. One look would not do, since this process may have stood still itself.
LOOK_SECONDS = 10.0


class ZygoteError(RemoteError):
    """The process could not be forked."""


@dataclass(eq=False, slots=True)
class ForkedProcess:
    """A process that was forked.

    Attributes:
        pid: Its id, and that of its group.
        ended: Done when it has ended.
        lost: Whether it was killed because what forked it died, or was closed.
    """

    pid: int
    ended: asyncio.Future[Exited] = field(repr=False)
    lost: bool = False


class ForkLink:
    """Has processes forked; use it on one loop only.

    Args:
        on_started: Called when the other side is ready.
        on_gone: Called when it is gone; its processes have been killed.
        on_stuck: Called when it does not answer, now and then until it does: it should be killed.
    """

    def __init__(
        self, on_started: Callable[[Started], None], on_gone: Callable[[], None], on_stuck: Callable[[], None]
    ) -> None:
        """Be connected to nothing yet."""
        self._on_started, self._on_gone, self._on_stuck = on_started, on_gone, on_stuck
        self._loop: asyncio.AbstractEventLoop
        self._socket: socket.socket | None = None
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._forks: dict[int, asyncio.Future[ForkedProcess]] = {}
        self._processes: dict[int, ForkedProcess] = {}
        self._number = 0
        #: What is not answered yet, oldest first, and the oldest of them at the last look.
        self._unanswered: dict[int, None] = {}
        self._overdue: int | None = None
        self._is_ready = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def processes(self) -> Mapping[int, ForkedProcess]:
        """The processes that run, by their ids."""
        return self._processes

    @property
    def is_busy(self) -> bool:
        """Whether processes run, or are being forked."""
        return bool(self._processes or self._forks)

    def attach(self, connection: socket.socket, setup: Setup) -> None:
        """Speak over a socket, which is closed in the end."""
        self._loop = asyncio.get_running_loop()
        connection.setblocking(False)
        self._socket = connection
        self._loop.add_reader(connection, self._read)
        self._tell(setup)

    async def fork(self, target: str, request: bytes = b"", fds: Sequence[int] = ()) -> ForkedProcess:
        """Fork a process that calls `module:function` with the request and its own copies of the descriptors.

        Args:
            target: What it calls; the process ends with the number that this returns.
            request: At most 100,000 bytes.
            fds: Passed to it; the caller still has to close its own.

        Raises:
            ZygoteError: There is no room for another process, or the zygote died.
            OSError: There is no room for more descriptors.
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
        """Send a signal to a process, or to all of its group; nothing happens if it has ended."""
        if process.pid in self._processes and self._socket is not None:
            self._tell(Signal(process.pid, int(number), group))
            if number == signal.SIGKILL:  # nobody else would notice that it is not sent
                self._expect_answer()
                self._tell(Ping(self._number))

    def _expect_answer(self) -> None:
        """Expect an answer to the next number."""
        self._number += 1
        self._unanswered[self._number] = None
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Find out whether the other side is stuck; before it is ready, it may take any time."""
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
                if waiting.done():  # nobody waits for it any more
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
        # What left their groups without the mark by which the warden would know it is below them as long as they live.
        below = find_descendants(*self._processes)
        for pid in self._processes:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def lose(self) -> None:
        """Close the socket; what was forked counts as lost."""
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
