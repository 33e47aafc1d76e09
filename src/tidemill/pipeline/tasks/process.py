"""One process as the executor sees it: its state from start to end, and its outcome.

State only; what happens to it, and when, is in `executor`. `ProcessOutcome` says what may be concluded:

- kind None with exit code 0: it ended well.
- kind None without an exit code: this host had no room for it (descriptors, processes, memory), or lost
  track of it for such a reason; nothing is wrong with the task, and the engine may try again.
- MISSING, PERMISSION: never started for that reason; an unknown executable format counts as permission.
- EXIT without a pid: the system can never start a task like this (arguments that are too long, are not
  text, or contain NUL).
- EXIT with one, TIMEOUT, OUTPUT: it ran.
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

#: This host has no room now.
_OURS = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.EISDIR, errno.ELOOP, errno.ETXTBSY})
_EXECUTABLE = "make it executable (chmod +x), or correct binary_path"
_ADVICE = {
    errno.ENOENT: "install it, or correct binary_path, or the interpreter in its first line if it is a script",
    errno.EACCES: _EXECUTABLE,
    errno.EPERM: _EXECUTABLE,
    errno.ENOEXEC: "is it for this machine? the first line of a script is #! and its interpreter",
    errno.ETXTBSY: "it is being written; put a new version in its place with mv",
}


class ProcessOutcome(msgspec.Struct, gc=False):
    """How a run ended; the module's docstring says what to conclude from it.

    Attributes:
        exit_code: What the process returned, negative for a signal; -1 after a timeout; None if nothing ran.
        stdout: Everything it wrote; empty if it wrote too much.
        stderr: Everything it wrote there (`task timed out` after a timeout); the beginning if it wrote too much.
        duration_seconds: From start to end.
        pid: None if nothing ran.
        kind: None if nothing is wrong with the task.
        exception: What went wrong if it was not the program's own exit code.
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
    """What runs tasks; `executor.Executor` and `resident.ResidentExecutor` are."""

    @property
    def capacity(self) -> int:
        """How many tasks it takes at a time."""

    def open(self) -> None:
        """Join the running loop."""

    def start(
        self, argv: Sequence[str], stdin: bytes, env: Mapping[str, str], timeout_seconds: float, done: Done
    ) -> object:
        """Run a task; return a handle for `kill`. `done` is called once, later, unless it is killed before."""

    async def kill(self, runs: Iterable[Any], grace_seconds: float) -> None:
        """End these runs; their `done` is never called."""

    async def kill_all(self, grace_seconds: float) -> None:
        """End every run."""

    def close(self) -> None:
        """Leave the loop."""

    def describe_stall(self) -> str | None:
        """Return why tasks wait for the programs themselves; None while they do not."""


class Output:
    """One of the two outputs: its pipe (-1: closed) and what came through it."""

    __slots__ = ("chunks", "fd", "size")

    def __init__(self) -> None:
        """Start without a pipe."""
        self.fd = -1
        self.chunks: list[bytes] = []
        self.size = 0

    def join(self) -> bytes:
        """Return all of it."""
        return self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)


class Run:
    """One process, from start to its outcome; for others only a handle for `Executor.kill`."""

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
        """Start without a process."""
        self.done: Done | None = done
        self.started_at = started_at
        self.duration = 0.0
        self.pid: int | None = None
        self.ended = False  # reaped: its id may belong to another process now
        self.exit_code: int | None = None
        self.failure: tuple[ErrorKind | None, str] | None = None
        self.deadline = math.inf
        self.timeout_seconds = math.inf
        self.pidfd = -1
        self.stdin_fd = -1
        self.stdin: bytes | memoryview = b""
        self.stdout = Output()
        self.stderr = Output()


def reap(run: Run) -> bool:
    """Take the exit status of a process that is over; False if it is not."""
    try:
        pid, status = os.waitpid(run.pid, os.WNOHANG)  # type: ignore[arg-type]  # it ran
        if pid == 0:
            return False
        run.exit_code = os.waitstatus_to_exitcode(status)
    except ChildProcessError:  # other code in this process waited for it
        pass
    run.ended = True
    return True


def is_over(run: Run) -> bool:
    """Tell whether it ended, without reaping it."""
    try:
        return os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None  # type: ignore[arg-type]
    except ChildProcessError:
        return True


def signal_group(run: Run, number: signal.Signals) -> None:
    """Send a signal to the group of a process that has not been reaped."""
    if run.pid is None or run.ended:
        return
    with contextlib.suppress(OSError):
        os.killpg(run.pid, number)
    if number == signal.SIGKILL:  # also when it joined another group
        with contextlib.suppress(OSError):
            os.kill(run.pid, number)


def make_outcome(run: Run) -> ProcessOutcome:
    """Return how a run ended that is over."""
    kind, exception = run.failure or (None, None)
    exit_code, stderr = run.exit_code, run.stderr.join()
    if run.failure is None and exit_code != 0:
        kind = ErrorKind.EXIT
        if exit_code is None:
            exception = "its exit code is unknown: something else in this process waited for it"
    elif kind is ErrorKind.TIMEOUT:
        exit_code, stderr = -1, b"task timed out"
    elif kind is None and run.failure is not None:
        exit_code = None
    return ProcessOutcome(exit_code, run.stdout.join(), stderr, run.duration, run.pid, kind, exception)


def format_number(seconds: float) -> str:
    """Write 2.0 as 2."""
    return str(int(seconds)) if seconds == int(seconds) else str(seconds)


def explain_start_failure(error: Exception) -> tuple[ErrorKind | None, str]:
    """Return what an exception before or in posix_spawn means for the task."""
    text = str(error) or type(error).__name__
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ErrorKind.MISSING, _describe_refusal(error) or text
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OURS):
        return None, text
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return ErrorKind.PERMISSION, _describe_refusal(error) or text
    return ErrorKind.EXIT, f"cannot be started: {text}"


def _describe_refusal(error: OSError) -> str:
    """Return which program the system does not execute, why, and what to do; '' if it does not say which."""
    if error.filename is None:
        return ""
    advice = _ADVICE.get(error.errno or 0, "correct binary_path")
    return f"{os.fsdecode(error.filename)!r} cannot be executed: {error.strerror}; {advice}"


def check_limit(seconds: float) -> None:
    """Refuse a time limit that is not above 0.

    Raises:
        ValueError: It is zero, negative or not a number.
        TypeError: It is of another type.
    """
    if not seconds > 0:
        raise ValueError(f"the time limit has to be a positive number of seconds, not {seconds!r}")


def keep_descriptors() -> None:
    """Have no child inherit a descriptor; Python's own are not inherited, but a C library's may be."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the folder itself is closed by now
                if (fd := int(name)) > 2 and os.get_inheritable(fd):
                    os.set_inheritable(fd, False)


def occupy_standard_fds() -> None:
    """Make sure that no pipe gets number 0, 1 or 2, which the children's own are moved to."""
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(fd)
