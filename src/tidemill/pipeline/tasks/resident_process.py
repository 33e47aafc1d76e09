"""One resident copy as `resident` keeps it: its process, its pipes, the task it has, and the end of its stderr.

State and pipes only; which copy does what, and when, is decided elsewhere. Invariant: each descriptor is closed once.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence

from tidemill.pipeline.handler.models import ErrorKind
from tidemill.pipeline.tasks.framing import FrameReader
from tidemill.pipeline.tasks.process import Done, ProcessOutcome, Run

_CHUNK_BYTES = 65536
#: A call takes about a thousand pieces.
_MOST_PIECES = 1_000


class Job:
    """One task on its way through a copy; for others only a handle for `ResidentExecutor.kill`."""

    __slots__ = ("copy", "done", "number", "request", "started_at", "timeout_seconds")

    def __init__(self, number: int, timeout_seconds: float, done: Done) -> None:
        """Start without a copy."""
        self.number = number
        self.timeout_seconds = timeout_seconds
        self.done: Done | None = done
        self.request = b""
        self.started_at = 0.0
        self.copy: Copy | None = None


class Tail:
    """The end of what a copy wrote to its standard error since it was last taken."""

    __slots__ = ("_chunks", "_left_out", "_max_bytes", "_size")

    def __init__(self, max_bytes: int) -> None:
        """Keep at most this many bytes."""
        self._max_bytes = max_bytes
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._left_out = 0

    def add(self, chunk: bytes) -> None:
        """Keep a chunk, and drop the oldest bytes beyond the limit."""
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
        """Return what is kept, with a note on what is missing before it, and start over."""
        if not self._chunks:
            return b""
        note = b"[%d bytes before this are left out]\n" % self._left_out if self._left_out else b""
        data = note + b"".join(self._chunks)
        self._chunks.clear()
        self._size = self._left_out = 0
        return data


class Copy:
    """One process of the program, and our ends of its pipes (-1: closed)."""

    __slots__ = (
        "answered",
        "broken",
        "failure",
        "jobs",
        "leaving",
        "loop",
        "number",
        "reader",
        "run",
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
        """Start without a process; `broken` is called when it will never read what waits for it."""
        self.broken = broken
        self.number = number
        self.reader = reader
        self.stderr = stderr
        self.loop = loop
        self.run: Run | None = None
        #: Its tasks, the one that it works on first.
        self.jobs: deque[Job] = deque()
        self.stdin_fd = self.stdout_fd = self.stderr_fd = -1
        #: Requests that are written together, all of which are its latest tasks'.
        self.unwritten: list[bytes] = []
        #: What the pipe has not taken yet of requests that were written, one by one.
        self.unsent: deque[memoryview] = deque()
        #: It answered at least once.
        self.answered = False
        #: It was retired; what it still writes is not read.
        self.leaving = False
        #: Why it is being killed.
        self.failure: tuple[ErrorKind, str] | None = None

    def open_pipes(self) -> tuple[int, int, int]:
        """Open its pipes; return its own ends, which the caller has to close.

        Raises:
            OSError: There are no descriptors; none is left open.
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
        """Write requests, as much as the pipe takes now and the rest as it drains.

        Raises:
            BrokenPipeError: Nobody reads them.
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
        """Read what is there now."""
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
        """Return what the end of the process means for the task that it worked on."""
        kind, text = self.failure or (
            ErrorKind.EXIT,
            f"the resident program ended (exit code {outcome.exit_code}) before it answered",
        )
        return ProcessOutcome(outcome.exit_code, b"", stderr, outcome.duration_seconds, outcome.pid, kind, text)

    def close_input(self) -> None:
        """Close its input: nothing more comes."""
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
        """Close all pipes."""
        self.close_input()
        self.close_output()
        self.stderr_fd = self._closed(self.stderr_fd)

    def _closed(self, fd: int) -> int:
        if fd >= 0:
            self.loop.remove_reader(fd)
            os.close(fd)
        return -1
