"""The offsets of one lane: its commit floor, and the offsets above it that are done."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tidemill.core.intervals import Intervals
from tidemill.core.streams.redelivery_items import Commit, OffsetDelivery

LaneT = TypeVar("LaneT", bound=Hashable)
HeldT = TypeVar("HeldT")


@dataclass(slots=True)
class LaneOffsets(Generic[LaneT, HeldT]):
    """The offsets of one assigned lane.

    Attributes:
        past: Its last commit, if known.
        read: The next offset to read; -1 until the first offset is read.
        floor: The first offset that is not done.
        clean: The offsets above the floor that are done.
        open: The deliveries of offsets that are not done.
        failures: How many times each offset that is not done has failed.
    """

    past: Commit[LaneT] | None = None
    read: int = -1
    floor: int = -1
    clean: Intervals = field(default_factory=Intervals)
    open: dict[int, OffsetDelivery[LaneT, HeldT]] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    # Offsets with failures in a past commit that have not been read yet, in descending order.
    _recorded: list[int] = field(default_factory=list)

    def begin(self, offset: int) -> None:
        """Start at the first offset that is read."""
        self.read = self.floor = offset
        if self.past is None or offset < self.past.floor:
            return  # never committed, or the log was re-created: the past commit describes other messages
        for start, end in self.past.clean:
            self.mark_done(start, end)
        self.failures = {at: n for at, n in self.past.failures if at >= self.floor and at not in self.clean}
        self._recorded = sorted(self.failures, reverse=True)

    def reach(self, offset: int) -> None:
        """Process the reading of an offset; offsets skipped before it do not exist."""
        while self._recorded and self._recorded[-1] <= offset:
            at = self._recorded.pop()
            if at < offset:
                del self.failures[at]
        if offset > self.read:
            self.mark_done(self.read, offset)
        self.read = offset + 1

    def mark_done(self, start: int, end: int) -> None:
        """Mark the offsets of [start, end) as done."""
        if start > self.floor:
            self.clean.add(start, end)
        else:
            self.floor = self.clean.absorb(max(self.floor, end))
