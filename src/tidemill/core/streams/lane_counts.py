"""The progress of each lane of a stream, without the members that hold it up; O(outstanding events)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from tidemill.core.ledger import Ledger
from tidemill.core.streams.members import SentEvent

LaneT = TypeVar("LaneT", bound=Hashable)
ItemT = TypeVar("ItemT")


class LaneCount(NamedTuple, Generic[LaneT]):
    """A lane with events that are not acknowledged upstream.

    Attributes:
        lane: The lane.
        outstanding: The number of its events that are not acknowledged upstream.
        resolved: How many of those all members have finished.
        since: When the first of them was fanned out.
    """

    lane: LaneT
    outstanding: int
    resolved: int
    since: float


def count_lanes(ledger: Ledger[LaneT, ItemT]) -> list[LaneCount[LaneT]]:
    """Return the lanes in the ledger of a `StreamGroup`."""
    found = []
    for lane, queue in ledger.queues.items():
        head = queue.entries[0]
        assert isinstance(head, SentEvent)
        resolved = sum(not entry.pending for entry in queue.entries)
        found.append(LaneCount(lane, len(queue.entries), resolved, head.at))
    return found
