"""What is left of a batch at which a sink raised, in the parts in which it is sent to find the item at fault.

Invariant: parts go before everything else of their queue, in the order of the batch, so that no later item of a key
overtakes one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Generic

from tidemill.core.delivery.culprit import split_batch
from tidemill.core.delivery.send_items import Hold, Item, LaneT, State, ValueT


class Parts(Generic[LaneT, ValueT]):
    """The parts, the first one first."""

    def __init__(self) -> None:
        """Start with none."""
        self._parts: deque[Sequence[Item[LaneT, ValueT]]] = deque()
        self._is_part = False

    def __bool__(self) -> bool:
        """Tell whether anything is left."""
        return bool(self._parts)

    def __iter__(self) -> Iterator[Item[LaneT, ValueT]]:
        """Yield what is left, some of it gone."""
        for part in self._parts:
            yield from part

    def split(self, batch: Sequence[Item[LaneT, ValueT]]) -> None:
        """Put a batch, or a part, back in smaller parts."""
        self._parts.extendleft(reversed(split_batch(batch, is_part=self._is_part)))

    def count(self, deadline: float) -> None:
        """Count what was not tried alone yet as refused, once: it was the sink that failed."""
        for item in self:
            if item.deadline is None and item.state is not State.GONE:
                item.refused(deadline)

    def put_first(self, items: Sequence[Item[LaneT, ValueT]]) -> None:
        """Send these before the others: they waited for one that has ended."""
        self._parts.appendleft(items)

    def take(
        self,
        max_count: int,
        max_bytes: int,
        holds: Mapping[Hashable, Hold[LaneT, ValueT]],
        passed: Callable[[Item[LaneT, ValueT]], None],
    ) -> list[Item[LaneT, ValueT]]:
        """Return what is to be sent of the next part; nothing if no part has anything left.

        Args:
            max_count: No more items than this.
            max_bytes: And bytes, unless a single item is larger.
            holds: Items whose key another one holds are put behind that one.
            passed: Called with those that are gone.
        """
        batch: list[Item[LaneT, ValueT]] = []
        while self._parts and not batch:
            size = 0
            part = self._parts.popleft()
            for index, item in enumerate(part):
                if item.state is State.GONE:
                    passed(item)
                    continue
                hold = holds.get(item.key) if item.key is not None else None
                if hold is not None and hold.head is not item:
                    item.state = State.WAITING
                    hold.behind.append(item)
                    continue
                size += item.size_bytes
                if batch and (len(batch) == max_count or size > max_bytes):
                    self._parts.appendleft(part[index:])
                    break
                batch.append(item)
        self._is_part = bool(batch)
        return batch
