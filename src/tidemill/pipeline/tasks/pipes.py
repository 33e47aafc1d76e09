"""The pipes of all processes of an executor, and one epoll that reports their events and the ends of the processes.

Invariants: no call blocks. A descriptor is removed from the epoll before it is closed. Output is complete, or the run
failed; it is never cut silently.
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

    def watch(self, run: Process) -> None:
        """Register a process's end and its pipes, so that `poll` reports their events.

        Raises:
            OSError: No descriptor, or no epoll registration, is available.
        """
        watched, register = self._watched, self._epoll.register
        run.pidfd = pidfd = os.pidfd_open(run.pid)  # type: ignore[arg-type]  # it was just started
        register(pidfd, _EXIT)
        watched[pidfd] = run
        for output in (run.stdout, run.stderr):
            if output.fd >= 0:
                register(output.fd, select.EPOLLIN)
                watched[output.fd] = run
        if run.stdin_fd >= 0:
            register(run.stdin_fd, select.EPOLLOUT)
            watched[run.stdin_fd] = run

    def poll(self) -> list[tuple[int, Process]]:
        """Return the descriptors with events, with their processes."""
        watched = self._watched
        # Resolve all first: a number that one event closes may belong to another process before the next event.
        return [(fd, run) for fd, _ in self._epoll.poll(0, _EVENTS) if (run := watched.get(fd)) is not None]

    def begin_feeding(self, run: Process, stdin: bytes) -> None:
        """Write as much of a process's input as fits into a new pipe."""
        if len(stdin) > _SURE_BYTES:
            os.set_blocking(run.stdin_fd, False)
        run.stdin = stdin
        self.feed(run)

    def feed(self, run: Process) -> None:
        """Write as much of the input as the pipe accepts; close it at the end."""
        data = run.stdin
        try:
            written = os.write(run.stdin_fd, data)
        except BlockingIOError:
            return
        except BrokenPipeError:  # a process may close its input without reading all of it
            written = len(data)
        if written < len(data):
            run.stdin = memoryview(data)[written:]
            return
        run.stdin = b""
        self._close_fd(run.stdin_fd)
        run.stdin_fd = -1

    def read_all(self, run: Process) -> None:
        """Read everything that is available now."""
        for output in (run.stdout, run.stderr):
            while output.fd >= 0 and self.read(run, output):
                pass

    def read(self, run: Process, output: Output) -> bool:
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
        if output.size > (self._max_stdout_bytes if output is run.stdout else self._max_stderr_bytes):
            self._overflow(run, output)
            return False
        return True

    def _overflow(self, run: Process, output: Output) -> None:
        is_stdout = output is run.stdout
        name, limit = ("stdout", self._max_stdout_bytes) if is_stdout else ("stderr", self._max_stderr_bytes)
        if run.failure is None:
            run.failure = (ErrorKind.OUTPUT, f"more than {limit} bytes of {name} (executor.max_{name}_bytes)")
        run.stderr.chunks = [run.stderr.join()[: self._max_stderr_bytes]]
        run.stdout.chunks = []
        signal_group(run, signal.SIGKILL)
        run.deadline = math.inf
        self.close_outputs(run)

    def close_outputs(self, run: Process) -> None:
        """Stop reading a process's output."""
        self._close_output(run.stdout)
        self._close_output(run.stderr)

    def _close_output(self, output: Output) -> None:
        if output.fd >= 0:
            self._close_fd(output.fd)
            output.fd = -1

    def close_input(self, run: Process) -> None:
        """Close an ended process's input and pidfd."""
        if run.stdin_fd >= 0:
            self._close_fd(run.stdin_fd)
            run.stdin_fd = -1
            run.stdin = b""
        if run.pidfd >= 0:
            self._watched.pop(run.pidfd, None)
            os.close(run.pidfd)
            run.pidfd = -1

    def close(self, run: Process) -> None:
        """Close all descriptors of a process."""
        self.close_input(run)
        self.close_outputs(run)

    def _close_fd(self, fd: int) -> None:
        # Unregister first: closing alone does not unregister while a child between fork and exec holds a copy.
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        os.close(fd)
