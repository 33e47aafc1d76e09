"""Finds the member of a group that has held an event for the longest, without scanning all members.

A member holds an event until it has moved past it and everything bound to the event is confirmed as stored.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

from tidemill.core.ledger import Ledger, LedgerEntry
from tidemill.core.streams.lazy_min import LazyMin
from tidemill.core.streams.members import LaneReport, Member, SentEvent

LaneT = TypeVar("LaneT", bound=Hashable)
EventT = TypeVar("EventT")
PayloadT = TypeVar("PayloadT")


class HoldTimes(Generic[LaneT, PayloadT, EventT]):
    """The events that members of a group hold, and since when.

    Attributes:
        unconfirmed: The members with unconfirmed numbers, now or in the past.
    """

    __slots__ = ("_timed", "unconfirmed")

    def __init__(self) -> None:
        # Members to which the ack timeout applies, ordered by position, the last one in the log first.
        self._timed: LazyMin[Member[LaneT, PayloadT, EventT], int] = LazyMin(_find_position)
        self.unconfirmed: LazyMin[Member[LaneT, PayloadT, EventT], float] = LazyMin(_find_oldest)

    def add(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Apply the ack timeout to a member, unless it is exempt."""
        self._timed.add(member)

    def note_out(self) -> None:
        """Record that a member is no longer present."""
        self._timed.note_out()

    def find_longest(self) -> tuple[Member[LaneT, PayloadT, EventT], SentEvent[LaneT, PayloadT, EventT]] | None:
        """Return the event that was held for the longest, and its member; None if no member holds anything."""
        found = None
        last = self._timed.find_top()
        if last is not None and (sent := last.find_next_held()) is not None:
            found = last, sent
        holder = self.unconfirmed.find_top()
        if holder is not None:
            sent = next(iter(holder.carried.values()))
            if found is None or holder.find_held_since(sent) < found[0].find_held_since(found[1]):
                found = holder, sent
        return found

    def find_holders(
        self, sent: LedgerEntry[LaneT, PayloadT], members: Iterable[Member[LaneT, PayloadT, EventT]]
    ) -> tuple[Hashable, ...]:
        """Return the names of the members that hold an event, each once; O(members)."""
        on_it = [member for member in members if member.moved <= sent.position]
        unconfirmed = [m for m in self.unconfirmed.members if any(one is sent for one in m.carried.values())]
        return tuple(dict.fromkeys(member.name for member in (*on_it, *unconfirmed)))

    @property
    def any_unconfirmed(self) -> bool:
        """Whether any number waits to be confirmed as stored."""
        return self.unconfirmed.find_top() is not None

    def has_moved_past(self, end: int) -> bool:
        """Return whether every member with an ack timeout has moved past all events before a position."""
        last = self._timed.find_top()
        return last is None or last.moved >= end


def report_lanes(
    ledger: Ledger[LaneT, PayloadT],
    hold_times: HoldTimes[LaneT, PayloadT, EventT],
    members: Collection[Member[LaneT, PayloadT, EventT]],
    lanes: Iterable[LaneT] | None = None,
) -> list[LaneReport[LaneT]]:
    """Return what lanes of a group wait for and the members that hold them up. Without `lanes`: all; O(members) per
    lane.
    """
    reports = []
    for lane in ledger.lanes if lanes is None else lanes:
        head = ledger.find_head(lane)
        assert isinstance(head, SentEvent)
        holders = hold_times.find_holders(head, members) if head.pending else ()
        reports.append(LaneReport(lane, ledger.count_outstanding(lane), head.position, head.at, holders))
    return reports


def _find_position(member: Member[LaneT, PayloadT, EventT]) -> int | None:
    return member.moved if member.present and not member.exempt else None


def _find_oldest(member: Member[LaneT, PayloadT, EventT]) -> float | None:
    for sent in member.carried.values():
        return member.find_held_since(sent)
    return None
