"""Counts the messages of partitions, a batch at a time; what has changed since the last beat is known."""

from __future__ import annotations

from tidemill.runtime.progress import Flow


class PartitionFlow:
    """How many messages of each partition were taken, committed, and given up uncommitted, whoever owns it by now.

    Attributes:
        totals: The counts by the partition's name; changes with every call.
    """

    __slots__ = ("_moved", "totals")

    def __init__(self) -> None:
        """Start without any."""
        self.totals: dict[str, Flow] = {}
        self._moved: dict[str, Flow] = {}

    def add(self, name: str, taken: int = 0, committed: int = 0, given_up: int = 0) -> None:
        """Count messages of a partition."""
        before = self.totals.get(name, (0, 0, 0))
        self.totals[name] = self._moved[name] = (before[0] + taken, before[1] + committed, before[2] + given_up)

    def take_moved(self) -> dict[str, Flow]:
        """Return what changed since the last call."""
        moved, self._moved = self._moved, {}
        return moved
