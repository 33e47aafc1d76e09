"""A shared stream with acknowledgement: who still holds which event, what of it may be advanced, who is too late.

Events are fanned out to the members that are present (`publish`); each member reads them in order, at its own pace,
from one shared log (`core.fanout`). The event that a member read last is its *window*; requesting the next one moves it
past. What a member derives from its window is bound to it by a number (`PendingEvents`) until it is confirmed as
stored. An event waits for two things: for the crowd, all of whose places in the log must be behind it, and for each
number bound to it. `Sent.pending` counts these, whatever the number of members; so an event costs the same for one
member and for a thousand, and a delivery from which nothing was derived costs nothing here. What is resolved goes
through the ledger, which hands it out per lane as batches to advance.

A member that will come back keeps a seat (`core.stream_seats`): it stays present, and what is published waits for it.

Invariants:
1. The members of an event are those present when it was published; each counts once, as acked, failed or rejected,
   unless it was released: then it does not count.
2. An event is resolved when every member has moved past it, left, failed or rejected it, and nothing derived from it
   waits for its confirmation.
3. Who leaves fails what it never read; what it read is acked once confirmed, and failed at the ack timeout or when the
   confirmation is refused. The time for what waited in a seat counts from the return.
4. Who is forced to fail (too late, too far behind) resolves all it holds as failed, at once; it is in no later event,
   unless it keeps a seat: then it is in all later ones.
5. What was left unread is failed, and blamed on nobody; nor is what is held beside the event that is too late.
6. Leaving, failing and timing out cost what they touch. Nothing scans what is outstanding.

The shell tells the time, takes batches (`take`, `settle`), and lets the failed members know.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from itertools import islice
from typing import Final, Generic, TypeVar

from tidemill.core.ledger import Batch, Ledger, LedgerEntry
from tidemill.core.streams.fanout import Fanout, LogReader
from tidemill.core.streams.lazy_min import LazyMin
from tidemill.core.streams.members import (
    Blame,
    Cause,
    Forced,
    Home,
    LaneReport,
    Member,
    Refusal,
    Sent,
    StreamLimits,
)
from tidemill.core.streams.pending_events import PendingEvents
from tidemill.core.streams.seats import Seats

LaneT = TypeVar("LaneT", bound=Hashable)
EventT = TypeVar("EventT")
PayloadT = TypeVar("PayloadT")

#: The error of who rejected an event.
REJECTED: Final = "it rejected the event"

_new = object.__new__


class StreamGroup(Generic[LaneT, PayloadT, EventT]):
    """The machine.

    Args:
        limits: Its bounds.
        bindings: Where its numbers come from; shared by all groups of a manager.
        home: Told when an event is resolved that nobody has to move past any more.

    Attributes:
        full_since: Since when nothing should be published, because too much is outstanding; None: publish.
        members: Who is present, by name.
    """

    __slots__ = (
        "_bindings",
        "_blame",
        "_closed",
        "_crowd",
        "_fanout",
        "_holders",
        "_home",
        "_in_flight",
        "_laggards",
        "_ledger",
        "_limits",
        "_next",
        "_oldest",
        "_on_event",
        "_seats",
        "_stopped",
        "_timed",
        "bind",
        "full_since",
        "members",
    )

    def __init__(self, limits: StreamLimits, bindings: PendingEvents, home: Home) -> None:
        """Start without members."""
        if limits.max_outstanding < 1:
            raise ValueError(f"max_outstanding must be at least 1, not {limits.max_outstanding}")
        self._limits: Final = limits
        self._bindings = bindings
        #: Binds a number to the event that a member is on; see `PendingEvents`.
        self.bind = bindings.bind
        self._home = home
        self._fanout: Fanout[Sent[LaneT, PayloadT, EventT], Member[LaneT, PayloadT, EventT]] = Fanout(
            limits.max_backlog
        )
        self._ledger: Ledger[LaneT, PayloadT] = Ledger()
        self._in_flight = 0
        # Who is last in the log; of these, who can be too late; and who has the oldest unconfirmed number.
        self._laggards: LazyMin[Member[LaneT, PayloadT, EventT], int] = LazyMin(_moved)
        self._timed: LazyMin[Member[LaneT, PayloadT, EventT], int] = LazyMin(_timed)
        self._holders: LazyMin[Member[LaneT, PayloadT, EventT], float] = LazyMin(_carried)
        self._seats = Seats(limits.seat_full_seconds)
        # Reads behind everybody, what everybody has moved past.
        self._crowd: LogReader[Sent[LaneT, PayloadT, EventT]] = LogReader("the crowd")
        self._fanout.follow(self._crowd)
        # The position of the next event, in the log and here.
        self._next = 0
        # Nothing has been held since before this.
        self._oldest = math.inf
        # Who failed on what, and why (None: it never read it), until it is settled.
        self._blame: dict[LedgerEntry[LaneT, PayloadT], dict[Hashable, str | None]] = {}
        # Who was on an event when the reading ended.
        self._on_event: list[Member[LaneT, PayloadT, EventT]] = []
        self._stopped = self._closed = False
        self.full_since: float | None = None
        self.members: dict[Hashable, Member[LaneT, PayloadT, EventT]] = {}

    @property
    def outstanding(self) -> int:
        """How many events are not advanced."""
        return self._ledger.total

    # -- who is in it

    def join(self, name: Hashable) -> Member[LaneT, PayloadT, EventT]:
        """Add a member, for the events from now on.

        Raises:
            KeyError: One of this name is present.
        """
        if name in self.members:
            raise KeyError(name)
        member = self.members[name] = self._member(name)
        self._fanout.join(member)
        self._laggards.add(member)
        self._timed.add(member)
        return member

    def fail_held(self, member: Member[LaneT, PayloadT, EventT], error: str | None) -> None:
        """Fail the event that a member is on, at once; one that is on no event changes nothing.

        Args:
            member: One of the group, or one that has left.
            error: Why; None: it was interrupted through no fault of its own, and is not blamed.
        """
        if member.window is not None:
            self._fail_event(member, member.window, error)

    def refuse(self, member: Member[LaneT, PayloadT, EventT], seq: int, error: str | None) -> None:
        """Fail the event that a number of a member is bound to, at once: what was derived will never be stored."""
        sent = member.window if member.newest == seq else member.carried[seq]
        assert sent is not None
        self._fail_event(member, sent, error)
        self._home.note_resolved()

    def leave(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Let a member go, which has moved past the event it is on; once gone, it changes nothing."""
        if member.present:
            self._remove(member)
            member.carry()
            member.window = None

    def release(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Let a member go for good: it does not count in what it holds; what it moved past is acked once confirmed."""
        member.released = True
        self.fail_held(member, None)
        if member.present:
            self._remove(member)

    def sit(self, member: Member[LaneT, PayloadT, EventT], now: float) -> None:
        """Let a member go, which has moved past the event it is on, and keep its seat; repeated, change nothing."""
        if member.present:
            member.carry()
            member.window = None
            seat = self.members[member.name] = self._member(member.name)
            self._fanout.hand_over(member, seat)
            self._seats.drop(member)
            self._note_out()
            self._laggards.add(seat)
            self.keep_seat(seat, now + self._limits.seat_seconds)

    def add_seat(self, name: Hashable, until: float) -> None:
        """Add a seat for somebody who was here before, for the events from now on."""
        member = self.join(name)
        member.exempt = True
        self.keep_seat(member, until)

    def keep_seat(self, seat: Member[LaneT, PayloadT, EventT], until: float) -> None:
        """Keep a seat until then, instead of as long as it was to be kept."""
        self._seats.keep(seat, until)

    @property
    def has_seats(self) -> bool:
        """Whether anybody is away, or has come back and not caught up."""
        return bool(self._seats)

    def seats(self) -> dict[Hashable, float]:
        """Return who has a seat, and until when."""
        return {member.name: until for member, until in self._seats.until().items()}

    def seat(self, name: Hashable) -> Member[LaneT, PayloadT, EventT] | None:
        """Return the seat of this name, None if there is none."""
        member = self.members.get(name)
        return member if member is not None and member in self._seats else None

    def resume(self, seat: Member[LaneT, PayloadT, EventT], now: float) -> None:
        """Let somebody come back: the seat is a member from now on, and reads what waited for it."""
        seat.since = now
        self._oldest = min(self._oldest, now)
        if self._seats.take(seat, self._next, now):
            # It has caught up when it needs more than what waited.
            self._fanout.pause_readers()
        else:
            self._hold_to_limits(seat, now)

    def stop_reading(self) -> None:
        """Give nobody anything more to read; who is on an event can still move past it, or fail it."""
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
        return bool(self._on_event) or self._holders.top() is not None

    def close(self) -> None:
        """Give up what is not resolved: every number is forgotten, every member is gone. `take` the rest."""
        self._move_crowd()
        self._closed = True
        for member in self._holders.members | set(self.members.values()):
            self._give_up_newest(member)
            for seq in member.carried:
                self._bindings.give_up(seq)
            member.carried.clear()
            member.window = None
            if member.present:
                self._fanout.leave(member)
        self.members.clear()
        self._seats.clear()

    # -- events

    def publish(
        self, event: EventT, payload: PayloadT, lane: LaneT, now: float
    ) -> Sequence[Forced[LaneT, PayloadT, EventT]]:
        """Fan an event out to the members that are present, once those that are too late have failed.

        Returns:
            Who failed, because of its deadline or because it has read too little; the latter fail on this one too.

        Raises:
            TypeError: The lane is not hashable. The event is not in.
        """
        forced = self.expire(now) if now - self._oldest >= self._limits.ack_timeout_seconds else ()
        fanout, ledger, position = self._fanout, self._ledger, self._next
        members = fanout.size
        # For every event: `Sent(...)` written out, then `ledger.add`, then `fanout.publish`.
        sent: Sent[LaneT, PayloadT, EventT] = _new(Sent)
        sent.position = position
        sent.event = event
        sent.item = payload
        sent.acked = members
        sent.pending = 1 if members else 0
        sent.failed = sent.rejected = 0
        sent.at = now
        try:
            line = ledger.lines[lane]
        except KeyError:
            line = ledger.start_line(lane)
        sent.line = line
        line.entries.append(sent)
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
        late = fanout.look()
        for member in late:
            error = f"it left more than {self._limits.max_backlog} events unread"
            self._fail(member, {member.window} if member.window is not None else (), error, now)
        return [*forced, *(Forced(member, Cause.OVERFLOW, position) for member in late)]

    def more(self, member: Member[LaneT, PayloadT, EventT]) -> bool:
        """Give a member that has taken all of `unread` what came after it; it is on no event then."""
        member.carry()
        member.window = None
        if (since := self._seats.caught_up(member)) is not None:
            self._hold_to_limits(member, since)
        return self._fanout.more(member)

    def reject(self, member: Member[LaneT, PayloadT, EventT], sent: Sent[LaneT, PayloadT, EventT]) -> Refusal:
        """Resolve an event as rejected by a member that is on it, whatever it has derived from it.

        Args:
            member: Who.
            sent: What it rejects; if it is not on that any more, nothing changes.
        """
        if member.window is not sent:
            return Refusal.REJECTED_BEFORE if member.refused is sent else Refusal.STALE
        sent.acked -= 1
        sent.rejected += 1
        self._blame.setdefault(sent, {})[member.name] = REJECTED
        self._give_up_of(member, sent)
        member.refused = sent
        return Refusal.REJECTED

    # -- time

    def expire(self, now: float) -> Sequence[Forced[LaneT, PayloadT, EventT]]:
        """Fail who has held an event for as long as the ack timeout, and end seats.

        Returns:
            Those of them that are present, and the seats that have ended.
        """
        timeout = self._limits.ack_timeout_seconds
        error = f"it did not finish the event within {timeout:g} s"
        forced = self._end_seats(now) if self._seats else []
        for late in self._seats.too_late(now, timeout):
            forced.append(Forced(late, Cause.TIMEOUT, late.moved))
            self._fail(late, self._too_late(late, now), error, now)
        while (found := self._longest()) is not None:
            member, sent = found
            if now - member.held_since(sent) < timeout:
                self._oldest = member.held_since(sent)
                return forced
            if member.present:
                forced.append(Forced(member, Cause.TIMEOUT, sent.position))
            self._fail(member, self._too_late(member, now), error, now)
        self._oldest = math.inf
        return forced

    def _end_seats(self, now: float) -> list[Forced[LaneT, PayloadT, EventT]]:
        ended = [(seat, Cause.SEAT_TIMEOUT) for seat in self._seats.over(now)]
        if not ended:
            ended = [(seat, Cause.SEAT_FULL) for seat in self._seats.overfull(now, alone=self._waits_for_seats_alone())]
        forced = [Forced(seat, cause, seat.position) for seat, cause in ended]
        for seat, _ in ended:
            self._remove(seat)
        return forced

    def _waits_for_seats_alone(self) -> bool:
        """Whether the group is full, and nothing but seats keeps it so."""
        if self.full_since is None or self._in_flight or self._holders.top() is not None:
            return False
        if any(True for _ in self._seats.catching_up):
            return False
        active = self._timed.top()
        return active is None or active.moved >= self._next

    # -- advancing

    def take(self) -> Batch[LaneT, PayloadT] | None:
        """Take the resolved prefix of one lane that has one and nothing in flight, fairly; settle it later."""
        self._move_crowd()
        self._bindings.trim()
        batch = self._ledger.take()
        self._in_flight += batch is not None
        return batch

    def blame(self, entry: LedgerEntry[LaneT, PayloadT]) -> Blame:
        """Return who failed on an event that is not settled, or rejected it, and who never read it."""
        found = self._blame.get(entry, {})
        failures = {name: error for name, error in found.items() if error is not None}
        return Blame(failures, tuple(name for name, error in found.items() if error is None))

    def settle(self, batch: Batch[LaneT, PayloadT]) -> None:
        """Forget the events of a batch that was advanced."""
        self._ledger.settle(batch)
        self._in_flight -= 1
        if self._blame:
            for entry in batch.entries:
                self._blame.pop(entry, None)
        if self._ledger.total < self._limits.max_outstanding:
            self.full_since = None

    def report(self) -> list[LaneReport[LaneT]]:
        """Say of each lane what it waits for. This one looks at all members."""
        self._move_crowd()
        lines = []
        for lane in self._ledger.lanes():
            head = self._ledger.head(lane)
            assert isinstance(head, Sent)
            holders = self._who_holds(head) if head.pending else ()
            lines.append(LaneReport(lane, self._ledger.outstanding(lane), head.position, head.at, holders))
        return lines

    # -- inside

    def _who_holds(self, sent: LedgerEntry[LaneT, PayloadT]) -> tuple[Hashable, ...]:
        on_it = [member for member in self.members.values() if member.moved <= sent.position]
        unconfirmed = [m for m in self._holders.members if any(one is sent for one in m.carried.values())]
        return tuple(dict.fromkeys(member.name for member in (*on_it, *unconfirmed)))

    def _longest(self) -> tuple[Member[LaneT, PayloadT, EventT], Sent[LaneT, PayloadT, EventT]] | None:
        """Find the event that somebody has held for longest, and who."""
        found = None
        last = self._timed.top()
        if last is not None and (sent := last.next_held()) is not None:
            found = last, sent
        holder = self._holders.top()
        if holder is not None:
            sent = next(iter(holder.carried.values()))
            if found is None or holder.held_since(sent) < found[0].held_since(found[1]):
                found = holder, sent
        return found

    def _held(self, member: Member[LaneT, PayloadT, EventT]) -> list[Sent[LaneT, PayloadT, EventT]]:
        """Return the events that a member has read and that wait for it."""
        held = dict.fromkeys(member.carried.values())
        if member.window is not None:
            held[member.window] = None
        return list(held)

    def _too_late(
        self, member: Member[LaneT, PayloadT, EventT], now: float
    ) -> Collection[Sent[LaneT, PayloadT, EventT]]:
        timeout = self._limits.ack_timeout_seconds
        return {sent for sent in self._held(member) if now - member.held_since(sent) >= timeout}

    def _move_crowd(self) -> None:
        """Resolve what every member has moved past."""
        if self._closed:
            return
        last = self._laggards.top()
        until = self._next if last is None else last.moved
        crowd = self._crowd
        noted = None
        while (left := until - crowd.position) > 0:
            for sent in islice(crowd.unread, left):
                sent.pending = pending = sent.pending - 1
                # Only the first of a lane can be its head.
                if not pending and sent.line is not noted:
                    noted = sent.line
                    self._ledger.note_resolved(sent)
            if crowd.position < until and not self._fanout.more(crowd):
                # What is left are events that nobody was present for.
                break

    def _member(self, name: Hashable) -> Member[LaneT, PayloadT, EventT]:
        return Member(name, self, self._home, self._ledger, self._holders)

    def _hold_to_limits(self, member: Member[LaneT, PayloadT, EventT], since: float) -> None:
        """Let a member that was exempt be too far behind, or too late with what was published since."""
        self._fanout.bound(member)
        self._timed.add(member)
        self._oldest = min(self._oldest, since)

    def _note_failed(
        self, sent: Sent[LaneT, PayloadT, EventT], member: Member[LaneT, PayloadT, EventT], error: str | None
    ) -> None:
        sent.acked -= 1
        if not member.released:
            sent.failed += 1
            self._blame.setdefault(sent, {})[member.name] = error

    def _fail_event(
        self, member: Member[LaneT, PayloadT, EventT], sent: Sent[LaneT, PayloadT, EventT], error: str | None
    ) -> None:
        """Fail an event that a member is on, or has moved past and is bound to."""
        self._note_failed(sent, member, error)
        self._give_up_of(member, sent)

    def _give_up_of(self, member: Member[LaneT, PayloadT, EventT], sent: Sent[LaneT, PayloadT, EventT]) -> None:
        """Forget all numbers of a member that are bound to an event, and move it past that."""
        bound = member.bound_to(sent)
        if member.window is sent:
            self._give_up_newest(member)
            member.window = None
        for seq in bound:
            self._give_up(member, seq)

    def _give_up_newest(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        if member.newest:
            self._bindings.give_up(member.newest)
            member.newest = 0

    def _give_up(self, member: Member[LaneT, PayloadT, EventT], seq: int) -> None:
        self._bindings.give_up(seq)
        sent = member.carried.pop(seq)
        sent.pending -= 1
        if not sent.pending:
            self._ledger.note_resolved(sent)

    def _remove(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Take a member out; what it never read fails, or does not count if it is released."""
        for sent in member.rest():
            self._note_failed(sent, member, None)
        del self.members[member.name]
        self._seats.drop(member)
        self._fanout.leave(member)
        self._note_out()

    def _note_out(self) -> None:
        self._laggards.note_out()
        self._timed.note_out()

    def _fail(
        self,
        member: Member[LaneT, PayloadT, EventT],
        blamed: Collection[Sent[LaneT, PayloadT, EventT]],
        error: str,
        now: float,
    ) -> None:
        """Resolve all that a member holds as failed; if it is in, take it out, or let it keep a seat."""
        for sent in self._held(member):
            self._fail_event(member, sent, error if sent in blamed else None)
        if not member.present or self._stopped:
            # When the reading has ended, what it left unread is nobody's any more, and stays where it is.
            return
        if not self._limits.seat_seconds:
            self._remove(member)
            return
        for sent in member.rest():
            self._note_failed(sent, member, None)
        self._fanout.skip_to_end(member)
        self.sit(member, now)


def _moved(member: Member[LaneT, PayloadT, EventT]) -> int | None:
    return member.moved if member.present else None


def _timed(member: Member[LaneT, PayloadT, EventT]) -> int | None:
    return member.moved if member.present and not member.exempt else None


def _carried(member: Member[LaneT, PayloadT, EventT]) -> float | None:
    for sent in member.carried.values():
        return member.held_since(sent)
    return None
