"""Items that are tried again: when each is due, and which go next.

Of those that are due, the oldest goes first. An item at which the sink raised alone goes alone, and after a call that
left open whose fault it was the others have one turn before it: they show whether the sink works.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic

from tidemill.core.delivery.send_items import Item, LaneT, State, ValueT


class Probes(Generic[LaneT, ValueT]):
    """The items of one queue that are tried again; times are seconds of the queue's clock."""

    def __init__(self) -> None:
        """Start with none."""
        self._due: list[Item[LaneT, ValueT]] = []
        self._later: list[tuple[float, Item[LaneT, ValueT]]] = []
        self._others_first = False

    def __bool__(self) -> bool:
        """Tell whether any item is there, due or not."""
        return bool(self._due or self._later)

    def __iter__(self) -> Iterator[Item[LaneT, ValueT]]:
        """Yield the items, some of them gone."""
        yield from self._due
        for _, item in self._later:
            yield item

    def add(self, item: Item[LaneT, ValueT], due: float | None = None) -> None:
        """Try an item at this time; None: now."""
        if due is None:
            heapq.heappush(self._due, item)
        else:
            heapq.heappush(self._later, (due, item))

    def let_others_first(self) -> None:
        """Let others go once before those at which the sink raised."""
        self._others_first = True

    def due(self, now: float) -> bool:
        """Tell whether any item is due."""
        while self._later and self._later[0][0] <= now:
            heapq.heappush(self._due, heapq.heappop(self._later)[1])
        return bool(self._due)

    def next_due(self, now: float) -> float | None:
        """Return when the next item is due, `now` if one is already; None without one."""
        if self._due:
            return now
        return self._later[0][0] if self._later else None

    def take(
        self, max_count: int, max_bytes: int, passed: Callable[[Item[LaneT, ValueT]], None]
    ) -> tuple[list[Item[LaneT, ValueT]], bool]:
        """Take items that are due, and tell whether nothing may be added to them.

        Args:
            max_count: No more items than this.
            max_bytes: And bytes, unless a single item is larger.
            passed: Called with those that are gone.
        """
        batch: list[Item[LaneT, ValueT]] = []
        alone: list[Item[LaneT, ValueT]] = []
        size, full = 0, False
        while self._due and not full:
            item = heapq.heappop(self._due)
            if item.state is State.GONE:
                passed(item)
            elif item.raised_alone and (batch or self._others_first):
                alone.append(item)
            elif batch and (len(batch) == max_count or size + item.size_bytes > max_bytes):
                heapq.heappush(self._due, item)
                full = True
            else:
                batch.append(item)
                size += item.size_bytes
                full = item.raised_alone
        self._others_first = False
        for item in alone:
            heapq.heappush(self._due, item)
        return batch, full
