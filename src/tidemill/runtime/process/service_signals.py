"""The signals of a service, from its first moment on.

SIGTERM and SIGINT stop gracefully, a second one at once. SIGHUP also stops `dev`, and makes a trigger host reload its
list.

Invariants: a signal that arrives before the event loop exists is stored for it. A second stop signal works even if the
loop is blocked. Closing a terminal, which may send SIGHUP twice, never stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

import structlog

from tidemill.runtime.process.exitcode import ExitCode

log = structlog.get_logger(__name__)

T = TypeVar("T")


async def finish_or_stop(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> asyncio.Task[T] | None:
    """Run work to its end and return its finished task; None if the stop came first, and the work was cancelled.

    Args:
        work: Work that may take forever, such as a start that never succeeds.
        stop: Set when the process is to stop.
    """
    doing, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return doing if doing.done() else None
    finally:
        doing.cancel()
        stopping.cancel()
        await asyncio.wait({doing, stopping})


class Signals:
    """The signals of this process.

    Args:
        is_child: Whether another process of tidemill stops this one, and logs the stop itself.
    """

    def __init__(self, *, is_child: bool = False) -> None:
        self._is_child = is_child
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = self._hung_up = False
        self._on_hangup: Callable[[], None] | None = None
        self.stop = asyncio.Event()

    def listen(self, stop: Collection[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        """Handle signals from now on; call it in the main thread, with or without a loop.

        Args:
            stop: The signals that stop this process. If SIGHUP is not among them, it reloads, if there is something to
                reload.
        """
        # Not the loop's own handlers: a second signal is needed precisely when the loop is blocked.
        for number in stop:
            signal.signal(number, self._end)
        if signal.SIGHUP not in stop:
            signal.signal(signal.SIGHUP, self._hang_up)

    def attach(self) -> None:
        """Pass signals, including earlier ones, to the running loop."""
        self._loop = asyncio.get_running_loop()
        if self._ending:
            self._stop()

    def on_hangup(self, read_again: Callable[[], None]) -> None:
        """Call `read_again` on the loop at a SIGHUP, and at once if one arrived earlier."""
        self._on_hangup = read_again
        self._read_again()

    @staticmethod
    def close() -> None:
        """Ignore SIGHUP from now on; nothing can be reloaded any more, and by default it would end the process."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _end(self, number: int, frame: object) -> None:
        if self._ending:
            if number == signal.SIGHUP:
                return
            os._exit(ExitCode.STOPPED)
        self._ending = True
        self._call(self._stop)

    def _hang_up(self, number: int, frame: object) -> None:
        self._hung_up = True
        self._call(self._read_again)

    def _call(self, what: Callable[[], None]) -> None:
        if self._loop is not None:
            # The loop may be closed; the process is then about to end.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(what)

    def _stop(self) -> None:
        if not self.stop.is_set():
            if not self._is_child:
                log.info("stopping; a second signal stops at once")
            self.stop.set()

    def _read_again(self) -> None:
        if self._hung_up and self._on_hangup is not None and not self.stop.is_set():
            self._hung_up = False
            self._on_hangup()
