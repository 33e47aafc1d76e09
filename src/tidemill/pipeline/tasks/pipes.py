"""The pipes of all processes of an executor, and one epoll that reports their events and the ends of the processes.

Invariants: no call blocks. A descriptor is removed from the epoll before it is closed. Output is complete, or the
process failed; it is never cut silently.
"""

from __future__ import annotations

import math
import os
import select
import signal

from tidemill.pipeline.handler.models import ErrorKind
from tidemill.pipeline.tasks.process import Output, Process, signal_group

#: An empty pipe accepts one page without blocking, even when the kernel grants no more.
_SURE_BYTES = 4096
_CHUNK_BYTES = 65536
_EVENTS = 64
#: One-shot: a child between fork and exec may hold a copy of a closed pidfd, which must not report a second event under
#: a descriptor number that was reused.
_EXIT = select.EPOLLIN | select.EPOLLONESHOT


class Pipes:
    """The input and output of processes.

    Args:
        max_stdout_bytes: The limit for a process's standard output.
        max_stderr_bytes: The limit for a process's standard error.
    """

    def __init__(self, max_stdout_bytes: int, max_stderr_bytes: int) -> None:
        self._max_stdout_bytes = max_stdout_bytes
        self._max_stderr_bytes = max_stderr_bytes
        self._watched: dict[int, Process] = {}

    def open(self) -> None:
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to return."""
        return self._epoll.fileno()

    def close_all(self) -> None:
        self._epoll.close()

    def watch(self, process: Process) -> None:
        """Register a process's exit and its pipes, so that `poll` reports their events.

        Raises:
            OSError: No descriptor, or no epoll registration, is available.
        """
        watched, register = self._watched, self._epoll.register
        process.pidfd = pidfd = os.pidfd_open(process.pid)  # type: ignore[arg-type]  # it was just started
        register(pidfd, _EXIT)
        watched[pidfd] = process
        for output in (process.stdout, process.stderr):
            if output.fd >= 0:
                register(output.fd, select.EPOLLIN)
                watched[output.fd] = process
        if process.stdin_fd >= 0:
            register(process.stdin_fd, select.EPOLLOUT)
            watched[process.stdin_fd] = process

    def poll(self) -> list[tuple[int, Process]]:
        """Return the descriptors with events, with their processes."""
        watched = self._watched
        # Resolve all first: a number that one event closes may belong to another process before the next event.
        return [(fd, process) for fd, _ in self._epoll.poll(0, _EVENTS) if (process := watched.get(fd)) is not None]

    def begin_feeding(self, process: Process, stdin: bytes) -> None:
        """Write as much of a process's input as fits into a new pipe."""
        if len(stdin) > _SURE_BYTES:
            os.set_blocking(process.stdin_fd, False)
        process.stdin = stdin
        self.feed(process)

    def feed(self, process: Process) -> None:
        """Write as much of the input as the pipe accepts; close it at the end."""
        data = process.stdin
        try:
            written = os.write(process.stdin_fd, data)
        except BlockingIOError:
            return
        except BrokenPipeError:  # a process may close its input without reading all of it
            written = len(data)
        if written < len(data):
            process.stdin = memoryview(data)[written:]
            return
        process.stdin = b""
        self._close_fd(process.stdin_fd)
        process.stdin_fd = -1

    def read_all(self, process: Process) -> None:
        """Read everything that is available now."""
        for output in (process.stdout, process.stderr):
            while output.fd >= 0 and self.read(process, output):
                pass

    def read(self, process: Process, output: Output) -> bool:
        """Read one chunk; return whether more may be available now."""
        try:
            data = os.read(output.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_output(output)
            return False
        output.chunks.append(data)
        output.size += len(data)
        if output.size > (self._max_stdout_bytes if output is process.stdout else self._max_stderr_bytes):
            self._overflow(process, output)
            return False
        return True

    def _overflow(self, process: Process, output: Output) -> None:
        is_stdout = output is process.stdout
        name, limit = ("stdout", self._max_stdout_bytes) if is_stdout else ("stderr", self._max_stderr_bytes)
        if process.failure is None:
            process.failure = (ErrorKind.OUTPUT, f"more than {limit} bytes of {name} (executor.max_{name}_bytes)")
        process.stderr.chunks = [process.stderr.join()[: self._max_stderr_bytes]]
        process.stdout.chunks = []
        signal_group(process, signal.SIGKILL)
        process.deadline = math.inf
        self.close_outputs(process)

    def close_outputs(self, process: Process) -> None:
        """Stop reading a process's output."""
        self._close_output(process.stdout)
        self._close_output(process.stderr)

    def _close_output(self, output: Output) -> None:
        if output.fd >= 0:
            self._close_fd(output.fd)
            output.fd = -1

    def close_input(self, process: Process) -> None:
        """Close an ended process's input and pidfd."""
        if process.stdin_fd >= 0:
            self._close_fd(process.stdin_fd)
            process.stdin_fd = -1
            process.stdin = b""
        if process.pidfd >= 0:
            self._watched.pop(process.pidfd, None)
            os.close(process.pidfd)
            process.pidfd = -1

    def close(self, process: Process) -> None:
        """Close all descriptors of a process."""
        self.close_input(process)
        self.close_outputs(process)

    def _close_fd(self, fd: int) -> None:
        # Unregister first: closing alone does not unregister while a child between fork and exec holds a copy.
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        os.close(fd)
