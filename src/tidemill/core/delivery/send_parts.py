"""The parts of a batch for which a sink raised. They are sent one after another to find the item at fault.

Invariant: parts are sent ahead of everything else in their queue, in the order of the batch, so that no later item of a
key overtakes one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Generic

from tidemill.core.delivery.culprit import split_batch
from tidemill.core.delivery.send_items import HeldKey, Item, LaneT, State, ValueT


class Parts(Generic[LaneT, ValueT]):
    """The parts, in the order in which they are sent."""

    def __init__(self) -> None:
        self._parts: deque[Sequence[Item[LaneT, ValueT]]] = deque()
        self._is_part = False

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __iter__(self) -> Iterator[Item[LaneT, ValueT]]:
        """Yield the remaining items, including some that are already done."""
        for part in self._parts:
            yield from part

    def split(self, batch: Sequence[Item[LaneT, ValueT]]) -> None:
        """Put a batch, or a part of one, back as smaller parts."""
        self._parts.extendleft(reversed(split_batch(batch, is_part=self._is_part)))

    def note_refusals(self, deadline: float) -> None:
        """Start the retry budget of every item that has not been refused yet: the sink failed, not an item."""
        for item in self:
            if item.deadline is None and item.state is not State.GONE:
                item.note_refusal(deadline)

    def put_first(self, items: Sequence[Item[LaneT, ValueT]]) -> None:
        """Send these items before the others, because the item that held them back is done."""
        self._parts.appendleft(items)

    def take(
        self,
        max_count: int,
        max_bytes: int,
        holds: Mapping[Hashable, HeldKey[LaneT, ValueT]],
        passed: Callable[[Item[LaneT, ValueT]], None],
    ) -> list[Item[LaneT, ValueT]]:
        """Return the items of the next part to send; empty if no parts are left.

        Args:
            max_count: The maximum number of items.
            max_bytes: The maximum total size, unless a single item is larger.
            holds: The held keys. An item whose key is held by another item is queued behind that item.
            passed: Called with each item that is already done.
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
