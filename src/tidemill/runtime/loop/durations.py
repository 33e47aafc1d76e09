"""Histograms of durations that are cheap to update, and can be sent and summed."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable

import msgspec

#: The upper bounds of the histogram's buckets, in seconds.
DURATION_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Durations(msgspec.Struct):
    """The durations of one kind of event.

    Attributes:
        counts: The number of durations per upper bound, followed by the number of longer ones; empty before the first.
        seconds: The sum of all of them.

    Example:
        >>> waits = Durations()
        >>> waits.add(0.02)
        >>> waits.counts[:4], waits.seconds
        ([0, 0, 1, 0], 0.02)
    """

    counts: list[int] = []
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        if not self.counts:
            self.counts = [0] * (len(DURATION_BOUNDS) + 1)
        self.counts[bisect_left(DURATION_BOUNDS, seconds)] += 1
        self.seconds += seconds

    def copy(self) -> Durations:
        """Return a copy."""
        return Durations(self.counts.copy(), self.seconds)


def sum_durations(parts: Iterable[Durations]) -> Durations:
    """Return the sum of the durations of several sources."""
    counted = [part for part in parts if part.counts]
    if len(counted) == 2:  # the common case: an engine and its predecessors, for each histogram
        one, other = counted
        return Durations(list(map(operator.add, one.counts, other.counts)), one.seconds + other.seconds)
    counts = list(map(sum, zip(*(part.counts for part in counted), strict=True)))
    return Durations(counts, sum(part.seconds for part in counted))
