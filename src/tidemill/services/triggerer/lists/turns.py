"""Serializes the steps of a host: starts and reloads run in the order of their calls, until a stop ends them.

Invariants: no two steps overlap; after `close` no step begins, and none is under way; an interrupted step has ended
before its caller learns of the interruption.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class HostStopsError(Exception):
    """The host is stopping, so nothing more is started or changed."""


class Turns:
    """Runs steps one after another."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._step: asyncio.Task[Any] | None = None
        self.closed = False

    async def take(self, step: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
        """Run a step after the steps before it have ended, and return its result.

        Args:
            step: Called when its turn comes.
            name: The name of its task.

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
        """Start no more steps, interrupt the current one, and wait until it has ended."""
        self.closed = True
        if self._step is not None:
            self._step.cancel("the host stops")
        async with self._turn:
            pass
