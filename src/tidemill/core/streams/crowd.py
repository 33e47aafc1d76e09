"""Finds the events that all members of a group have moved past, with one reader that stays behind all of them.

Invariant: an event's count is lowered once for the whole crowd, when the last member that was present for the event has
moved past it.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

from tidemill.core.ledger import Ledger
from tidemill.core.streams.fanout import Fanout, LogReader
from tidemill.core.streams.lazy_min import LazyMin
from tidemill.core.streams.members import Member, SentEvent

LaneT = TypeVar("LaneT", bound=Hashable)
EventT = TypeVar("EventT")
PayloadT = TypeVar("PayloadT")


class Crowd(Generic[LaneT, PayloadT, EventT]):
    """All members of a group, counted as one.

    Args:
        fanout: The log that the members read.
        ledger: The ledger of their events.
    """

    __slots__ = ("_closed", "_fanout", "_laggards", "_ledger", "_reader")

    def __init__(
        self,
        fanout: Fanout[SentEvent[LaneT, PayloadT, EventT], Member[LaneT, PayloadT, EventT]],
        ledger: Ledger[LaneT, PayloadT],
    ) -> None:
        self._fanout = fanout
        self._ledger = ledger
        self._laggards: LazyMin[Member[LaneT, PayloadT, EventT], int] = LazyMin(_find_position)
        self._reader: LogReader[SentEvent[LaneT, PayloadT, EventT]] = LogReader("the crowd")
        self._closed = False
        fanout.follow(self._reader)

    def add(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Add a member, which must be present."""
        self._laggards.add(member)

    def note_out(self) -> None:
        """Record that a member is no longer present."""
        self._laggards.note_out()

    def move(self, end: int) -> None:
        """Resolve the events that all members have moved past.

        Args:
            end: The position of the next event.
        """
        if self._closed:
            return
        last = self._laggards.find_top()
        until = end if last is None else last.moved
        reader = self._reader
        noted = None
        while (left := until - reader.position) > 0:
            for sent in islice(reader.unread, left):
                sent.pending = pending = sent.pending - 1
                # Only the first event of a lane in this range can be the lane's head.
                if not pending and sent.queue is not noted:
                    noted = sent.queue
                    self._ledger.note_resolved(sent)
            if reader.position < until and not self._fanout.load_more(reader):
                # The remaining events have no members.
                break

    def close(self) -> None:
        """Turn later calls of `move` into no-ops."""
        self._closed = True


def _find_position(member: Member[LaneT, PayloadT, EventT]) -> int | None:
    return member.moved if member.present else None
