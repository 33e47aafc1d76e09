"""Arithmetic of counts: the change between two readings, and the sum of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: The number of partitions that are counted each second; with more of them, each is counted every few seconds.
PARTITIONS_PER_SECOND = 64


def subtract_count(now: int, before: int) -> int:
    """Return how much a count rose; a count that fell was reset.

    Example:
        >>> subtract_count(7, 5), subtract_count(2, 5)
        (2, 2)
    """
    return now - before if now >= before else now


def subtract_buckets(now: Sequence[int], before: Sequence[int]) -> list[int]:
    """Return how much each bucket rose; buckets missing from `before` count as empty."""
    filled = [*before, *(0 for _ in range(len(now) - len(before)))]
    return [subtract_count(count, past) for count, past in zip(now, filled, strict=False)]


def add_buckets(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the sums of two lists of buckets, either of which may be empty.

    Example:
        >>> add_buckets([], [1, 2]), add_buckets([1, 2], [3, 4])
        ([1, 2], [4, 6])
    """
    if not first or not second:
        return list(first or second)
    return [one + other for one, other in zip(first, second, strict=True)]


def find_changed(now: Mapping[str, object], before: Mapping[str, object]) -> list[str]:
    """Return the names whose values are new or have changed."""
    return [name for name, value in now.items() if before.get(name) != value]


def seconds_between_partitions(partitions: int) -> int:
    """Return the interval in seconds at which each partition is counted.

    Example:
        >>> seconds_between_partitions(8), seconds_between_partitions(1000)
        (1, 16)
    """
    return max(1, -(-partitions // PARTITIONS_PER_SECOND))
