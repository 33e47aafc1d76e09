"""The times at which the messages of each partition were committed, kept until their rows are sent.

Invariant: memory grows with the number of commits since `forget_before`, not with the number of messages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from typing import Generic, TypeVar

PartitionT = TypeVar("PartitionT", bound=Hashable)


class CommitTimes(Generic[PartitionT]):
    """The latest commits of an engine.

    Example:
        >>> commits = CommitTimes()
        >>> commits.note("t/0", 5, 1_000)
        >>> commits.note("t/0", 8, 2_000)
        >>> commits.find("t/0", [4, 5, 7, 8])
        [1000, 2000, 2000, None]
    """

    def __init__(self) -> None:
        # The next offsets and the times of the commits, both ascending.
        self._commits: dict[PartitionT, tuple[list[int], list[int]]] = {}

    def note(self, partition: PartitionT, offset: int, at: int) -> None:
        """Record a commit.

        Args:
            partition: The partition.
            offset: Its next offset after the commit. A lower one than before belongs to another ownership.
            at: When the commit was confirmed. If the clock was set back, earlier commits are forgotten.
        """
        offsets, times = self._commits.setdefault(partition, ([], []))
        if offsets and (offset < offsets[-1] or at < times[-1]):
            offsets.clear()
            times.clear()
        if not offsets or offset > offsets[-1]:
            offsets.append(offset)
            times.append(at)

    def find(self, partition: PartitionT, offsets: list[int]) -> list[int | None]:
        """Return when messages of a partition were committed; None: not committed, or no longer known.

        Args:
            partition: The partition.
            offsets: At least one offset. Fast if they are sorted and belong to few commits.
        """
        ends, times = self._commits.get(partition, ([], []))
        ordered = sorted(offsets)
        first, last = bisect_right(ends, ordered[0]), bisect_right(ends, ordered[-1])
        at = [*times[first : last + 1], None]
        if first == last:
            return at[:1] * len(offsets)
        if offsets != ordered:
            return [at[bisect_right(ends, offset) - first] for offset in offsets]
        found: list[int | None] = []
        for end, time in zip(ends[first:last], at, strict=False):  # the last time belongs to the remaining offsets
            found += [time] * (bisect_left(offsets, end) - len(found))
        return found + [at[last - first]] * (len(offsets) - len(found))

    def forget_before(self, at: int) -> None:
        """Forget the commits before a time."""
        for partition, (offsets, times) in list(self._commits.items()):
            index = bisect_left(times, at)
            if index == len(times):
                del self._commits[partition]
            elif index:
                del offsets[:index], times[:index]
