"""A shared stream with acknowledgement: who still holds which event, what of it may be advanced, who is too late.

Events are fanned out to the members that are present (`publish`); each member reads them in order, at its own pace,
from one shared log (`core.fanout`). The event that a member read last is its *window*; requesting the next one moves it
past. What a member derives from its window is bound to it by a number (`Bindings`) until it is confirmed as stored. An
event waits for two things: for the crowd, all of whose places in the log must be behind it, and for each number bound
to it. `Sent.pending` counts these, whatever the number of members; so an event costs the same for one member and for a
thousand, and a delivery from which nothing was derived costs nothing here. What is resolved goes through the ledger,
which hands it out per lane as batches to advance.

Invariants:
1. The members of an event are those present when it was published; each counts once, as acked, failed or rejected.
2. An event is resolved when every member has moved past it, left, failed or rejected it, and nothing derived from it
   waits for its confirmation.
3. Who leaves fails what it never read; what it read is acked once confirmed, and failed at the ack timeout.
4. Who is forced to fail (too late, too far behind) resolves all it holds as failed, at once; it is in no later event.
5. Leaving, failing and timing out cost what they touch. Nothing scans what is outstanding.

The shell tells the time, takes batches (`take`, `settle`), and lets the failed members know.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from tidemill.core.bindings import Bindings
from tidemill.core.fanout import Fanout, Reader
from tidemill.core.ledger import Batch, Entry, Ledger
from tidemill.core.lowest import Lowest
from tidemill.core.stream_members import Cause, Forced, Home, LaneReport, Member, Refusal, Sent

LaneT = TypeVar("LaneT", bound=Hashable)
EventT = TypeVar("EventT")
PayloadT = TypeVar("PayloadT")

_new = object.__new__


class StreamGroup(Generic[LaneT, PayloadT, EventT]):
    """The machine.

    Args:
        max_backlog: How many events a member may leave unread.
        ack_timeout_seconds: How long a member may hold an event, from its fan-out.
        max_outstanding: How many events may wait to be advanced before `full_since` is set.
        bindings: Where its numbers come from; shared by all groups of a manager.
        home: Told when an event is resolved that nobody has to move past any more.

    Attributes:
        full_since: Since when nothing should be published, because too much is outstanding; None: publish.
        members: Who is present, by name.
    """

    __slots__ = (
        "_ack_timeout",
        "_bindings",
        "_blame",
        "_closed",
        "_crowd",
        "_fanout",
        "_holders",
        "_home",
        "_laggards",
        "_ledger",
        "_max_outstanding",
        "_next",
        "_oldest",
        "full_since",
        "members",
    )

    def __init__(
        self,
        *,
        max_backlog: int,
        ack_timeout_seconds: float,
        max_outstanding: int,
        bindings: Bindings,
        home: Home,
    ) -> None:
        """Start without members."""
        if max_outstanding < 1:
            raise ValueError(f"max_outstanding must be at least 1, not {max_outstanding}")
        self._ack_timeout = ack_timeout_seconds
        self._max_outstanding = max_outstanding
        self._bindings = bindings
        self._home = home
        self._fanout: Fanout[Sent[LaneT, PayloadT, EventT], Member[LaneT, PayloadT, EventT]] = Fanout(max_backlog)
        self._ledger: Ledger[LaneT, PayloadT] = Ledger()
        # Who is last in the log, and who has the oldest unconfirmed number: only these can be too late.
        self._laggards: Lowest[Member[LaneT, PayloadT, EventT]] = Lowest(_moved)
        self._holders: Lowest[Member[LaneT, PayloadT, EventT]] = Lowest(_carried)
        # Reads behind everybody, what everybody has moved past.
        self._crowd: Reader[Sent[LaneT, PayloadT, EventT]] = Reader("the crowd")
        self._fanout.follow(self._crowd)
        # The position of the next event, in the log and here.
        self._next = 0
        # Nothing that is held was fanned out before this.
        self._oldest = math.inf
        # Who failed on what, until it is asked for or settled.
        self._blame: dict[Entry[LaneT, PayloadT], list[Hashable]] = {}
        self._closed = False
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
        member = self.members[name] = Member(name, self._home, self._ledger, self._holders)
        self._fanout.join(member)
        self._laggards.add(member)
        return member

    def leave(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Let a member go; once gone, it changes nothing."""
        if member.present:
            self._remove(member)
            member.carry()
            member.window = None

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
        forced = self.expire(now) if now - self._oldest >= self._ack_timeout else ()
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
        if total >= self._max_outstanding and self.full_since is None:
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
            self._fail(member)
        return [*forced, *(Forced(member, Cause.OVERFLOW, position) for member in late)]

    def more(self, member: Member[LaneT, PayloadT, EventT]) -> bool:
        """Give a member that has taken all of `unread` what came after it; it is on no event then."""
        member.carry()
        member.window = None
        member.refused = None
        return self._fanout.more(member)

    def reject(self, member: Member[LaneT, PayloadT, EventT]) -> Refusal:
        """Resolve the event that a member is on as rejected, whatever it has derived from it."""
        sent = member.window
        if sent is None:
            before = member.refused is not None and member.refused.position == member.position - 1
            return Refusal.REJECTED_BEFORE if before else Refusal.NO_WINDOW
        sent.acked -= 1
        sent.rejected += 1
        self._give_up_newest(member)
        for seq in [seq for seq, bound in member.carried.items() if bound is sent]:
            self._give_up(member, seq)
        member.window = None
        member.refused = sent
        return Refusal.REJECTED

    # -- time

    def expire(self, now: float) -> Sequence[Forced[LaneT, PayloadT, EventT]]:
        """Fail who has held an event for as long as the ack timeout; return those of them that are present."""
        forced: list[Forced[LaneT, PayloadT, EventT]] = []
        while (found := self._longest()) is not None:
            member, sent = found
            if now - sent.at < self._ack_timeout:
                self._oldest = sent.at
                return forced
            if member.present:
                forced.append(Forced(member, Cause.TIMEOUT, sent.position))
            self._fail(member)
        self._oldest = math.inf
        return forced

    # -- advancing

    def take(self) -> Batch[LaneT, PayloadT] | None:
        """Take the resolved prefix of one lane that has one and nothing in flight, fairly; settle it later."""
        self._move_crowd()
        self._bindings.trim()
        return self._ledger.take()

    def who_failed(self, entry: Entry[LaneT, PayloadT]) -> tuple[Hashable, ...]:
        """Return who failed on an event that is not settled."""
        return tuple(self._blame.get(entry, ()))

    def settle(self, batch: Batch[LaneT, PayloadT]) -> None:
        """Forget the events of a batch that was advanced."""
        self._ledger.settle(batch)
        if self._blame:
            for entry in batch.entries:
                self._blame.pop(entry, None)
        if self._ledger.total < self._max_outstanding:
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

    def _who_holds(self, sent: Entry[LaneT, PayloadT]) -> tuple[Hashable, ...]:
        on_it = [member for member in self.members.values() if member.moved <= sent.position]
        unconfirmed = [m for m in self._holders.members if any(one is sent for one in m.carried.values())]
        return tuple(dict.fromkeys(member.name for member in (*on_it, *unconfirmed)))

    def _longest(self) -> tuple[Member[LaneT, PayloadT, EventT], Sent[LaneT, PayloadT, EventT]] | None:
        """Find the oldest event that somebody holds, and who."""
        found = None
        last = self._laggards.top()
        if last is not None and (sent := last.next_held()) is not None:
            found = last, sent
        holder = self._holders.top()
        if holder is not None:
            sent = next(iter(holder.carried.values()))
            if found is None or sent.position < found[1].position:
                found = holder, sent
        return found

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

    def _note_failed(self, sent: Sent[LaneT, PayloadT, EventT], name: Hashable) -> None:
        sent.acked -= 1
        sent.failed += 1
        self._blame.setdefault(sent, []).append(name)

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
        """Take a member out; what it never read fails."""
        for sent in member.rest():
            self._note_failed(sent, member.name)
        del self.members[member.name]
        self._fanout.leave(member)
        self._laggards.note_out()

    def _fail(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Resolve all that a member holds as failed, and take it out if it is in."""
        held = dict.fromkeys(member.carried.values())
        if member.window is not None:
            held[member.window] = None
        for sent in held:
            self._note_failed(sent, member.name)
        self._give_up_newest(member)
        for seq in list(member.carried):
            self._give_up(member, seq)
        member.window = None
        if member.present:
            self._remove(member)


def _moved(member: Member[LaneT, PayloadT, EventT]) -> int | None:
    return member.moved if member.present else None


def _carried(member: Member[LaneT, PayloadT, EventT]) -> int | None:
    for sent in member.carried.values():
        return sent.position
    return None
