"""Tells when partitions of a consumer group have been without an owner for too long.

A cooperative rebalance has two rounds: in the first, a member gives partitions up; in the second they are given to
another. A member that dies in between is replaced under its static id without a second round, the group counts as
stable, and those partitions are not read until the group changes. Nothing is lost, but they stand still.

Invariants: a partition is named only if it had no owner at every look for as long as the patience, so a member
that is given time to finish its work between the two rounds is left alone; a named partition is not named again for as
long.
"""

from __future__ import annotations

from collections.abc import Set


class OwnerWatch:
    """Looks at one topic of one group; all times are seconds of one monotonic clock.

    Args:
        patience_seconds: How long a partition may be without an owner.

    Example:
        >>> watch = OwnerWatch(30.0)
        >>> watch.look(0.0, True, {0, 1}, {0}), watch.look(40.0, True, {0, 1}, {0})
        ([], [1])
    """

    def __init__(self, patience_seconds: float) -> None:
        """Start without a look."""
        self._patience = patience_seconds
        self._since: dict[int, float] = {}

    def look(self, now: float, settled: bool, partitions: Set[int], owned: Set[int]) -> list[int]:
        """Feed the state of the group; return the orphaned partitions, for which it has to rebalance.

        Args:
            now: The time.
            settled: The group has members and is not rebalancing.
            partitions: Those of the topic.
            owned: Those that a member has.
        """
        if not settled:
            self._since.clear()
            return []
        without = partitions - owned
        self._since = {partition: self._since.get(partition, now) for partition in without}
        named = sorted(partition for partition, since in self._since.items() if now - since >= self._patience)
        if named:
            self._since = dict.fromkeys(without, now)
        return named
