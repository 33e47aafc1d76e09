"""One copy of a resident program: its process, its pipes, its tasks, and the tail of its stderr.

State and pipes only; `resident` decides which copy does what, and when. Invariant: each descriptor is closed once.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence

from tidemill.pipeline.handler.models import ErrorKind
from tidemill.pipeline.tasks.framing import FrameReader
from tidemill.pipeline.tasks.process import Done, Process, ProcessOutcome

_CHUNK_BYTES = 65536
#: One writev call takes about a thousand buffers (IOV_MAX).
_MOST_PIECES = 1_000


class Job:
    """One task in a copy; an opaque handle for `ResidentExecutor.kill` to other modules."""

    __slots__ = ("copy", "done", "number", "request", "started_at", "timeout_seconds")

    def __init__(self, number: int, timeout_seconds: float, done: Done) -> None:
        self.number = number
        self.timeout_seconds = timeout_seconds
        self.done: Done | None = done
        self.request = b""
        self.started_at = 0.0
        self.copy: Copy | None = None


class Tail:
    """The tail of a copy's standard error since the last `take`."""

    __slots__ = ("_chunks", "_left_out", "_max_bytes", "_size")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._left_out = 0

    def add(self, chunk: bytes) -> None:
        """Add a chunk, and drop the oldest bytes beyond the limit."""
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size > self._max_bytes:
            excess, first = self._size - self._max_bytes, self._chunks.popleft()
            if len(first) > excess:
                self._chunks.appendleft(first[excess:])
            dropped = min(excess, len(first))
            self._size -= dropped
            self._left_out += dropped

    def take(self) -> bytes:
        """Return the stored bytes, after a note about dropped ones, and clear the tail."""
        if not self._chunks:
            return b""
        note = b"[%d earlier bytes omitted]\n" % self._left_out if self._left_out else b""
        data = note + b"".join(self._chunks)
        self._chunks.clear()
        self._size = self._left_out = 0
        return data


class Copy:
    """One process of the program, and the engine's ends of its pipes (-1: closed)."""

    __slots__ = (
        "answered",
        "broken",
        "failure",
        "jobs",
        "leaving",
        "loop",
        "number",
        "process",
        "reader",
        "stderr",
        "stderr_fd",
        "stdin_fd",
        "stdout_fd",
        "unsent",
        "unwritten",
    )

    def __init__(
        self,
        number: int,
        reader: FrameReader,
        stderr: Tail,
        loop: asyncio.AbstractEventLoop,
        broken: Callable[[Copy], None],
    ) -> None:
        """Create a copy without a process; `broken` is called if the process will never read its waiting input."""
        self.broken = broken
        self.number = number
        self.reader = reader
        self.stderr = stderr
        self.loop = loop
        self.process: Process | None = None
        #: Its tasks, starting with the one that it is working on.
        self.jobs: deque[Job] = deque()
        self.stdin_fd = self.stdout_fd = self.stderr_fd = -1
        #: Requests to be written together; they belong to the latest tasks.
        self.unwritten: list[bytes] = []
        #: The parts of written requests that the pipe has not accepted yet.
        self.unsent: deque[memoryview] = deque()
        #: Whether it has answered at least once.
        self.answered = False
        #: Whether it was retired; its further output is ignored.
        self.leaving = False
        #: The reason why it is being killed.
        self.failure: tuple[ErrorKind, str] | None = None

    def open_pipes(self) -> tuple[int, int, int]:
        """Open the pipes; return the child's ends, which the caller has to close.

        Raises:
            OSError: No descriptors are available; no descriptor is left open.
        """
        theirs: list[int] = []
        try:
            for name in ("stdin_fd", "stdout_fd", "stderr_fd"):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ours, other = (writer, reader) if name == "stdin_fd" else (reader, writer)
                setattr(self, name, ours)
                theirs.append(other)
                os.set_blocking(ours, False)
        except OSError:
            for fd in theirs:
                os.close(fd)
            self.close()
            raise
        return theirs[0], theirs[1], theirs[2]

    def send(self, requests: Sequence[bytes]) -> None:
        """Write requests: as much as the pipe accepts now, and the rest as it drains.

        Raises:
            BrokenPipeError: The process no longer reads its input.
        """
        if self.stdin_fd < 0:
            raise BrokenPipeError("its input is closed")
        if self.unsent:
            self.unsent += map(memoryview, requests)
            return
        try:
            written = os.writev(self.stdin_fd, requests[:_MOST_PIECES])
        except BlockingIOError:
            written = 0
        for request in requests:
            if written < len(request):
                self.unsent.append(memoryview(request)[written:])
            written = max(0, written - len(request))
        if self.unsent:
            self.loop.add_writer(self.stdin_fd, self._drain)

    def _drain(self) -> None:
        try:
            while self.unsent:
                rest = self.unsent[0][os.write(self.stdin_fd, self.unsent[0]) :]
                if rest:
                    self.unsent[0] = rest
                    return
                self.unsent.popleft()
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.close_input()
            self.broken(self)
            return
        self.loop.remove_writer(self.stdin_fd)

    def read_stderr(self) -> None:
        """Read everything that is available now."""
        while self.stderr_fd >= 0:
            try:
                chunk = os.read(self.stderr_fd, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self.stderr_fd = self._closed(self.stderr_fd)
                return
            self.stderr.add(chunk)
            if len(chunk) < _CHUNK_BYTES:
                return

    def fail_task(self, outcome: ProcessOutcome, stderr: bytes) -> ProcessOutcome:
        """Return the outcome of the task that the process was working on when it exited."""
        kind, text = self.failure or (
            ErrorKind.EXIT,
            f"the resident program exited (exit code {outcome.exit_code}) before it answered",
        )
        return ProcessOutcome(outcome.exit_code, b"", stderr, outcome.duration_seconds, outcome.pid, kind, text)

    def close_input(self) -> None:
        """Close the input: no more requests follow."""
        if self.stdin_fd >= 0:
            if self.unsent:
                self.loop.remove_writer(self.stdin_fd)
                self.unsent.clear()
            self.unwritten.clear()
            os.close(self.stdin_fd)
            self.stdin_fd = -1

    def close_output(self) -> None:
        """Stop reading answers."""
        self.stdout_fd = self._closed(self.stdout_fd)

    def close(self) -> None:
        self.close_input()
        self.close_output()
        self.stderr_fd = self._closed(self.stderr_fd)

    def _closed(self, fd: int) -> int:
        if fd >= 0:
            self.loop.remove_reader(fd)
            os.close(fd)
        return -1
