"""The steps of a host's life, one at a time: start and reload in the order of their calls, until a stop ends them all.

Invariants: no two steps overlap; after `close` no step begins, and none is under way; a step that is interrupted has
ended before anybody is told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class HostStopsError(Exception):
    """The host stops, so nothing is started or changed any more."""


class Turns:
    """Whose turn it is."""

    def __init__(self) -> None:
        """Nobody's."""
        self._turn = asyncio.Lock()
        self._step: asyncio.Task[Any] | None = None
        self.closed = False

    async def take(self, step: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
        """Return what a step returns, which begins when those before it have ended.

        Args:
            step: Called when its turn comes.
            name: What its task is called.

        Raises:
            HostStopsError: `close` was called before the step had ended.
        """
        async with self._turn:
            if self.closed:
                raise HostStopsError
            self._step = task = asyncio.get_running_loop().create_task(step(), name=name)
            try:
                return await task
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if self.closed and not (caller is not None and caller.cancelling()):
                    raise HostStopsError from None
                raise
            finally:
                self._step = None

    async def close(self) -> None:
        """Begin no step any more; interrupt the one under way, and wait until it has ended."""
        self.closed = True
        if self._step is not None:
            self._step.cancel("the host stops")
        async with self._turn:
            pass
