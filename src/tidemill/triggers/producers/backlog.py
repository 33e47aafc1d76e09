"""A queue whose items a single task processes in order, in small batches.

Invariant: items returned by `wait_first` stay in the queue until they are removed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """The items that wait for one task."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def add(self, item: T) -> None:
        self._items.append(item)
        self._changed.set()
        self._emptied.clear()

    async def wait_first(self, limit: int) -> list[T]:
        """Wait until there are items, and return the oldest ones, at most `limit`."""
        while not self._items:
            self._changed.clear()
            await self._changed.wait()
        return list(islice(self._items, limit))

    def remove(self, done: Sequence[T]) -> None:
        """Remove some of the items that `wait_first` last returned; `done` is in queue order."""
        kept = []
        for item in done:
            while (oldest := self._items.popleft()) is not item:
                kept.append(oldest)
        self._items.extendleft(reversed(kept))
        if not self._items:
            self._emptied.set()

    async def wait_empty(self) -> None:
        """Wait until the queue is empty."""
        await self._emptied.wait()
