"""Things that one task works off in order, a few at a time, and that stay until they are done.

Invariant: what `first` returned is still there until `remove` takes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """What waits for one task."""

    def __init__(self) -> None:
        """Be empty."""
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def add(self, item: T) -> None:
        """Put something behind all others."""
        self._items.append(item)
        self._changed.set()
        self._emptied.clear()

    async def first(self, limit: int) -> list[T]:
        """Wait until there is something, and return the oldest."""
        while not self._items:
            self._changed.clear()
            await self._changed.wait()
        return list(islice(self._items, limit))

    def remove(self, done: Sequence[T]) -> None:
        """Forget some of what `first` returned last, in its order."""
        kept = []
        for item in done:
            while (oldest := self._items.popleft()) is not item:
                kept.append(oldest)
        self._items.extendleft(reversed(kept))
        if not self._items:
            self._emptied.set()

    async def empty(self) -> None:
        """Wait until nothing is left."""
        await self._emptied.wait()
