"""What a trigger host is told by signals, from its first moment on.

SIGTERM and SIGINT stop in good order, a second one at once; SIGHUP asks for the list to be read again.

Invariants: a signal that comes before there is an event loop is kept for it; a second signal to stop works even if a
trigger blocks the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

import structlog

from tidemill.runtime.exitcode import ExitCode

log = structlog.get_logger(__name__)


class Signals:
    """The signals of this process."""

    def __init__(self) -> None:
        """Hear none yet."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = self._hung_up = False
        self._on_hangup: Callable[[], None] | None = None
        self.stop = asyncio.Event()

    def listen(self) -> None:
        """Hear signals from now on; in the main thread, with or without a loop."""
        # Not the loop's own handlers: a trigger that blocks the loop is when a second signal is needed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        signal.signal(signal.SIGHUP, self._hang_up)

    def attach(self) -> None:
        """Hand over to the running loop what was heard, and what will be."""
        self._loop = asyncio.get_running_loop()
        if self._ending:
            self._stop()

    def on_hangup(self, read_again: Callable[[], None]) -> None:
        """Have this called on the loop when the list is to be read again; now, if that was asked for already."""
        self._on_hangup = read_again
        self._read_again()

    @staticmethod
    def close() -> None:
        """Ignore hangups from now on: there is no list any more, and the interpreter would let them end the process."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _end(self, number: int, frame: object) -> None:
        if self._ending:
            os._exit(ExitCode.STOPPED)
        self._ending = True
        self._call(self._stop)

    def _hang_up(self, number: int, frame: object) -> None:
        self._hung_up = True
        self._call(self._read_again)

    def _call(self, what: Callable[[], None]) -> None:
        if self._loop is not None:
            # The loop may be closed: then all that is left is to end.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(what)

    def _stop(self) -> None:
        if not self.stop.is_set():
            log.info("stopping; a second signal stops at once")
            self.stop.set()

    def _read_again(self) -> None:
        if self._hung_up and self._on_hangup is not None and not self.stop.is_set():
            self._hung_up = False
            self._on_hangup()
