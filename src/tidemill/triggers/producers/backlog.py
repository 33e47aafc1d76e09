"""A queue whose items one task processes in order, a few at a time.

Invariant: what `wait_first` returned stays in the queue until it is removed.
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
        """Start empty."""
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def add(self, item: T) -> None:
        """Append an item."""
        self._items.append(item)
        self._changed.set()
        self._emptied.clear()

    async def wait_first(self, limit: int) -> list[T]:
        """Wait until there are items, and return the oldest ones."""
        while not self._items:
            self._changed.clear()
            await self._changed.wait()
        return list(islice(self._items, limit))

    def remove(self, done: Sequence[T]) -> None:
        """Remove some of the items that `wait_first` returned last, in their order."""
        kept = []
        for item in done:
            while (oldest := self._items.popleft()) is not item:
                kept.append(oldest)
        self._items.extendleft(reversed(kept))
        if not self._items:
            self._emptied.set()

    async def wait_empty(self) -> None:
        """Wait until nothing is left."""
        await self._emptied.wait()
