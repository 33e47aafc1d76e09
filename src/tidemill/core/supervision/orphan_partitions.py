"""Finds partitions of a consumer group that have been without an owner for too long.

A cooperative rebalance has two rounds: in the first, members give partitions up; in the second, other members get them.
A member that dies in between is replaced under its static id without a second round: the group counts as stable, and
those partitions are not read until the group changes. Nothing is lost, but they make no progress.

Invariants: a partition is reported only if every check for `patience_seconds` found it without an owner, so that a
member that needs time to finish its work between the two rounds is not disturbed; it is not reported again before the
same time has passed once more.
"""

from __future__ import annotations

from collections.abc import Set


class OwnerWatch:
    """Watches one topic of one group. All times are seconds of one monotonic clock.

    Args:
        patience_seconds: How long a partition may be without an owner.

    Example:
        >>> watch = OwnerWatch(30.0)
        >>> watch.check(0.0, True, {0, 1}, {0}), watch.check(40.0, True, {0, 1}, {0})
        ([], [1])
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        #: The partitions that were reported and have had no owner since.
        self.orphans: list[int] = []
        self._since: dict[int, float] = {}

    def check(self, now: float, settled: bool, partitions: Set[int], owned: Set[int]) -> list[int]:
        """Check the state of the group; return the orphaned partitions, for which the group has to rebalance.

        Args:
            now: The current time.
            settled: Whether the group has members and is not rebalancing.
            partitions: All partitions of the topic.
            owned: The partitions that a member owns.
        """
        if not settled:
            self._since.clear()
            return []
        without = partitions - owned
        self._since = {partition: self._since.get(partition, now) for partition in without}
        named = sorted(partition for partition, since in self._since.items() if now - since >= self._patience)
        self.orphans = sorted(without & {*self.orphans, *named})
        if named:
            self._since = dict.fromkeys(without, now)
        return named
