"""Wakes a task of a shared stream that waits for a change."""

from __future__ import annotations

import asyncio


class WakeBell:
    """Wakes the one task that waits; if no task waits, the next wait returns at once."""

    __slots__ = ("_future", "rung")

    def __init__(self) -> None:
        self.rung = False
        self._future: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake the waiting task."""
        self.rung = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        """Wait until the bell is rung, then reset it."""
        if not self.rung:
            self._future = asyncio.get_running_loop().create_future()
            try:
                await self._future
            finally:
                self._future = None
        self.rung = False
