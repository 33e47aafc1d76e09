"""The state of one process in the executor, from start to end, and its outcome.

State only; `executor` acts on it. What a `ProcessOutcome` means:

- kind None with exit code 0: success.
- kind None without an exit code: the host lacked a resource (descriptors, processes, memory), or the executor lost
  track of the process for lack of one. The task is not at fault, and the engine may retry it.
- MISSING, PERMISSION: never started for that reason; an unknown executable format counts as permission.
- EXIT without a pid: the system can never start the task (its arguments are too long, are not text, or contain NUL).
- EXIT with a pid, TIMEOUT, OUTPUT: it ran.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tidemill.pipeline.handler.models import ErrorKind

#: Errors that mean that the host lacks a resource now.
_OURS = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.EISDIR, errno.ELOOP, errno.ETXTBSY})
_EXECUTABLE = "make it executable (chmod +x), or correct binary_path"
_ADVICE = {
    errno.ENOENT: "install it, or correct binary_path, or the interpreter in its first line if it is a script",
    errno.EACCES: _EXECUTABLE,
    errno.EPERM: _EXECUTABLE,
    errno.ENOEXEC: "is it for this machine? the first line of a script is #! and its interpreter",
    errno.ETXTBSY: "it is being written; replace it with mv instead of overwriting it",
}


class ProcessOutcome(msgspec.Struct, gc=False):
    """How a process ended; the module's docstring says what each combination means.

    Attributes:
        exit_code: The process's exit code, negative for a signal; -1 after a timeout; None if nothing ran.
        stdout: Its complete standard output; empty if an output exceeded its limit.
        stderr: Its complete standard error (`task timed out` after a timeout); cut if an output exceeded its limit.
        duration_seconds: From start to end.
        pid: None if nothing ran.
        kind: The kind of failure; None if the task is not at fault.
        exception: The error, if it is something other than the program's own exit code.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    duration_seconds: float
    pid: int | None
    kind: ErrorKind | None
    exception: str | None


Done = Callable[[ProcessOutcome], None]


class TaskExecutor(Protocol):
    """Runs tasks; implemented by `executor.Executor` and `resident.ResidentExecutor`."""

    @property
    def capacity(self) -> int:
        """The number of tasks that it accepts at once."""

    def open(self) -> None:
        """Attach the executor to the running loop."""

    def start(
        self, argv: Sequence[str], stdin: bytes, env: Mapping[str, str], timeout_seconds: float, done: Done
    ) -> object:
        """Run a task; return a handle for `kill`. `done` is called once, later, unless the task is killed before."""

    async def kill(self, handles: Iterable[Any], grace_seconds: float) -> None:
        """Kill the tasks of these handles; their `done` is never called."""

    async def kill_all(self, grace_seconds: float) -> None:
        """Kill every task."""

    def close(self) -> None:
        """Detach from the loop."""

    def describe_wait(self) -> str | None:
        """Return why the programs keep tasks waiting; None: they do not."""


class Output:
    """One of the two outputs: its pipe (-1: closed) and the bytes read from it."""

    __slots__ = ("chunks", "fd", "size")

    def __init__(self) -> None:
        self.fd = -1
        self.chunks: list[bytes] = []
        self.size = 0

    def join(self) -> bytes:
        return self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)


class Process:
    """One process, from start to its outcome; an opaque handle for `Executor.kill` to other modules."""

    __slots__ = (
        "deadline",
        "done",
        "duration",
        "ended",
        "exit_code",
        "failure",
        "pid",
        "pidfd",
        "started_at",
        "stderr",
        "stdin",
        "stdin_fd",
        "stdout",
        "timeout_seconds",
    )

    def __init__(self, done: Done, started_at: float) -> None:
        self.done: Done | None = done
        self.started_at = started_at
        self.duration = 0.0
        self.pid: int | None = None
        self.ended = False  # reaped: the kernel may have reused its id
        self.exit_code: int | None = None
        self.failure: tuple[ErrorKind | None, str] | None = None
        self.deadline = math.inf
        self.timeout_seconds = math.inf
        self.pidfd = -1
        self.stdin_fd = -1
        self.stdin: bytes | memoryview = b""
        self.stdout = Output()
        self.stderr = Output()


def reap(process: Process) -> bool:
    """Reap an ended process; return False if it has not ended."""
    try:
        pid, status = os.waitpid(process.pid, os.WNOHANG)  # type: ignore[arg-type]  # it ran
        if pid == 0:
            return False
        process.exit_code = os.waitstatus_to_exitcode(status)
    except ChildProcessError:  # other code in this process reaped it
        pass
    process.ended = True
    return True


def is_over(process: Process) -> bool:
    """Return whether it has ended, without reaping it."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None  # type: ignore[arg-type]
    except ChildProcessError:
        return True


def signal_group(process: Process, number: signal.Signals) -> None:
    """Send a signal to the group of a process that has not been reaped."""
    if process.pid is None or process.ended:
        return
    with contextlib.suppress(OSError):
        os.killpg(process.pid, number)
    if number == signal.SIGKILL:  # the process itself, too, in case it joined another group
        with contextlib.suppress(OSError):
            os.kill(process.pid, number)


def make_outcome(process: Process) -> ProcessOutcome:
    """Return the outcome of a process that has ended."""
    kind, exception = process.failure or (None, None)
    exit_code, stderr = process.exit_code, process.stderr.join()
    if process.failure is None and exit_code != 0:
        kind = ErrorKind.EXIT
        if exit_code is None:
            exception = "its exit code is unknown: other code in this process has called os.wait"
    elif kind is ErrorKind.TIMEOUT:
        exit_code, stderr = -1, b"task timed out"
    elif kind is None and process.failure is not None:
        exit_code = None
    return ProcessOutcome(exit_code, process.stdout.join(), stderr, process.duration, process.pid, kind, exception)


def format_number(seconds: float) -> str:
    """Format seconds without a trailing `.0`: 2.0 becomes `2`."""
    return str(int(seconds)) if seconds == int(seconds) else str(seconds)


def explain_start_failure(error: Exception) -> tuple[ErrorKind | None, str]:
    """Classify an exception raised before or in posix_spawn."""
    text = str(error) or type(error).__name__
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ErrorKind.MISSING, _describe_refusal(error) or text
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OURS):
        return None, text
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return ErrorKind.PERMISSION, _describe_refusal(error) or text
    return ErrorKind.EXIT, f"cannot be started: {text}"


def _describe_refusal(error: OSError) -> str:
    """Return which program could not be executed, why, and what to do; '' if the error does not name one."""
    if error.filename is None:
        return ""
    advice = _ADVICE.get(error.errno or 0, "correct binary_path")
    return f"{os.fsdecode(error.filename)!r} cannot be executed: {error.strerror}; {advice}"


def check_limit(seconds: float) -> None:
    """Refuse a time limit that is not above 0.

    Raises:
        ValueError: The limit is zero, negative or NaN.
        TypeError: The limit is not a number.
    """
    if not seconds > 0:
        raise ValueError(f"the time limit must be a positive number of seconds, not {seconds!r}")


def keep_descriptors() -> None:
    """Make all descriptors non-inheritable; Python's own already are, but descriptors of C libraries may not be."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
                if (fd := int(name)) > 2 and os.get_inheritable(fd):
                    os.set_inheritable(fd, False)


def occupy_standard_fds() -> None:
    """Occupy descriptors 0, 1 and 2, so that no pipe gets a number onto which the children's pipes are duplicated."""
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(fd)
