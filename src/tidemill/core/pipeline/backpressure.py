"""Backpressure limits how many messages of each partition may be in flight.

The limits are totals per engine, divided among the assigned lanes. A lane is paused only because of its own share, so
that one lane never pauses another. A lane is paused when its share of messages or bytes is in flight, when its share of
results waits for sinks, or when too many of its messages are uncommitted. It stays paused until its messages in flight
fall to the low mark and nothing else is at its limit, so that it resumes with many messages at once.

Invariants: if the caller hands over no more than `find_room` allows, a lane never exceeds its high mark or
`max_uncommitted`; a lane with nothing in flight and nothing uncommitted has room. Messages that wait for others
(`note_waiting`) do not count against the high mark.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)


class _Load:
    """The messages and bytes that one lane has in flight."""

    __slots__ = ("count", "paused", "size_bytes", "uncommitted")

    def __init__(self) -> None:
        self.count = 0
        self.size_bytes = 0
        self.uncommitted = 0
        self.paused = False


class Backpressure(Generic[LaneT]):
    """The loads of all assigned lanes against their shares.

    Args:
        high: The number of messages with unfinished task work at which an engine with one lane is paused.
        low: The number of messages at which it resumes.
        window_size: A lower bound for a lane's high mark; otherwise a window could not fill.
        max_bytes: The maximum number of bytes in flight in the whole engine.
        max_uncommitted: The maximum number of messages per lane that are in flight or not yet committed.
        max_undelivered: The maximum number of results in the whole engine that wait for sinks; a lane's share is never
            smaller than a window.
    """

    __slots__ = (
        "_high",
        "_high_mark",
        "_loads",
        "_low",
        "_low_mark",
        "_max_bytes",
        "_max_lane_bytes",
        "_max_lane_undelivered",
        "_max_uncommitted",
        "_max_undelivered",
        "_window_size",
    )

    def __init__(
        self, high: int, low: int, window_size: int, max_bytes: int, max_uncommitted: int, max_undelivered: int
    ) -> None:
        self._high = high
        self._low = low
        self._window_size = window_size
        self._max_bytes = max_bytes
        self._max_uncommitted = max_uncommitted
        self._max_undelivered = max_undelivered
        self._loads: dict[LaneT, _Load] = {}
        self._share()

    def _share(self) -> None:
        lanes = len(self._loads) or 1
        self._high_mark = max(self._window_size, self._high // lanes)
        # The low mark keeps its ratio to the high mark. With many lanes, an equal share of it would be 0, and one slow
        # message would hold up its whole lane.
        self._low_mark = min(self._high_mark * self._low // self._high, self._high_mark - 1)
        self._max_lane_bytes = max(1, self._max_bytes // lanes)
        self._max_lane_undelivered = max(self._window_size, self._max_undelivered // lanes)

    @property
    def lanes(self) -> int:
        """The number of assigned lanes."""
        return len(self._loads)

    def count_bytes(self) -> int:
        """Return the number of bytes in flight; O(lanes)."""
        return sum(load.size_bytes for load in self._loads.values())

    def assign(self, lane: LaneT) -> None:
        """Add a lane, with nothing in flight."""
        self._loads[lane] = _Load()
        self._share()

    def revoke(self, lane: LaneT) -> None:
        """Remove a lane; later reports about it change nothing."""
        self._loads.pop(lane, None)
        self._share()

    def note_handed_over(self, lane: LaneT, count: int, size_bytes: int) -> None:
        load = self._loads.get(lane)
        if load is not None:
            load.count += count
            load.size_bytes += size_bytes
            load.uncommitted += count
            # Pause now: by the next call of `find_room` the load may have fallen below the limit.
            if self._count_left(load) <= 0:
                load.paused = True

    def note_finished(self, lane: LaneT, count: int, size_bytes: int) -> None:
        """Subtract messages whose task work has ended, and bytes that were freed."""
        load = self._loads.get(lane)
        if load is not None:
            load.count -= count
            load.size_bytes -= size_bytes

    def note_waiting(self, lane: LaneT, count: int) -> None:
        """Move messages out of the count while they wait for others; a negative count moves them back.

        While they wait, they count only against `max_uncommitted` and the bytes. When they stop waiting, they may take
        the lane above its high mark; the lane is then paused.
        """
        load = self._loads.get(lane)
        if load is not None:
            load.count -= count

    def note_committed(self, lane: LaneT, count: int) -> None:
        """Subtract messages that were committed."""
        load = self._loads.get(lane)
        if load is not None:
            load.uncommitted -= count

    def find_room(self, lane: LaneT, more_bytes: int = 0, undelivered: int = 0) -> int:
        """Return how many messages of a lane may be handed over now; 0 while it is paused.

        Args:
            lane: The lane.
            more_bytes: Bytes in flight in addition to the lane's messages.
            undelivered: The number of its results that wait for sinks.
        """
        load = self._loads.get(lane)
        if load is None:
            return 0
        left = min(self._count_left(load, more_bytes), self._max_lane_undelivered - undelivered)
        if left <= 0:
            load.paused = True
            return 0
        if load.paused and load.count > self._low_mark:
            return 0
        load.paused = False
        return left

    def _count_left(self, load: _Load, more_bytes: int = 0) -> int:
        if load.size_bytes + more_bytes >= self._max_lane_bytes:
            return 0
        return min(self._high_mark - load.count, self._max_uncommitted - load.uncommitted)
