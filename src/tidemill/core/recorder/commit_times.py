"""When the messages of each partition were committed, for as long as their rows are not sent.

Invariant: what is kept grows with the number of commits since `forget_before`, not with that of messages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

PartitionT = TypeVar("PartitionT", bound=Hashable)


class CommitTimes(Generic[PartitionT]):
    """The latest commits of an engine.

    Example:
        >>> commits = CommitTimes()
        >>> commits.note("t/0", 5, 1_000)
        >>> commits.note("t/0", 8, 2_000)
        >>> commits.find(["t/0"] * 4, [4, 5, 7, 8])
        [1000, 2000, 2000, None]
    """

    def __init__(self) -> None:
        """Start without any."""
        # The next offsets and times of the commits, both rising.
        self._commits: dict[PartitionT, tuple[list[int], list[int]]] = {}

    def note(self, partition: PartitionT, offset: int, at: int) -> None:
        """Note a commit.

        Args:
            partition: The partition.
            offset: Its next offset from now on; one that goes back belongs to another ownership.
            at: When it was confirmed; if the clock was set back, what was noted before is forgotten.
        """
        offsets, times = self._commits.setdefault(partition, ([], []))
        if offsets and (offset < offsets[-1] or at < times[-1]):
            offsets.clear()
            times.clear()
        if not offsets or offset > offsets[-1]:
            offsets.append(offset)
            times.append(at)

    def find(self, partitions: Sequence[PartitionT], offsets: Sequence[int]) -> list[int | None]:
        """Return when each message was committed; None: it is not, or nobody knows any more."""
        found: list[int | None] = []
        append, commits = found.append, self._commits
        partition: PartitionT | None = None
        first, end = 0, 0
        at: int | None = None
        for place, offset in zip(partitions, offsets, strict=True):
            # Neighbours mostly went with one commit.
            if not (first <= offset < end and place == partition):
                partition, first, end, at = place, offset, offset + 1, None
                known = commits.get(place)
                if known is not None:
                    index = bisect_right(known[0], offset)
                    if index < len(known[0]):
                        first = known[0][index - 1] if index else offset
                        end, at = known[0][index], known[1][index]
            append(at)
        return found

    def forget_before(self, at: int) -> None:
        """Forget the commits before a time."""
        for partition, (offsets, times) in list(self._commits.items()):
            index = bisect_left(times, at)
            if index == len(times):
                del self._commits[partition]
            elif index:
                del offsets[:index], times[:index]
