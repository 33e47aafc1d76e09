"""Commands as processes of their own, on a terminal or without, with all that descends from them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.until import LIMIT_SECONDS, wait_until

from tidemill.runtime.process.table import find_marked


class Command:
    """`tidemill ARGUMENTS`, or another program, in a session of its own.

    Args:
        arguments: Of the command.
        env: Its environment.
        folder: Where it runs.
        terminal: Whether it has a terminal, on which it is the process in the foreground.
        program: What is run with these arguments.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        *,
        terminal: bool,
        program: Sequence[str] = (sys.executable, "-m", "tidemill"),
    ) -> None:
        self.mark = f"TEST_RUN={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self._ours, theirs = pty.openpty() if terminal else os.pipe()
        self.terminal = terminal
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            [*program, *arguments],
            cwd=folder,
            env={**env, name: value},
            stdin=theirs if terminal else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal if terminal else None,
        )
        os.close(theirs)
        self._said = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # a terminal whose last process is gone
            while chunk := os.read(self._ours, 65536):
                self._said += chunk

    @property
    def said(self) -> str:
        """What it wrote so far, without what steers the terminal."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._said.decode(errors="replace"))

    def until_said(self, text: str, seconds: float = 90.0) -> None:
        def is_said() -> bool:
            if text in self.said:
                return True
            assert self.process.poll() is None, self.said
            return False

        wait_until(is_said, seconds, what=lambda: self.said, pause_seconds=0.01)

    def type(self, keys: str) -> None:
        """Press keys on the terminal."""
        os.write(self._ours, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        if self.terminal:
            self.type("\x03")
        else:
            os.killpg(self.process.pid, signal.SIGINT)

    def hang_up(self) -> None:
        """Close the terminal, as a user who closes its window."""
        terminal, self._ours = self._ours, os.open(os.devnull, os.O_RDONLY)
        os.close(terminal)

    def family(self) -> dict[int, str]:
        """Return the command and all that descends from it, with their command lines."""
        return find_marked(self.mark)

    def until_alone(self, seconds: float = LIMIT_SECONDS) -> None:
        wait_until(lambda: not self.family(), seconds, what=lambda: f"nothing is left behind: {self.family()}")

    def close(self) -> None:
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(60)
        os.close(self._ours)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def running(
    arguments: Sequence[str], env: Mapping[str, str], folder: Path, *, terminal: bool = False
) -> Iterator[Command]:
    command = Command(arguments, env, folder, terminal=terminal)
    try:
        yield command
    finally:
        command.close()
