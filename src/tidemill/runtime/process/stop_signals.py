"""The signals that ask a command to stop, the same for all commands.

Invariant: an ignored SIGHUP stays ignored; with `nohup`, a command outlives its terminal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


def find_stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop: SIGTERM, SIGINT and, unless it is ignored, SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def stop_on_signals() -> None:
    """Let stop signals raise KeyboardInterrupt; SIGINT does so even if a shell that runs a script ignores it."""
    for number in find_stop_signals():
        signal.signal(number, signal.default_int_handler)


class EarlyStop:
    """Ends this process at once at a stop signal, while little has begun that would have to be cleaned up.

    Args:
        code: The exit code; None ends the process by the signal.
        tidy: Called before the end; must be quick.
    """

    def __init__(self, code: int | None, tidy: Callable[[], None] | None = None) -> None:
        self.code = code
        self._tidy = tidy

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """End the process; an exception would be lost in callbacks of imports."""
        if self._tidy is not None:
            self._tidy()
        if self.code is not None:
            os._exit(self.code)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def handle_signal(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> Any:
    """Handle a signal from now on, and return the handler to restore afterwards, which is never an `EarlyStop`."""
    before = signal.signal(number, handler)
    return find_default(number) if isinstance(before, EarlyStop) else before


def find_default(number: int) -> Any:
    """Return the handler of a signal in a process that has not changed it."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
