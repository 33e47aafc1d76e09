"""The signals that ask a command to end, the same for all commands.

Invariant: SIGHUP counts only where nobody ignores it: with `nohup`, a command outlives its terminal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


def find_stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to end: SIGTERM, SIGINT and, unless it is ignored, SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def stop_on_signals() -> None:
    """Let signals to stop raise KeyboardInterrupt, SIGINT also where a shell that runs a script ignores it."""
    for number in find_stop_signals():
        signal.signal(number, signal.default_int_handler)


class EarlyStop:
    """Ends this process at once at a signal to stop, while little has begun that would have to be ended.

    Args:
        code: The exit code; None: the process ends by the signal.
        tidy: Called before; must be quick.
    """

    def __init__(self, code: int | None, tidy: Callable[[], None] | None = None) -> None:
        """Handle nothing yet."""
        self.code = code
        self._tidy = tidy

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """End the process: an exception would be lost in what imports call back."""
        if self._tidy is not None:
            self._tidy()
        if self.code is not None:
            os._exit(self.code)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def handle_signal(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> Any:
    """Handle a signal from now on, and return what is to handle it afterwards; an `EarlyStop` is over for good."""
    before = signal.signal(number, handler)
    return find_default(number) if isinstance(before, EarlyStop) else before


def find_default(number: int) -> Any:
    """Return what handles a signal in a process that has not changed that."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
