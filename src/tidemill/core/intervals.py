"""A set of integers, stored as sorted intervals.

Invariants: intervals are [start, end) with start < end, sorted, and neither overlap nor touch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Intervals:
    """Sorted, disjoint intervals.

    Example:
        >>> numbers = Intervals()
        >>> numbers.add(3, 5); numbers.add(7, 8); numbers.add(5, 7)
        >>> numbers.list_pairs()
        ((3, 8),)
        >>> 4 in numbers, 8 in numbers
        (True, False)
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add the numbers of [start, end); an empty interval changes nothing."""
        if start >= end:
            return
        # The intervals that overlap or touch the new one start with the first that ends at `start` or later.
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def absorb(self, floor: int) -> int:
        """Remove all numbers up to the first gap at or after `floor`, and return the first number of the gap."""
        count = bisect_right(self._starts, floor)
        if count:
            floor = max(floor, self._ends[count - 1])
            del self._starts[:count], self._ends[:count]
        return floor

    def list_pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the intervals, in order."""
        return tuple(zip(self._starts, self._ends, strict=True))

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._ends[index]

    def __len__(self) -> int:
        return len(self._starts)
