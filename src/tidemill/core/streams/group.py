"""A shared stream with acknowledgement: it tracks the events that members hold, advances lanes and times members out.

Events are fanned out to the members that are present (`publish`). All members read one shared log (`fanout`), in order,
each at its own pace. The event that a member read last is its *window*; requesting the next event moves the member past
it. Trigger events that a member derives from its window are bound to it by numbers (`PendingEvents`) until they are
confirmed as stored. `SentEvent.pending` counts what an event waits for: the crowd as one, and each number bound to it.
Therefore an event costs the same for one member and for a thousand. Resolved events go through the ledger, which
returns them per lane as batches to advance. A member that will come back keeps a seat (`seats`), for which new events
wait.

Invariants:
1. The members of an event are those present when it was published; each counts once, as acked, failed or rejected. A
   member that was released does not count.
2. An event is resolved when every member has moved past it, left, failed or rejected it, and nothing derived from it
   waits for its confirmation.
3. A member that leaves fails the events it never read. Events that it read are acked once confirmed, and failed at the
   ack timeout or when the confirmation is refused. For events that waited at a seat, the timeout starts at the return.
4. A member that is forced to fail (too late, too far behind) fails everything it holds, at once. It gets no later
   event, unless it keeps a seat: then it gets all of them.
5. An event that was left unread fails without blame; so do the events that a member holds besides the one that is too
   late.
6. Leaving, failing and timing out cost as much as they change. Nothing scans the outstanding events.

Parts: `Crowd` finds the events that all members have moved past, `HoldTimes` finds the member that has held an event
for longest, and `GroupFailures` resolves events that are not accepted. The shell provides the time, takes batches
(`take`, `settle`), and informs failed members.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Final, Generic, TypeVar

from tidemill.core.ledger import Ledger, LedgerBatch, LedgerEntry
from tidemill.core.streams.crowd import Crowd
from tidemill.core.streams.failures import GroupFailures
from tidemill.core.streams.fanout import Fanout
from tidemill.core.streams.hold_times import HoldTimes, report_lanes
from tidemill.core.streams.members import (
    Forced,
    Home,
    LaneReport,
    Member,
    MemberBlame,
    RejectOutcome,
    SeatEndCause,
    SentEvent,
    StreamLimits,
)
from tidemill.core.streams.pending_events import PendingEvents
from tidemill.core.streams.seats import Seats

LaneT = TypeVar("LaneT", bound=Hashable)
EventT = TypeVar("EventT")
PayloadT = TypeVar("PayloadT")

_new = object.__new__


class StreamGroup(Generic[LaneT, PayloadT, EventT]):
    """The members of a shared stream, and the events that they have not resolved.

    Args:
        limits: The limits of the group.
        pending_events: The source of its numbers; shared by all groups of a manager.
        home: Notified when an event is resolved that no member has to move past any more.

    Attributes:
        failures: The failures and rejects of members. Callers must not change it, nor `ledger`.
        full_since: The time since which too many events have been outstanding to publish more; None: publish.
        members: The members that are present, by name.
    """

    __slots__ = (
        "_crowd",
        "_fanout",
        "_hold_times",
        "_home",
        "_in_flight",
        "_limits",
        "_next",
        "_oldest",
        "_on_event",
        "_pending_events",
        "_seats",
        "_stopped",
        "bind",
        "failures",
        "full_since",
        "ledger",
        "members",
    )

    def __init__(self, limits: StreamLimits, pending_events: PendingEvents, home: Home) -> None:
        if limits.max_outstanding < 1:
            raise ValueError(f"max_outstanding must be at least 1, not {limits.max_outstanding}")
        self._limits: Final = limits
        self._pending_events = pending_events
        #: Binds a number to the event that a member is on; see `PendingEvents`.
        self.bind = pending_events.bind
        self._home = home
        self._fanout: Fanout[SentEvent[LaneT, PayloadT, EventT], Member[LaneT, PayloadT, EventT]] = Fanout(
            limits.max_backlog
        )
        self.ledger: Ledger[LaneT, PayloadT] = Ledger()
        self._in_flight = 0
        self.failures: GroupFailures[LaneT, PayloadT, EventT] = GroupFailures(self.ledger, pending_events)
        self._hold_times: HoldTimes[LaneT, PayloadT, EventT] = HoldTimes()
        self._crowd: Crowd[LaneT, PayloadT, EventT] = Crowd(self._fanout, self.ledger)
        self._seats = Seats(limits.seat_full_seconds)
        self._next = 0  # the position of the next event, both in the log and in this group
        # No event has been held since before this time.
        self._oldest = math.inf
        # The members that were on an event when `stop_reading` was called.
        self._on_event: list[Member[LaneT, PayloadT, EventT]] = []
        self._stopped = False
        self.full_since: float | None = None
        self.members: dict[Hashable, Member[LaneT, PayloadT, EventT]] = {}

    @property
    def outstanding(self) -> int:
        """The number of events that are not acknowledged upstream."""
        return self.ledger.total

    # -- members ------------------------------------------------------------------------------------------------------

    def join(self, name: Hashable) -> Member[LaneT, PayloadT, EventT]:
        """Add a member that gets the events from now on.

        Raises:
            KeyError: A member of this name is present.
        """
        if name in self.members:
            raise KeyError(name)
        member = self.members[name] = Member(name, self, self._home, self.ledger, self._hold_times.unconfirmed)
        self._fanout.join(member)
        self._crowd.add(member)
        self._hold_times.add(member)
        return member

    def fail_held(self, member: Member[LaneT, PayloadT, EventT], error: str | None) -> None:
        """Fail the event that a member is on, at once; a member that is on no event changes nothing.

        Args:
            member: A member of the group, or one that has left.
            error: The error; None: the member was interrupted and is not to blame.
        """
        if member.window is not None:
            self.failures.fail(member, member.window, error)

    def refuse(self, member: Member[LaneT, PayloadT, EventT], seq: int, error: str | None) -> None:
        """Fail the event that a member's number is bound to, because its trigger event will never be stored."""
        sent = member.window if member.newest == seq else member.carried[seq]
        assert sent is not None
        self.failures.fail(member, sent, error)
        self._home.note_resolved()

    def leave(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Remove a member and move it past its current event; a member that has left changes nothing."""
        if member.present:
            self._remove(member)
            member.carry()
            member.window = None

    def move_past(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Move a member past its current event although it requests no other one."""
        member.carry()
        member.window = None

    def release(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Remove a member permanently: events that it holds no longer wait for it; confirmed ones that it moved past
        are acked.
        """
        member.released = True
        self.fail_held(member, None)
        if member.present:
            self._remove(member)

    def suspend(self, member: Member[LaneT, PayloadT, EventT], now: float) -> None:
        """Remove a member, move it past its current event and keep its seat; idempotent."""
        if member.present:
            member.carry()
            member.window = None
            name, unconfirmed = member.name, self._hold_times.unconfirmed
            seat = self.members[name] = Member(name, self, self._home, self.ledger, unconfirmed)
            self._fanout.hand_over(member, seat)
            self._seats.drop(member)
            self._crowd.note_out()
            self._hold_times.note_out()
            self._crowd.add(seat)
            self.keep_seat(seat, now + self._limits.seat_seconds)

    def add_seat(self, name: Hashable, until: float) -> None:
        """Add a seat for a member of an earlier group; it gets the events from now on."""
        member = self.join(name)
        member.exempt = True
        self.keep_seat(member, until)

    def keep_seat(self, seat: Member[LaneT, PayloadT, EventT], until: float) -> None:
        """Set the time until which a seat is kept."""
        self._seats.keep(seat, until)

    @property
    def has_seats(self) -> bool:
        """Whether any member is away, or has come back and not caught up."""
        return bool(self._seats)

    def list_seats(self) -> dict[Hashable, float]:
        """Return the names of the seats, and until when each is kept."""
        return {member.name: until for member, until in self._seats.list_all().items()}

    def find_seat(self, name: Hashable) -> Member[LaneT, PayloadT, EventT] | None:
        """Return the seat of this name, or None."""
        member = self.members.get(name)
        return member if member is not None and member in self._seats else None

    def resume(self, seat: Member[LaneT, PayloadT, EventT], now: float) -> None:
        """Turn a seat back into a member, which reads the events that waited for it."""
        seat.since = now
        self._oldest = min(self._oldest, now)
        if self._seats.take(seat, self._next, now):
            # It has caught up once it requests more than the events that waited for it.
            self._fanout.pause_readers()
        else:
            self._hold_to_limits(seat, now)

    def stop_reading(self) -> None:
        """Stop all reading; a member that is on an event can still move past it or fail it."""
        self._stopped = True
        for member in self.members.values():
            self._fanout.freeze(member)
        self._seats.clear()
        self._on_event = [member for member in self.members.values() if member.window is not None]

    @property
    def busy(self) -> bool:
        """Whether, after `stop_reading`, anything may still be resolved."""
        while self._on_event and self._on_event[-1].window is None:
            self._on_event.pop()
        return bool(self._on_event) or self._hold_times.any_unconfirmed

    def close(self) -> None:
        """Forget every number and remove every member. Events that are already resolved can still be taken."""
        self._crowd.move(self._next)
        self._crowd.close()
        for member in self._hold_times.unconfirmed.members | set(self.members.values()):
            self.failures.give_up_all(member)
            if member.present:
                self._fanout.leave(member)
        self.members.clear()
        self._seats.clear()

    # -- events -------------------------------------------------------------------------------------------------------

    def publish(
        self, event: EventT, payload: PayloadT, lane: LaneT, now: float
    ) -> Sequence[Forced[LaneT, PayloadT, EventT]]:
        """Fan an event out to the members that are present, after failing those that are too late.

        Returns:
            The members that failed because they are too late or too far behind; the latter fail this event, too.

        Raises:
            TypeError: The lane is not hashable; the event was not published.
        """
        forced = self.expire(now) if now - self._oldest >= self._limits.ack_timeout_seconds else ()
        fanout, ledger, position = self._fanout, self.ledger, self._next
        members = fanout.size
        # Called for every event, so `SentEvent(...)`, `ledger.add` and `fanout.publish` are inlined.
        sent: SentEvent[LaneT, PayloadT, EventT] = _new(SentEvent)
        sent.position = position
        sent.event = event
        sent.item = payload
        sent.acked = members
        sent.pending = 1 if members else 0
        sent.failed = sent.rejected = 0
        sent.at = now
        try:
            queue = ledger.queues[lane]
        except KeyError:
            queue = ledger.start_lane(lane)
        sent.queue = queue
        queue.entries.append(sent)
        ledger.total = total = ledger.total + 1
        self._next = position + 1
        if total >= self._limits.max_outstanding and self.full_since is None:
            self.full_since = now
        if not members:
            fanout.skip()
            ledger.note_resolved(sent)
            self._home.note_resolved()
            return forced
        if now < self._oldest:
            self._oldest = now
        fanout.items.append(sent)
        fanout.room = room = fanout.room - 1
        if room:
            return forced
        late = fanout.find_late()
        for member in late:
            error = f"it left more than {self._limits.max_backlog} events unread"
            self._fail(member, {member.window} if member.window is not None else (), error, now)
        return [*forced, *(Forced(member, SeatEndCause.OVERFLOW, position) for member in late)]

    def load_more(self, member: Member[LaneT, PayloadT, EventT]) -> bool:
        """Move a member past its event and refill its `unread`; return whether there were more events."""
        member.carry()
        member.window = None
        if (since := self._seats.take_caught_up(member)) is not None:
            self._hold_to_limits(member, since)
        return self._fanout.load_more(member)

    def reject(
        self, member: Member[LaneT, PayloadT, EventT], sent: SentEvent[LaneT, PayloadT, EventT]
    ) -> RejectOutcome:
        """Resolve an event as rejected by a member that is on it, whatever the member has derived from it.

        Args:
            member: The member that rejects the event.
            sent: The event; if the member is no longer on it, nothing changes.
        """
        return self.failures.reject(member, sent)

    # -- time ---------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> Sequence[Forced[LaneT, PayloadT, EventT]]:
        """Fail the members that have held an event for the ack timeout, and end seats.

        Returns:
            The failed members that are present, and the seats that have ended.
        """
        timeout = self._limits.ack_timeout_seconds
        error = f"it did not finish the event within {timeout:g} s"
        forced: list[Forced[LaneT, PayloadT, EventT]] = []
        if self._seats:
            for seat, cause in self._seats.find_ended(now, alone=self._waits_for_seats_alone()):
                forced.append(Forced(seat, cause, seat.position))
                self._remove(seat)
        for late in self._seats.find_late(now, timeout):
            forced.append(Forced(late, SeatEndCause.TIMEOUT, late.moved))
            self._fail(late, late.find_late(now, timeout), error, now)
        while (found := self._hold_times.find_longest()) is not None:
            member, sent = found
            if now - member.find_held_since(sent) < timeout:
                self._oldest = member.find_held_since(sent)
                return forced
            if member.present:
                forced.append(Forced(member, SeatEndCause.TIMEOUT, sent.position))
            self._fail(member, member.find_late(now, timeout), error, now)
        self._oldest = math.inf
        return forced

    def _waits_for_seats_alone(self) -> bool:
        """Return whether the group is full, and only because of seats."""
        if self.full_since is None or self._in_flight or self._hold_times.any_unconfirmed:
            return False
        return not self._seats.any_catching_up and self._hold_times.has_moved_past(self._next)

    # -- advancing ----------------------------------------------------------------------------------------------------

    def take(self) -> LedgerBatch[LaneT, PayloadT] | None:
        """Take the resolved prefix of the lane that has waited longest; call `settle` once it is advanced."""
        self._crowd.move(self._next)
        self._pending_events.trim()
        batch = self.ledger.take()
        self._in_flight += batch is not None
        return batch

    def blame(self, entry: LedgerEntry[LaneT, PayloadT]) -> MemberBlame:
        """Return the members that failed or rejected an unsettled event, and those that never read it."""
        return self.failures.blame(entry)

    def settle(self, batch: LedgerBatch[LaneT, PayloadT]) -> None:
        """Forget the events of a batch that was advanced."""
        self.ledger.settle(batch)
        self._in_flight -= 1
        self.failures.forget(batch.entries)
        if self.ledger.total < self._limits.max_outstanding:
            self.full_since = None

    def report(self, lanes: Iterable[LaneT] | None = None) -> list[LaneReport[LaneT]]:
        """Return what each lane waits for; with `lanes`, only those, without empty ones. O(members) per lane."""
        self._crowd.move(self._next)
        return report_lanes(self.ledger, self._hold_times, self.members.values(), lanes)

    def _hold_to_limits(self, member: Member[LaneT, PayloadT, EventT], since: float) -> None:
        """Apply the limits again to a member that was exempt, for events published since then."""
        self._fanout.end_exemption(member)
        self._hold_times.add(member)
        self._oldest = min(self._oldest, since)

    def _remove(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Remove a member. Its unread events fail, or are not counted if the member is released."""
        self.failures.note_unread(member)
        del self.members[member.name]
        self._seats.drop(member)
        self._fanout.leave(member)
        self._crowd.note_out()
        self._hold_times.note_out()

    def _fail(
        self,
        member: Member[LaneT, PayloadT, EventT],
        blamed: Collection[SentEvent[LaneT, PayloadT, EventT]],
        error: str,
        now: float,
    ) -> None:
        """Fail everything that a member holds; if it is present, remove it, or keep a seat for it."""
        for sent in member.list_held():
            self.failures.fail(member, sent, error if sent in blamed else None)
        if not member.present or self._stopped:
            # After `stop_reading`, unread events are not resolved for any member.
            return
        if not self._limits.seat_seconds:
            self._remove(member)
            return
        self.failures.note_unread(member)
        self._fanout.skip_to_end(member)
        self.suspend(member, now)
