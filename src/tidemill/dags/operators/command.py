"""Runs a command in its own process group, and logs its output line by line.

A command ends when its process exits; background processes may then write for a short time longer.

Invariants: when the call returns or raises, no process of the group is left; lines above the limit are cut, and memory
does not grow with the amount of output.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

from tidemill.core.errors import escape_surrogates
from tidemill.dags.exceptions import TaskFailed
from tidemill.runtime.files.folders import OwnedFolder

#: Longer lines are split in the log.
MAX_LINE_BYTES: Final = 64 << 10
#: How long a command may take to exit after SIGTERM.
GRACE_SECONDS: Final = 5.0
#: How long to keep reading after the command has exited, if a background process holds the output open.
LINGER_SECONDS: Final = 1.0
#: The poll interval for the command's exit on systems without pidfd.
_LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command: `last_line` is the last line of output; `stdout` is the output, if it was to be kept."""

    exit_code: int
    last_line: str
    stdout: bytes = b""


class Command:
    """A command; `kill` may also be called from a signal handler.

    Args:
        argv: The program and its arguments.
        env: The environment; None: the environment of this process.
        cwd: The working directory; None: a new one that is removed afterwards.
        log: The logger for the output.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str] | None, cwd: str | None, log: logging.Logger
    ) -> None:
        self._argv = list(argv)
        self._env = None if env is None else dict(env)
        self._cwd = cwd
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._ended = False

    def run(self, stdin: bytes = b"", encoding: str = "utf-8", keep_bytes: int = 0) -> CommandResult:
        """Run the command until it exits.

        Args:
            stdin: The standard input.
            encoding: The encoding of the output.
            keep_bytes: How many bytes of output to return; more output is an error. 0: keep none.

        Raises:
            TaskFailed: The command cannot be started, or prints more than `keep_bytes`.
        """
        with contextlib.ExitStack() as closing:
            folder = self._cwd or _make_folder(closing)
            given = closing.enter_context(tempfile.TemporaryFile())
            given.write(stdin)
            given.seek(0)
            try:
                process = self._start_apart(folder, given)
                last, kept = self._log_lines(process, encoding, keep_bytes)
                code = process.wait()
            finally:
                self._end()
        return CommandResult(code, last, kept)

    def _start_apart(self, folder: str, stdin: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the process on another thread, where no signal can interrupt the start before the process is known."""
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(self._start_unless_ended, folder, stdin).result()

    def _start_unless_ended(self, folder: str, stdin: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._starting:
            if self._ended:
                raise TaskFailed("the task was interrupted before the command started")
            self._process = self._start(folder, stdin)
            return self._process

    def _end(self) -> None:
        with self._starting:  # wait for a start that an interrupted task left running on its thread
            self._ended = True
        process = self._process
        if process is None:
            return
        self.kill(grace_seconds=GRACE_SECONDS if process.poll() is None else 0.0)
        if process.stdout is not None:
            process.stdout.close()

    def _start(self, folder: str, stdin: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self._argv,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=self._env,
                process_group=0,
                bufsize=0,
            )
        except (OSError, ValueError, TypeError) as error:
            raise TaskFailed(f"{self._argv[0]!r} cannot be started: {error}") from error

    def _log_lines(self, process: subprocess.Popen[bytes], encoding: str, keep_bytes: int) -> tuple[str, bytes]:
        last, kept = "", bytearray()
        for line in _split_lines(self._read(process)):
            if keep_bytes:
                kept += line
                if len(kept) > keep_bytes:
                    raise TaskFailed(f"the command printed more than {keep_bytes:,} bytes; write to a file instead")
            last = escape_surrogates(line.decode(encoding, "backslashreplace").rstrip("\r\n"))
            self._log.info("%s", last)
        return last, bytes(kept)

    def _read(self, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        """Yield output until it is closed, or until the command has exited and the linger time is over."""
        assert process.stdout is not None
        output, deadline = process.stdout.fileno(), math.inf
        with contextlib.ExitStack() as closing:
            waiting = select.poll()
            waiting.register(output, select.POLLIN)
            end, look_seconds = _watch_end(process, closing), _LOOK_SECONDS
            if end is not None:
                waiting.register(end, select.POLLIN)
                look_seconds = math.inf
            while (left := deadline - time.monotonic()) > 0:
                timeout = min(left, look_seconds)
                ready = {fd for fd, _ in waiting.poll(None if timeout == math.inf else timeout * 1000)}
                if output in ready:
                    if not (chunk := os.read(output, MAX_LINE_BYTES)):
                        return
                    yield chunk
                if deadline == math.inf and process.poll() is not None:
                    deadline, look_seconds = time.monotonic() + LINGER_SECONDS, math.inf
                    if end is not None:
                        waiting.unregister(end)
        self._log.warning("the command has exited; killing background processes that still hold its output open")

    def kill(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Stop the group: SIGTERM, the grace period, then SIGKILL."""
        process = self._process
        if process is None:
            return
        if process.poll() is None and grace_seconds:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_seconds)
        # This also ends processes that the command left behind.
        _signal_group(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)


def _make_folder(closing: contextlib.ExitStack) -> str:
    """Return a new, empty folder; if a task is killed, a later task that creates a folder removes its leftover."""
    owned = OwnedFolder("tidemill-task-")
    closing.callback(owned.cleanup)
    folder = owned.path / "work"
    folder.mkdir()
    return str(folder)


def _watch_end(process: subprocess.Popen[bytes], closing: contextlib.ExitStack) -> int | None:
    """Return a descriptor that becomes readable when a process exits; None if the system does not support it."""
    try:
        found = os.pidfd_open(process.pid)
    except (OSError, AttributeError):
        return None
    closing.callback(os.close, found)
    return found


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Split the chunks into lines, with their line ends; lines above the limit are cut."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield from _cut(line + b"\n")
        *parts, rest = _cut(rest)
        yield from parts
    if rest:
        yield rest


def _cut(line: bytes) -> list[bytes]:
    return [line[start : start + MAX_LINE_BYTES] for start in range(0, len(line), MAX_LINE_BYTES)] or [line]


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, number)


def build_environment(env: Mapping[str, str] | None, *, append: bool) -> dict[str, str]:
    """Return the environment of a command: this process's environment, `env`, or both merged."""
    if env is None:
        return dict(os.environ)
    own = {str(name): str(value) for name, value in env.items()}
    return {**os.environ, **own} if append else own


def describe_exit(code: int) -> str:
    """Return a message that says how a command failed.

    Example:
        >>> describe_exit(2), describe_exit(-9)
        ('the command ended with exit code 2', 'the command was killed by SIGKILL')
    """
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the command was killed by {signal.Signals(-code).name}"
    return f"the command ended with exit code {code}"
