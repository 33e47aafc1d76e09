"""One line, or some, at the bottom of a terminal that are replaced again and again, while other output scrolls above.

Invariants: the cursor always rests at the beginning of the first line, so that one sequence erases the lines however
the terminal wrapped them at a resize; it is never hidden. New lines are written over the old ones, in one write, so
that nothing flickers; they never take more than half of the terminal's height. They are erased before anything else is
written, before the process is suspended, and at the end, so that they are never left behind. They are drawn only while
the process is in the terminal's foreground. What fails here never reaches what runs.
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
#: The same from the beginning of the line. Done in one step at the top of the screen, tmux takes it for clearing the
#: screen, and keeps what was there in its scrollback.
_ERASE = f"\r\x1b[K\x1b[C{_ERASE_BELOW}\r"
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_SPINNER = "|/-\\"
#: A process that suspends itself has stopped by then.
_SUSPENDED_SECONDS = 0.05
_SUSPEND, _REDRAW, _END = "suspend", "redraw", "end"
_SIGNALS = (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


class StatusLine:
    """The line, while the block runs.

    Args:
        text: Returns what it says, in lines of at most the given number of columns; called from a thread. As long as
            that is nothing, no line is drawn, and the terminal shows what is typed.
    """

    def __init__(self, text: Callable[[int], str]) -> None:
        """Draw nothing yet."""
        self._text = text
        self._stream: TextIO = sys.stderr
        self._replaced: list[tuple[str, TextIO, _Above]] = []
        # A signal handler or a finalizer may write in the middle of a write of its own thread.
        self._lock = threading.RLock()
        self._wishes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tidemill-status", daemon=True)
        self._handlers: dict[int, Any] = {}
        self._line = ""
        self._drawn = self._over = False
        self._frame = 0
        self._echo: list[Any] | None = None

    def __enter__(self) -> Self:
        """Take over standard output and standard error, as far as they are this terminal, and begin to draw."""
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
        """Erase the line and give everything back."""
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

    # -- what scrolls above ------------------------------------------------------------------------------------

    def write_above(self, stream: TextIO, text: str) -> None:
        """Write finished lines where the line was, and draw it again below them."""
        with self._lock:
            drawn = self._line if self._line and self._is_in_foreground() else ""
            # In one write, so that what is below does not flicker.
            stream.write(f"{_ERASE if self._drawn else ''}{text}{_lay_out(drawn)}")
            stream.flush()
            self._drawn = bool(drawn)

    # -- drawing -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wish = _REDRAW
        while wish != _END:
            # A display that fails must not make what runs fail.
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
        """Return how many lines there is room for; the log needs most of the terminal."""
        if os.environ.get("TERM", "dumb") == "dumb":
            return 1  # it cannot move the cursor up
        with contextlib.suppress(OSError, ValueError):
            if lines := os.get_terminal_size(self._stream.fileno()).lines:
                return max(1, lines // 2)
        return 1

    def _is_in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError):  # not the terminal of this session: no shell shares it
            return True

    # -- suspending --------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Only note it: the lock may be held by this very thread."""
        if number == signal.SIGTSTP:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            self._wishes.put(_SUSPEND)
            return
        if number == signal.SIGCONT:
            signal.signal(signal.SIGTSTP, self._on_signal)
        self._wishes.put(_REDRAW)

    def _suspend(self) -> None:
        """Erase the line, and stop this process as Ctrl-Z would have."""
        with self._lock:
            self._erase()
            self._set_echo(True)
            os.kill(os.getpid(), signal.SIGTSTP)
            time.sleep(_SUSPENDED_SECONDS)

    def _set_echo(self, on: bool) -> None:
        """Let the terminal show typed keys or not: Enter would leave the line behind."""
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
    """Return what draws these lines from the cursor on, and brings it back."""
    if not text:
        return ""
    up = f"\x1b[{count}A" if (count := text.count("\n")) else ""
    return text.replace("\n", "\x1b[K\r\n") + _ERASE_BELOW + "\r" + up


class _Above(io.TextIOBase):
    """Takes the place of a stream: what is written appears above the line, as soon as a line of it is finished."""

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
        """Do nothing: a line that is not finished cannot be shown above another one."""

    def finish(self) -> None:
        """Write what is left of a line that was not finished."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(self._begun)
            self._stream.flush()
        self._begun = ""
