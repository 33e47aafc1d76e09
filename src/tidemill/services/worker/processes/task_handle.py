"""A task process, as seen by its worker: its sockets and pipes, its attempt, and its end.

Everything happens in callbacks of the worker's loop. Invariants: everything a process writes before it reports or ends
is in the log of its attempt by then; each descriptor is closed once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import structlog

from tidemill.runtime.framing import FrameSplitter
from tidemill.runtime.log.task_lines import WrittenLine
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.services.worker.logs.logs import AttemptLog
from tidemill.services.worker.messages import (
    MAX_MESSAGE_BYTES,
    TASK_TARGET,
    AskStore,
    AttemptFinished,
    FileLoaded,
    ForkedTask,
    Leave,
    Order,
    PlaceAwaited,
    decode_word,
    frame,
)
from tidemill.services.zygote.link import ForkedProcess, ForkLink, ZygoteError
from tidemill.services.zygote.messages import Exited

_CHUNK_BYTES = 65_536
_SOCKET_CHUNK_BYTES = 262_144
#: Maximum number of entries read at once, so that a process that writes incessantly does not delay the others.
_MAX_ENTRIES = 512
#: A pipe holds at most 1 MiB, unless root has raised the limit.
_DRAIN_CHUNKS = 16
#: How long a process that has closed its connection may take to end.
_CLOSED_SECONDS = 1.0

log = structlog.get_logger(__name__)

_decode_line = msgspec.msgpack.Decoder(WrittenLine).decode


#: Returns the link that forks a process, and what its template has imported, once both are known.
FindLink = Callable[[], Awaitable[tuple[ForkLink, FileLoaded | None]]]


class Listener(Protocol):
    """Receives the events of task processes; `AttemptProcesses` implements it."""

    def on_loaded(self, handle: TaskHandle, loaded: FileLoaded) -> None:
        """The process has imported its file."""

    def on_ask(self, handle: TaskHandle, ask: AskStore) -> None:
        """The process's attempt calls the store."""

    def on_awaited(self, handle: TaskHandle, awaited: PlaceAwaited) -> None:
        """The process's attempt waits at its `yield`."""

    def on_finished(self, handle: TaskHandle, finished: AttemptFinished) -> None:
        """The attempt in the process has ended."""

    def on_written(self) -> None:
        """There are log lines to store."""

    def on_exited(self, handle: TaskHandle, exited: Exited | None) -> None:
        """The process has ended. `exited` is None if it never existed, or the zygote died."""


class TaskHandle:
    """One task process.

    Args:
        number: Its number in `core.tasks.worker_slots`.
        task: The request with which it is forked.
        find_link: Returns the link that forks it, once it is known.
        listener: Receives its events.
    """

    def __init__(self, number: int, task: ForkedTask, find_link: FindLink, listener: Listener) -> None:
        self.number = number
        self.task = task
        self.process: ForkedProcess | None = None
        self.log: AttemptLog | None = None
        #: The message about the import of its file; None: the file is not imported yet.
        self.loaded: FileLoaded | None = None
        #: The signatures of its files before it was started.
        self.began_with: dict[str, tuple[int, ...]] = {}
        #: The attempt (task and epoch) that it is still cleaning up after, because the task no longer waits for it.
        self.replaced: tuple[int, int] | None = None
        #: Whether it closed its connection without being told to leave.
        self.broke_off = False
        self._find_link = find_link
        self._link: ForkLink | None = None
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._frames = FrameSplitter(MAX_MESSAGE_BYTES)
        self._unsent = b""
        self._wanted: list[tuple[int, bool]] = []
        self._worker: socket.socket | None = None
        self._lines: socket.socket | None = None
        self._outputs: dict[str, int] = {}
        self._ended = False
        self._starting: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()

    def keep_answer(self, answer: asyncio.Task[None]) -> None:
        """Hold a reference to the task that answers a call of the attempt."""
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    def drop_answers(self) -> None:
        """Cancel answers to the ended attempt: its calls must not be executed while other attempts run."""
        for answer in list(self._answers):
            answer.cancel()

    def start(self) -> None:
        """Start forking the process; orders may be sent at once.

        Raises:
            OSError: There are no free descriptors.
        """
        theirs: list[int] = []
        try:
            self._worker, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            theirs.append(worker.detach())
            self._lines, lines = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.append(lines.detach())
            for source in ("stdout", "stderr"):
                self._outputs[source], writer = os.pipe2(os.O_CLOEXEC)
                theirs.append(writer)
        except OSError:
            _close_all(theirs)
            self._close()
            raise
        for each in (self._worker, self._lines):
            each.setblocking(False)
        self._loop.add_reader(self._worker, self._read_words)
        self._loop.add_reader(self._lines, self._read_lines)
        for source, fd in self._outputs.items():
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, self._read_output, source)
        self._starting = self._loop.create_task(self._fork(theirs), name=f"start of task process {self.number}")
        self._starting.add_done_callback(lambda starting: self._note_started(starting, theirs))

    async def _fork(self, theirs: list[int]) -> None:
        try:
            self._link, self.loaded = await self._find_link()
            link = self._link
            process = await link.fork(TASK_TARGET, msgspec.msgpack.encode(self.task), theirs)
        except (ZygoteError, OSError):
            self._end(None)
            return
        self.process = process
        process.ended.add_done_callback(lambda ended: self._end(None if process.lost else ended.result()))
        for number, group in self._wanted:
            link.signal(process, number, group=group)

    def _note_started(self, starting: asyncio.Task[None], theirs: list[int]) -> None:
        _close_all(theirs)
        if starting.cancelled():
            self._end(None)
        elif (error := starting.exception()) is not None:
            log.error("a task process could not be started", exc_info=error)
            self._end(None)

    # -- orders ----------------------------------------------------------------------------------------------------

    def tell(self, order: Order) -> None:
        """Send an order to the process."""
        if self._worker is None:
            return
        self._unsent += frame(order)
        self._flush()

    def leave(self) -> None:
        """Tell the process to end."""
        self.tell(Leave())

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the process or its group, as soon as the process exists."""
        if self.process is not None and self._link is not None:
            self._link.signal(self.process, number, group=group)
        elif number == signal.SIGKILL and self._link is None and self._starting is not None:
            self._starting.cancel()  # the template that is to fork it is importing the file, which may take any time
        else:
            self._wanted.append((number, group))

    def _flush(self) -> None:
        if self._worker is None or not self._unsent:
            return
        try:
            self._unsent = self._unsent[self._worker.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""  # the process has exited; reading detects that
        if self._unsent:
            self._loop.add_writer(self._worker, self._flush)
        else:
            self._loop.remove_writer(self._worker)

    # -- messages and output ---------------------------------------------------------------------------------------

    def _read_words(self) -> None:
        if self._worker is None:
            return
        try:
            chunk = self._worker.recv(_SOCKET_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        try:
            words = [decode_word(data) for data in self._frames.feed(chunk)] if chunk else []
        except (ValueError, msgspec.MsgspecError):  # the user's code has written into the socket
            chunk, words = b"", []
        for word in words:
            match word:
                case FileLoaded():
                    self.loaded = word
                    self._listener.on_loaded(self, word)
                case AskStore():
                    self._listener.on_ask(self, word)
                case PlaceAwaited():
                    self._listener.on_awaited(self, word)
                case AttemptFinished():
                    self.drain()
                    self._listener.on_finished(self, word)
        if not chunk:
            self._close_worker()
            # A process that ends closes its connection shortly before.
            self._loop.call_later(_CLOSED_SECONDS, self._break_off)

    def _break_off(self) -> None:
        if not self._ended:
            self.broke_off = True
            self.signal(signal.SIGKILL, group=True)

    def _read_lines(self) -> None:
        if self._lines is None:
            return
        had = self.log is not None and self.log.has_lines
        for _ in range(_MAX_ENTRIES):
            try:
                packet = self._lines.recv(_SOCKET_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                self._loop.remove_reader(self._lines)
                break
            if self.log is not None:
                with contextlib.suppress(msgspec.MsgspecError):
                    self.log.add_written(_decode_line(packet))
        self._note_written(had)

    def _read_output(self, source: str) -> int:
        """Read the available bytes, and return their number."""
        fd = self._outputs.get(source, -1)
        if fd < 0:
            return 0
        had = self.log is not None and self.log.has_lines
        try:
            chunk = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return 0
        if not chunk:
            self._loop.remove_reader(fd)
            os.close(self._outputs.pop(source))
            return 0
        if self.log is not None:
            self.log.add_output(source, chunk, STORE_CLOCK.now_us())
            self._note_written(had)
        return len(chunk)

    def _note_written(self, had: bool) -> None:
        if not had and self.log is not None and self.log.has_lines:
            self._listener.on_written()

    def drain(self) -> None:
        """Read what the process has written so far, but no more than its pipes and its socket hold."""
        self._read_lines()
        for source in list(self._outputs):
            for _ in range(_DRAIN_CHUNKS):
                if not self._read_output(source):
                    break
        self._read_lines()

    # -- the end ---------------------------------------------------------------------------------------------------

    def _end(self, exited: Exited | None) -> None:
        if self._ended:
            return
        self._read_words()
        self._ended = True
        self.drain()
        self._close()
        self._listener.on_exited(self, exited)

    def _close_worker(self) -> None:
        if self._worker is not None:
            self._loop.remove_reader(self._worker)
            self._loop.remove_writer(self._worker)
            self._worker.close()
            self._worker = None

    def _close(self) -> None:
        self._close_worker()
        if self._lines is not None:
            self._loop.remove_reader(self._lines)
            self._lines.close()
            self._lines = None
        for fd in self._outputs.values():
            self._loop.remove_reader(fd)
            os.close(fd)
        self._outputs.clear()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
