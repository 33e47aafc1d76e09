"""Finds the partitions that backpressure pauses for so long that it is worth recording.

Under full load partitions are paused and resumed many times a second, which is not worth an event. Invariant: a pause
that was reported as begun is reported as over before another one of the partition is reported.
"""

from __future__ import annotations

from collections.abc import Collection


class PauseWatch:
    """The partitions of one engine.

    Args:
        seconds: How long a partition has to be paused, or running, in all checks.

    Example:
        >>> watch = PauseWatch(2.0)
        >>> watch.look(0.0, ["t/0"]), watch.look(2.0, ["t/0"]), watch.look(3.0, []), watch.look(5.0, [])
        (([], []), (['t/0'], []), ([], []), ([], ['t/0']))
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._held_since: dict[str, float] = {}
        #: When a partition that was reported as paused was first seen running; None: it is paused.
        self._told: dict[str, float | None] = {}

    def look(self, now: float, held: Collection[str]) -> tuple[list[str], list[str]]:
        """Check which partitions are paused now; return those whose pause has begun, and those whose pause is over.

        Args:
            now: The time of a monotonic clock, in seconds.
            held: The partitions that are paused.
        """
        self._held_since = {name: self._held_since.get(name, now) for name in held}
        begun, over = [], []
        for name, since in self._held_since.items():
            if name in self._told:
                self._told[name] = None
            elif now - since >= self._seconds:
                self._told[name] = None
                begun.append(name)
        for name, free_since in list(self._told.items()):
            if name in self._held_since:
                continue
            if free_since is None:
                self._told[name] = now
            elif now - free_since >= self._seconds:
                del self._told[name]
                over.append(name)
        return begun, over
