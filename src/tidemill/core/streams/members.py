"""The members of a shared stream with acknowledgement, and their state: the values of `group`.

An event counts what it waits for and how its members resolved it. A member knows the event it is on and its unconfirmed
numbers. There is no object per event and member. Only `StreamGroup` changes these values, except for `Member.window`,
which the shell sets to each event that it hands out.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tidemill.core.ledger import Ledger, LedgerEntry
from tidemill.core.streams.fanout import LogReader
from tidemill.core.streams.lazy_min import LazyMin

LaneT = TypeVar("LaneT", bound=Hashable)
EventT = TypeVar("EventT")
PayloadT = TypeVar("PayloadT")


class SeatEndCause(enum.Enum):
    """Why a member was forced to fail, or why its seat ended."""

    OVERFLOW = "overflow"
    TIMEOUT = "timeout"
    SEAT_TIMEOUT = "away for too long"
    SEAT_FULL = "its seat alone kept the stream full"


class RejectOutcome(enum.Enum):
    """The result of a reject."""

    REJECTED = "rejected"
    REJECTED_BEFORE = "rejected before"
    STALE = "no longer on that event"


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The limits of a group.

    Attributes:
        max_backlog: The number of events that a member may leave unread.
        ack_timeout_seconds: How long a member may hold an event, counted from its fan-out.
        max_outstanding: The number of events waiting to be advanced at which `full_since` is set.
        seat_seconds: How long a seat is kept for a member that is away; 0: there are no seats.
        seat_full_seconds: How long seats alone may keep the group full.
    """

    max_backlog: int
    ack_timeout_seconds: float
    max_outstanding: int
    seat_seconds: float = 0.0
    seat_full_seconds: float = 5.0


class MemberBlame(NamedTuple):
    """The members that failed an event, or left it unread.

    Attributes:
        failures: The members that failed or rejected it, with the error.
        unread: The members that never read it, or were interrupted on it.
    """

    failures: dict[Hashable, str]
    unread: tuple[Hashable, ...]


class SentEvent(LedgerEntry[LaneT, PayloadT], Generic[LaneT, PayloadT, EventT]):
    """An event that was fanned out. `item` is the payload that its producer gets back.

    Attributes:
        at: When it was fanned out, in seconds of the caller's clock.
        event: The event that the members read.
        pending: The number of members it waits for; the crowd counts as one.
        acked: The number of members that neither failed nor rejected it; once it is resolved, they have acked it.
        failed: The number of members that failed it.
        rejected: The number of members that rejected it.
    """

    __slots__ = ("at", "event")

    # `StreamGroup.publish` creates it without calling `__init__`, which would be slow for every event.
    event: EventT
    at: float


class Home(Protocol):
    """The shell that a group belongs to."""

    def note_resolved(self) -> None:
        """Called when `take` may return a batch."""


class Refuses(Protocol):
    """The part of a member's group that `PendingEvents` needs."""

    def refuse(self, member: Any, seq: int, error: str | None) -> None:
        """Fail the event that a number is bound to."""


class Member(LogReader[SentEvent[LaneT, PayloadT, EventT]], Generic[LaneT, PayloadT, EventT]):
    """A subscriber in a group that acknowledges.

    Attributes:
        group: Its group.
        home: The shell of its group.
        ledger: The ledger of its group.
        holders: The members of its group with unconfirmed numbers, now or in the past.
        window: The event that it is on. The shell sets it to what it took from `unread`, after `carry` if `newest`.
        refused: The event it rejected last.
        newest: The newest unconfirmed number that is bound to the window; 0: none.
        carried: Its other unconfirmed numbers, oldest first, and the events that wait for them.
        released: Whether it has left permanently, and can no longer fail anything.
        since: When it came back to its seat; events that waited there count as fanned out at that time.
    """

    __slots__ = ("carried", "group", "holders", "home", "ledger", "newest", "refused", "released", "since", "window")

    def __init__(
        self,
        name: Hashable,
        group: Refuses,
        home: Home,
        ledger: Ledger[LaneT, PayloadT],
        holders: LazyMin[Member[LaneT, PayloadT, EventT], float],
    ) -> None:
        super().__init__(name)
        self.group = group
        self.home = home
        self.ledger = ledger
        self.holders = holders
        self.window: SentEvent[LaneT, PayloadT, EventT] | None = None
        self.refused: SentEvent[LaneT, PayloadT, EventT] | None = None
        self.newest = 0
        self.carried: dict[int, SentEvent[LaneT, PayloadT, EventT]] = {}
        self.released = False
        self.since = -math.inf

    @property
    def moved(self) -> int:
        """The position of the first event that it has not moved past."""
        return self.position if self.window is None else self.window.position

    def find_next_held(self) -> SentEvent[LaneT, PayloadT, EventT] | None:
        """Return the first event that it has not moved past, or None."""
        return self.window or next(self.yield_unread(), None)

    def find_held_since(self, sent: SentEvent[LaneT, PayloadT, EventT]) -> float:
        """Return the time since which the member has held an event."""
        return max(sent.at, self.since)

    def list_held(self) -> list[SentEvent[LaneT, PayloadT, EventT]]:
        """Return the events that the member has read and still holds."""
        held = dict.fromkeys(self.carried.values())
        if self.window is not None:
            held[self.window] = None
        return list(held)

    def find_late(self, now: float, timeout_seconds: float) -> Collection[SentEvent[LaneT, PayloadT, EventT]]:
        """Return the events that the member has read and held for at least the timeout."""
        return {sent for sent in self.list_held() if now - self.find_held_since(sent) >= timeout_seconds}

    def find_bound(self, sent: SentEvent[LaneT, PayloadT, EventT]) -> list[int]:
        """Return the numbers in `carried` bound to an event, which must be the window or have numbers."""
        on_it = sent is self.window
        found: list[int] = []
        # They are adjacent: the events of the window are at the end; other events that are given up are mostly at the
        # start.
        for seq, bound in reversed(self.carried.items()) if on_it else self.carried.items():
            if bound is sent:
                found.append(seq)
            elif found or on_it:
                break
        return found

    def carry(self) -> None:
        """Make the window wait for `newest`. Until the member leaves it, the crowd waits and no record is needed."""
        if self.newest and self.window is not None:
            self.carried[self.newest] = self.window
            self.window.pending += 1
            self.newest = 0
            self.holders.add(self)


class Forced(NamedTuple, Generic[LaneT, PayloadT, EventT]):
    """A member that was forced to fail, or whose seat has ended."""

    member: Member[LaneT, PayloadT, EventT]
    cause: SeatEndCause
    position: int
    """The event that timed out or exceeded the backlog."""


@dataclass(frozen=True, slots=True)
class LaneReport(Generic[LaneT]):
    """The state of a lane with events that are not acknowledged upstream.

    Attributes:
        lane: The lane.
        outstanding: The number of its events that are not acknowledged upstream.
        head: The position of the first of them.
        since: When the first of them was fanned out.
        holders: The members that hold it; empty if it is resolved and waits to be advanced, or is being advanced.
    """

    lane: LaneT
    outstanding: int
    head: int
    since: float
    holders: tuple[Hashable, ...]
