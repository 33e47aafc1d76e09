"""Items to be retried, ordered by when they are due.

Of the items that are due, the oldest goes first. An item whose own call raised is sent alone. If such a call left open
whether the item or the sink was at fault, the other items have a turn first: they show whether the sink works.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic

from tidemill.core.delivery.send_items import Item, LaneT, State, ValueT


class Probes(Generic[LaneT, ValueT]):
    """The items of one queue that are retried. Times are seconds of the queue's clock."""

    def __init__(self) -> None:
        self._due: list[Item[LaneT, ValueT]] = []
        self._later: list[tuple[float, Item[LaneT, ValueT]]] = []
        self._others_first = False

    def __bool__(self) -> bool:
        return bool(self._due or self._later)

    def __iter__(self) -> Iterator[Item[LaneT, ValueT]]:
        """Yield the items, including some that are already done."""
        yield from self._due
        for _, item in self._later:
            yield item

    def add(self, item: Item[LaneT, ValueT], due: float | None = None) -> None:
        """Schedule the retry of an item; None: now."""
        if due is None:
            heapq.heappush(self._due, item)
        else:
            heapq.heappush(self._later, (due, item))

    def let_others_first(self) -> None:
        """Give the other items one turn before those whose own call raised."""
        self._others_first = True

    def has_due(self, now: float) -> bool:
        """Return whether any item is due."""
        while self._later and self._later[0][0] <= now:
            heapq.heappush(self._due, heapq.heappop(self._later)[1])
        return bool(self._due)

    def find_next_due(self, now: float) -> float | None:
        """Return when the next item is due: `now` if one already is, None if there is no item."""
        if self._due:
            return now
        return self._later[0][0] if self._later else None

    def take(
        self, max_count: int, max_bytes: int, passed: Callable[[Item[LaneT, ValueT]], None]
    ) -> tuple[list[Item[LaneT, ValueT]], bool]:
        """Take items that are due.

        Args:
            max_count: The maximum number of items.
            max_bytes: The maximum total size, unless a single item is larger.
            passed: Called with each item that is already done.

        Returns:
            The items, and whether the batch is closed to other items.
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
