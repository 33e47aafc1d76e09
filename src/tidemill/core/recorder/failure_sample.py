"""Which failures are recorded one by one when there are too many, so that the counts of all of them stay exact.

Invariant: what is not admitted is counted by kind and error class, and handed out when its second is over.
"""

from __future__ import annotations

#: What is counted separately in one second; the rest is counted together.
MAX_CLASSES = 100
OTHERS = "(others)"


class FailureSample:
    """The failures of one second after another.

    Args:
        per_second: How many of each second are recorded.

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
        """Tell whether a failure is recorded by itself; if not, it is counted.

        Args:
            now: A clock that never goes back, in seconds.
            kind: What failed.
            error_class: By what failures are grouped.
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
        """Return how many failures of seconds that are over were only counted, by kind and error class."""
        self._turn_to(int(now))
        over, self._over = self._over, {}
        return over

    def take_last_counts(self) -> dict[tuple[str, str], int]:
        """Return the same with the current second, at the end."""
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
