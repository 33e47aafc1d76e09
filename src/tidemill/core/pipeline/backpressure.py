"""Backpressure: how many messages of each partition may be in hand.

The limits are totals of an engine; each assigned lane has its share of them, and only its own share decides
whether it is paused: one lane never pauses another. A lane is paused when its share of messages or of bytes
is in hand, when its share of results waits for sinks, or when too many of its messages are not committed. It
then stays paused until its messages in hand fell to the low mark and nothing else is at its limit, so that it
goes on with a good many at once.

Invariants: what is handed over within `room` never takes a lane above its high mark or `max_uncommitted`; a
lane with nothing in hand and nothing uncommitted has room. Messages that wait for others (`waits`) are not in the high
mark.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)


class _Load:
    """What one lane has in hand."""

    __slots__ = ("count", "paused", "size_bytes", "uncommitted")

    def __init__(self) -> None:
        self.count = 0
        self.size_bytes = 0
        self.uncommitted = 0
        self.paused = False


class Backpressure(Generic[LaneT]):
    """The loads of all assigned lanes against their shares.

    Args:
        high: Messages with unfinished task work at which an engine with one lane is paused.
        low: Messages at which it goes on.
        window_size: A lane's high mark is never below this, or a window could not fill.
        max_bytes: Bytes in hand of the whole engine.
        max_uncommitted: Messages in hand and not committed, per lane.
        max_undelivered: Results that wait for sinks, of the whole engine; a lane's share is never below a window.
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
        """Start without lanes."""
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
        # The low mark keeps its ratio to the high one: with many lanes, a plain share of it would be 0, and
        # one slow message would hold its whole lane.
        self._low_mark = min(self._high_mark * self._low // self._high, self._high_mark - 1)
        self._max_lane_bytes = max(1, self._max_bytes // lanes)
        self._max_lane_undelivered = max(self._window_size, self._max_undelivered // lanes)

    @property
    def lanes(self) -> int:
        """How many lanes are assigned."""
        return len(self._loads)

    def assign(self, lane: LaneT) -> None:
        """Take a lane on, with nothing in hand."""
        self._loads[lane] = _Load()
        self._share()

    def revoke(self, lane: LaneT) -> None:
        """Give a lane up; what is reported about it later changes nothing."""
        self._loads.pop(lane, None)
        self._share()

    def handed(self, lane: LaneT, count: int, size_bytes: int) -> None:
        """Count messages that were handed over."""
        load = self._loads.get(lane)
        if load is not None:
            load.count += count
            load.size_bytes += size_bytes
            load.uncommitted += count
            # Remember now that a limit was met: nobody may ask for room before it is left behind again.
            if self._left(load) <= 0:
                load.paused = True

    def finished(self, lane: LaneT, count: int, size_bytes: int) -> None:
        """Count messages whose task work is over, and bytes that were let go."""
        load = self._loads.get(lane)
        if load is not None:
            load.count -= count
            load.size_bytes -= size_bytes

    def waits(self, lane: LaneT, count: int) -> None:
        """Count messages that began to wait for others, or with a negative count ceased to.

        While they wait they count against `max_uncommitted` and the bytes only. Those that cease to may take a lane
        above its high mark; it is paused then.
        """
        load = self._loads.get(lane)
        if load is not None:
            load.count -= count

    def committed(self, lane: LaneT, count: int) -> None:
        """Count messages that a commit passed."""
        load = self._loads.get(lane)
        if load is not None:
            load.uncommitted -= count

    def room(self, lane: LaneT, more_bytes: int = 0, undelivered: int = 0) -> int:
        """Return how many messages of a lane may be handed over now; 0 while it is paused.

        Args:
            lane: The lane.
            more_bytes: What it has in hand besides messages.
            undelivered: Its results that wait for sinks.
        """
        load = self._loads.get(lane)
        if load is None:
            return 0
        left = min(self._left(load, more_bytes), self._max_lane_undelivered - undelivered)
        if left <= 0:
            load.paused = True
            return 0
        if load.paused and load.count > self._low_mark:
            return 0
        load.paused = False
        return left

    def _left(self, load: _Load, more_bytes: int = 0) -> int:
        if load.size_bytes + more_bytes >= self._max_lane_bytes:
            return 0
        return min(self._high_mark - load.count, self._max_uncommitted - load.uncommitted)
