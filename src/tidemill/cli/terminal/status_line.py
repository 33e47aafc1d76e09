"""Status lines at the bottom of a terminal that are redrawn in place, while other output scrolls above.

Invariants: the cursor rests at the beginning of the first line and is never hidden, so that one sequence erases the
lines however the terminal wrapped them after a resize. Lines are redrawn in one write, so that nothing flickers; they
take at most half of the terminal's height. They are erased before any other output, before the process is suspended,
and at the end. They are drawn only while the process is in the terminal's foreground. Errors here never affect the
command.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self, TextIO

_REFRESH_SECONDS = 0.25
#: Erases from the cursor to the end of the screen.
_ERASE_BELOW = "\x1b[J"
#: Erases from the beginning of the line. If everything were erased in one step at the top of the screen, tmux would
#: treat that as a clear, and would copy the old lines to its scrollback.
_ERASE = f"\r\x1b[K\x1b[C{_ERASE_BELOW}\r"
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_SPINNER = "|/-\\"
#: A process that suspends itself has stopped within this time.
_SUSPENDED_SECONDS = 0.05
_SUSPEND, _REDRAW, _END = "suspend", "redraw", "end"
_SIGNALS = (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


class StatusLine:
    """Shows the status lines during the block.

    Args:
        text: Returns the text for a number of columns; called from a thread. While it returns '', no line is drawn, and
            the terminal echoes typed text.
    """

    def __init__(self, text: Callable[[int], str]) -> None:
        self._text = text
        self._stream: TextIO = sys.stderr
        self._replaced: list[tuple[str, TextIO, _Above]] = []
        # A signal handler or a finalizer may write during a write of its own thread.
        self._lock = threading.RLock()
        self._wishes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tidemill-status", daemon=True)
        self._handlers: dict[int, Any] = {}
        self._line = ""
        self._drawn = self._over = False
        self._frame = 0
        self._echo: list[Any] | None = None

    def __enter__(self) -> Self:
        """Replace standard output and standard error where they are this terminal, and start drawing."""
        for name in ("stderr", "stdout"):
            stream = getattr(sys, name)
            if stream.isatty():
                above = _Above(self, stream)
                setattr(sys, name, above)
                self._replaced.append((name, stream, above))
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._handlers[number] = signal.signal(number, self._on_signal)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Erase the lines and restore the streams."""
        self._wishes.put(_END)
        self._thread.join(1.0)
        with self._lock:
            self._over = True
            self._erase()
            for name, stream, above in self._replaced:
                if getattr(sys, name) is above:
                    setattr(sys, name, stream)
                above.finish()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    # -- output above the lines ------------------------------------------------------------------------------------

    def write_above(self, stream: TextIO, text: str) -> None:
        """Write finished lines in place of the status lines, and redraw those below."""
        with self._lock:
            drawn = self._line if self._line and self._is_in_foreground() else ""
            # One write, so that the status lines do not flicker.
            stream.write(f"{_ERASE if self._drawn else ''}{text}{_lay_out(drawn)}")
            stream.flush()
            self._drawn = bool(drawn)

    # -- drawing -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wish = _REDRAW
        while wish != _END:
            # A display that fails must not affect the command.
            with contextlib.suppress(Exception):
                if wish == _SUSPEND:
                    self._suspend()
                self._draw()
            with contextlib.suppress(queue.Empty):
                wish = _REDRAW
                wish = self._wishes.get(timeout=_REFRESH_SECONDS)
        self._set_echo(True)

    def _draw(self) -> None:
        width = max(1, self._find_width() - 1)
        self._frame += 1
        spinner = _SPINNER if (self._stream.encoding or "").lower().startswith("utf") else _PLAIN_SPINNER
        said = self._text(max(1, width - 2))
        if not said:
            return
        first, *others = said.split("\n")[: self._count_rows()]
        text = "\n".join([f"{spinner[self._frame % len(spinner)]} {first}", *(f"  {row}" for row in others)])
        with self._lock:
            if not self._over:
                self._line = text
                if self._is_in_foreground():
                    self._set_echo(False)
                    self._put(text)

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(_lay_out(text))
            self._stream.flush()
            self._drawn = True

    def _erase(self) -> None:
        if self._drawn:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(_ERASE)
                self._stream.flush()
            self._drawn = False

    def _find_width(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            if width := os.get_terminal_size(self._stream.fileno()).columns:
                return width
        with contextlib.suppress(ValueError):
            return int(os.environ.get("COLUMNS", ""))
        return 80

    def _count_rows(self) -> int:
        """Return the maximum number of lines; the log needs most of the terminal."""
        if os.environ.get("TERM", "dumb") == "dumb":
            return 1  # such a terminal cannot move the cursor up
        with contextlib.suppress(OSError, ValueError):
            if lines := os.get_terminal_size(self._stream.fileno()).lines:
                return max(1, lines // 2)
        return 1

    def _is_in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError):  # not the controlling terminal, so no shell shares it
            return True

    # -- suspending --------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Only record the signal: this very thread may hold the lock."""
        if number == signal.SIGTSTP:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            self._wishes.put(_SUSPEND)
            return
        if number == signal.SIGCONT:
            signal.signal(signal.SIGTSTP, self._on_signal)
        self._wishes.put(_REDRAW)

    def _suspend(self) -> None:
        """Erase the lines, and suspend this process like Ctrl-Z does."""
        with self._lock:
            self._erase()
            self._set_echo(True)
            os.kill(os.getpid(), signal.SIGTSTP)
            time.sleep(_SUSPENDED_SECONDS)

    def _set_echo(self, on: bool) -> None:
        """Switch the echo of typed keys; an echoed Enter would leave the status lines behind."""
        with contextlib.suppress(OSError, ValueError, termios.error):
            if on is (self._echo is None) or not self._is_in_foreground():
                return
            descriptor = self._stream.fileno()
            if self._echo is not None:
                termios.tcsetattr(descriptor, termios.TCSANOW, self._echo)
                self._echo = None
                return
            modes = termios.tcgetattr(descriptor)
            self._echo = [*modes[:6], list(modes[6])]
            modes[3] &= ~(termios.ECHO | termios.ECHONL)
            termios.tcsetattr(descriptor, termios.TCSANOW, modes)


def _lay_out(text: str) -> str:
    """Return the text that draws these lines from the cursor on, and moves the cursor back."""
    if not text:
        return ""
    up = f"\x1b[{count}A" if (count := text.count("\n")) else ""
    return text.replace("\n", "\x1b[K\r\n") + _ERASE_BELOW + "\r" + up


class _Above(io.TextIOBase):
    """Replaces a stream; prints its output above the status lines, one finished line at a time."""

    def __init__(self, line: StatusLine, stream: TextIO) -> None:
        self._line = line
        self._stream = stream
        self._begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._line._lock:
            lines, end, begun = (self._begun + text).rpartition("\n")
            self._begun = begun
            if end:
                self._line.write_above(self._stream, lines + end)
        return len(text)

    def flush(self) -> None:
        """Do nothing: an unfinished line cannot be shown above another line."""

    def finish(self) -> None:
        """Write the rest of an unfinished line."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(self._begun)
            self._stream.flush()
        self._begun = ""
