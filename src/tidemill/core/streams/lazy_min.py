"""The lowest of many keys that only rise: finds the last member without scanning all of them.

It is not notified when a key rises. The heap holds a lower bound for each member, corrected only when the member comes
to the top. A member therefore costs something only while it is last, at most once per rise.

Invariants:
1. A recorded key is never above the true one.
2. Members without a key are removed when they come to the top, or all at once when they are more than half.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MemberT = TypeVar("MemberT", bound=Hashable)
KeyT = TypeVar("KeyT", bound=float)

#: Fewer members than this are not worth a sweep.
_SWEEP_FROM = 16


class LazyMin(Generic[MemberT, KeyT]):
    """Members by a key that only rises.

    Args:
        key: Returns the current key of a member, or None if it no longer has one.

    Example:
        >>> keys = {"a": 3, "b": 1}
        >>> lowest = LazyMin(keys.get)
        >>> lowest.add("a"), lowest.add("b")
        (None, None)
        >>> keys["b"] = 7
        >>> lowest.find_top()
        'a'
    """

    __slots__ = ("_heap", "_key", "_out", "_serial", "members")

    def __init__(self, key: Callable[[MemberT], KeyT | None]) -> None:
        self._key = key
        self._heap: list[tuple[KeyT, int, MemberT]] = []
        self._serial = 0
        self._out = 0
        #: The members; some may no longer have a key.
        self.members: set[MemberT] = set()

    def add(self, member: MemberT) -> None:
        """Add a member; one that was added before, or has no key, changes nothing."""
        key = self._key(member)
        if key is not None and member not in self.members:
            self.members.add(member)
            self._serial += 1
            heapq.heappush(self._heap, (key, self._serial, member))

    def find_top(self) -> MemberT | None:
        """Return the member with the lowest key, the first added among equals; None if there is none."""
        heap = self._heap
        while heap:
            recorded, serial, member = heap[0]
            key = self._key(member)
            if key is None:
                heapq.heappop(heap)
                self.members.discard(member)
            elif key > recorded:
                heapq.heapreplace(heap, (key, serial, member))
            else:
                return member
        return None

    def drop_top(self) -> None:
        """Remove the member that `find_top` has just returned."""
        self.members.discard(heapq.heappop(self._heap)[2])

    def find_bound(self) -> KeyT | None:
        """Return a lower bound of all keys in O(1); None if there is none."""
        return self._heap[0][0] if self._heap else None

    def note_out(self) -> None:
        """Count a member that no longer has a key, so that such members are removed in time."""
        self._out += 1
        if self._out > _SWEEP_FROM and self._out * 2 > len(self._heap):
            self._out = 0
            self._heap = [item for item in self._heap if self._key(item[2]) is not None]
            heapq.heapify(self._heap)
            self.members = {member for _, _, member in self._heap}
