"""A virtual clock: an event loop whose time jumps to the next timer when there is nothing else to do.

It suits code that waits only on timers. Real processes, threads and sockets take real time, and the loop does not wait
for them while a timer is pending.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self.now += timeout
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock that starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jumping.now


def run_on_virtual_clock(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a virtual clock and return its result; an hour of `asyncio.sleep` takes no time.

    Example:
        >>> import asyncio
        >>> run_on_virtual_clock(asyncio.sleep(3600, "done"))
        'done'
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
