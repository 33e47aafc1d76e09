"""The rate at which a count rises."""

from __future__ import annotations


class Rate:
    """The increase of a count per second over a sliding window.

    Args:
        seconds: The length of the window.

    Example:
        >>> rate = Rate(3.0)
        >>> rate.add(0.0, 100), rate.add(2.0, 300)
        (0.0, 100.0)
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: list[tuple[float, int]] = []

    def add(self, now: float, count: int) -> float:
        """Add a count and return the rate."""
        self._samples.append((now, count))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self._seconds:
            self._samples.pop(0)
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / (last - first) if last > first else 0.0
