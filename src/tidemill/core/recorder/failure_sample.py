"""Limits how many failures are recorded individually, and counts the others exactly.

Invariant: failures that are not admitted are counted by kind and error class; the counts are returned when their second
is over.
"""

from __future__ import annotations

#: The number of combinations that are counted separately in one second; all others are counted together.
MAX_CLASSES = 100
OTHERS = "(others)"


class FailureSample:
    """The failures, second by second.

    Args:
        per_second: The number of failures per second that are recorded.

    Example:
        >>> sample = FailureSample(1)
        >>> [sample.admits(7.1, "task_failed", "exit code 3") for _ in range(3)]
        [True, False, False]
        >>> sample.take_counts(7.9)
        {}
        >>> sample.take_counts(8.0)
        {('task_failed', 'exit code 3'): 2}
    """

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._second = -1
        self._admitted = 0
        self._counts: dict[tuple[str, str], int] = {}
        self._over: dict[tuple[str, str], int] = {}

    def admits(self, now: float, kind: str, error_class: str) -> bool:
        """Return whether a failure is recorded individually; if not, it is counted.

        Args:
            now: The time of a monotonic clock, in seconds.
            kind: The kind of failure.
            error_class: The class by which failures are grouped.
        """
        self._turn_to(int(now))
        if self._admitted < self._per_second:
            self._admitted += 1
            return True
        key = (kind, error_class)
        if key not in self._counts and len(self._counts) >= MAX_CLASSES:
            key = (kind, OTHERS)
        self._counts[key] = self._counts.get(key, 0) + 1
        return False

    def take_counts(self, now: float) -> dict[tuple[str, str], int]:
        """Return the counts of past seconds, by kind and error class."""
        self._turn_to(int(now))
        over, self._over = self._over, {}
        return over

    def take_last_counts(self) -> dict[tuple[str, str], int]:
        """Return the counts at the end, including the current second."""
        self._turn_to(self._second + 1)
        over, self._over = self._over, {}
        return over

    def _turn_to(self, second: int) -> None:
        if second == self._second:
            return
        self._second, self._admitted = second, 0
        for key, count in self._counts.items():
            self._over[key] = self._over.get(key, 0) + count
        self._counts = {}
