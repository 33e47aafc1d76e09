"""Shared streams with acknowledgement: comparison with a naive model, and each rule by itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.core.examples import examples

from tidemill.core.ledger import LedgerBatch
from tidemill.core.streams.group import StreamGroup
from tidemill.core.streams.lane_counts import LaneCount, count_lanes
from tidemill.core.streams.members import Member, MemberBlame, RejectOutcome, SeatEndCause, StreamLimits
from tidemill.core.streams.pending_events import PendingEvents

TIMEOUT = 10.0
NAMES = ("a", "b", "c", "d")
names = st.sampled_from(NAMES)
lanes = st.sampled_from(["x", "y"])
picks = st.integers(0, 1000)


class Shell:
    """The shell of the group: counts how often it was notified."""

    def __init__(self) -> None:
        self.told = 0

    def note_resolved(self) -> None:
        self.told += 1


class Group(StreamGroup):
    """A group with its `pending_events`, which is read as the shell reads it."""

    def __init__(
        self,
        max_backlog: int = 100,
        max_outstanding: int = 1000,
        pending_events: PendingEvents | None = None,
        seat_seconds: float = 0.0,
        seat_full_seconds: float = 5.0,
    ) -> None:
        self.shell = Shell()
        self.pending_events = pending_events or PendingEvents()
        super().__init__(
            StreamLimits(max_backlog, TIMEOUT, max_outstanding, seat_seconds, seat_full_seconds),
            self.pending_events,
            self.shell,
        )
        self.pending_events.open(id(self), self.members)

    def send(self, event, lane="x", now=0.0):
        return [(one.member.name, one.cause) for one in self.publish(event, f"payload of {event}", lane, now)]

    def pull(self, member: Member):
        """Request the next event; return it, or None if there is none yet."""
        for _ in range(2):
            for sent in member.unread:
                if member.newest:
                    member.carry()
                member.window = sent
                return sent.event
            if not self.load_more(member):
                return None
        raise AssertionError("load_more reported more, but there is nothing")

    def bound(self, member: Member) -> int | None:
        return self.pending_events.bind_pending_event(trigger_id=member.name, key=id(self))

    def confirm(self, *seqs: int) -> None:
        self.pending_events.confirm_persisted(iter(seqs))

    def advance(self) -> list[tuple]:
        """Take and settle what is ready; return the lane of each batch, and its items with their outcomes."""
        batches = []
        while (batch := self.take()) is not None:
            batches.append((batch.lane, outcomes(batch)))
            self.settle(batch)
        return batches

    def one_lane(self) -> list[tuple]:
        return [item for _, items in self.advance() for item in items]

    def expired(self, now: float) -> list[tuple]:
        return [(one.member.name, one.cause) for one in self.expire(now)]


def outcomes(batch: LedgerBatch) -> list[tuple]:
    return [(one.event, one.acked, one.failed, one.rejected) for one in batch.entries]


# -- the naive model ---------------------------------------------------------------------------------------------------


@dataclass
class NaiveEvent:
    number: int
    lane: str
    at: float
    pending: set[int]  # members, by the identity of their membership
    results: list[str] = field(default_factory=list)


@dataclass
class NaiveMember:
    name: str
    number: int
    unread: list[NaiveEvent] = field(default_factory=list)
    window: NaiveEvent | None = None
    refused: NaiveEvent | None = None
    unconfirmed: dict[int, NaiveEvent] = field(default_factory=dict)
    bound_last: int = 0
    released: bool = False
    seat_until: float | None = None
    back_at: float = float("-inf")
    catches_up_to: int | None = None

    @property
    def exempt(self) -> bool:
        return self.seat_until is not None or self.catches_up_to is not None

    def deadlines(self, event: NaiveEvent) -> list[float]:
        """Return the times from which its holds on events count."""
        found = []
        if event is self.window or event in self.unread:
            found += [] if self.seat_until is not None else [max(event.at, self.back_at)]
        return found + [max(event.at, self.back_at) for bound in self.carried() if bound is event]

    def carried(self) -> list[NaiveEvent]:
        """Return what it waits for besides the event that it is on."""
        return [
            bound for seq, bound in self.unconfirmed.items() if not (bound is self.window and seq == self.bound_last)
        ]


class Naive:
    """The expected behaviour, by scanning everything."""

    def __init__(self, max_backlog: int, max_outstanding: int, seat_seconds: float = 0.0, full: float = 5.0) -> None:
        self.max_backlog, self.max_outstanding = max_backlog, max_outstanding
        self.seat_seconds, self.full = seat_seconds, full
        self.alone_since: float | None = None
        self.blame: dict[tuple[int, str], str | None] = {}
        self.present: dict[str, NaiveMember] = {}
        self.all: list[NaiveMember] = []
        self.events: list[NaiveEvent] = []
        self.in_flight: dict[str, list[NaiveEvent]] = {}
        self.sent = 0

    def resolve(self, event: NaiveEvent, member: NaiveMember, result: str, error: str | None = None) -> None:
        if member.number in event.pending:
            event.pending.remove(member.number)
            if result == "failed" and member.released:
                return
            event.results.append(result)
            if result != "acked":
                self.blame[event.number, member.name] = "rejected" if result == "rejected" else error

    def settle_member(self, member: NaiveMember) -> None:
        """Ack the events that the member has moved past with everything confirmed."""
        for event in self.events:
            if event is member.window or event in member.unread or event in member.unconfirmed.values():
                continue
            self.resolve(event, member, "acked")

    def join(self, name: str) -> NaiveMember:
        member = self.present[name] = NaiveMember(name, len(self.all))
        self.all.append(member)
        return member

    def publish(self, lane: str, now: float) -> set[tuple]:
        forced = self.expire(now)
        event = NaiveEvent(self.sent, lane, now, {one.number for one in self.present.values()})
        self.sent += 1
        self.events.append(event)
        for member in list(self.present.values()):
            member.unread.append(event)
            if len(member.unread) > self.max_backlog and not member.exempt:
                self.fail(member, now, [member.window])
                forced.add((member.name, SeatEndCause.OVERFLOW))
        return forced

    def fail(self, member: NaiveMember, now: float, blamed: list[NaiveEvent | None]) -> None:
        for event in self.events:
            self.resolve(event, member, "failed", "too late" if event in blamed else None)
        member.unread, member.window, member.unconfirmed = [], None, {}
        if self.present.get(member.name) is member:
            del self.present[member.name]
            if self.seat_seconds:
                self.add_seat(member.name, now + self.seat_seconds)

    def fail_event(self, member: NaiveMember, event: NaiveEvent, error: str | None) -> None:
        self.resolve(event, member, "failed", error)
        if member.window is event:
            member.window = None
        member.unconfirmed = {seq: one for seq, one in member.unconfirmed.items() if one is not event}

    def fail_held(self, member: NaiveMember, error: str | None) -> None:
        if member.window is not None:
            self.fail_event(member, member.window, error)

    def refuse(self, seq: int) -> None:
        for member in self.all:
            if seq in member.unconfirmed:
                self.fail_event(member, member.unconfirmed[seq], "refused")

    def release(self, member: NaiveMember) -> None:
        member.released = True
        self.fail_held(member, None)
        for event in member.unread:
            self.resolve(event, member, "failed")
        member.unread = []
        if self.present.get(member.name) is member:
            del self.present[member.name]

    def add_seat(self, name: str, until: float) -> NaiveMember:
        if all(member.seat_until is None for member in self.present.values()):
            self.alone_since = None
        seat = self.join(name)
        seat.seat_until = until
        return seat

    def suspend(self, member: NaiveMember, now: float) -> None:
        seat = self.add_seat(member.name, now + self.seat_seconds)
        seat.unread, member.unread = member.unread, []
        for event in seat.unread:
            event.pending.remove(member.number)
            event.pending.add(seat.number)
        member.window = None
        self.settle_member(member)

    def resume(self, seat: NaiveMember, now: float) -> None:
        seat.seat_until, seat.back_at = None, now
        seat.catches_up_to = self.sent if seat.unread else None

    def end_seats(self, now: float) -> set[tuple]:
        present = self.present.values()
        ended = [(m, SeatEndCause.SEAT_TIMEOUT) for m in present if m.seat_until is not None and m.seat_until <= now]
        if not any(member.exempt for member in present):
            return set()
        if not ended:
            ended = [(member, SeatEndCause.SEAT_FULL) for member in self.overfull(now)]
        for member, _ in ended:
            self.leave(member)
        return {(member.name, cause) for member, cause in ended}

    def overfull(self, now: float) -> list[NaiveMember]:
        present, seats = self.present.values(), [m for m in self.present.values() if m.seat_until is not None]
        alone = (
            len(self.events) >= self.max_outstanding
            and not any(self.in_flight.values())
            and not any(member.carried() for member in self.all)
            and not any(member.catches_up_to is not None for member in present)
            and not any(m.seat_until is None and (m.window or m.unread) for m in present)
        )
        if not alone or not seats:
            self.alone_since = None
            return []
        self.alone_since = now if self.alone_since is None else self.alone_since
        if now - self.alone_since < self.full:
            return []
        self.alone_since = None
        first = min(member.unread[0].number if member.unread else self.sent for member in seats)
        return [member for member in seats if (member.unread[0].number if member.unread else self.sent) == first]

    def leave(self, member: NaiveMember) -> None:
        for event in member.unread:
            self.resolve(event, member, "failed")
        member.unread, member.window = [], None
        del self.present[member.name]
        self.settle_member(member)

    def move_past(self, member: NaiveMember) -> None:
        member.window = None
        self.settle_member(member)

    def pull(self, member: NaiveMember) -> int | None:
        up_to = member.catches_up_to
        if up_to is not None and not any(event.number < up_to for event in member.unread):
            member.catches_up_to = None
        member.window = member.unread.pop(0) if member.unread else None
        self.settle_member(member)
        return member.window and member.window.number

    def reject(self, member: NaiveMember) -> RejectOutcome:
        event = member.window
        if event is None:
            return RejectOutcome.REJECTED_BEFORE if member.refused is not None else RejectOutcome.STALE
        self.resolve(event, member, "rejected")
        member.window, member.refused = None, event
        member.unconfirmed = {seq: one for seq, one in member.unconfirmed.items() if one is not event}
        return RejectOutcome.REJECTED

    def confirm(self, seq: int) -> None:
        for member in self.all:
            if member.unconfirmed.pop(seq, None) is not None:
                self.settle_member(member)

    def expire(self, now: float) -> set[tuple]:
        forced = self.end_seats(now)
        for member in list(self.all):
            late = [event for event in self.events if any(now - at >= TIMEOUT for at in member.deadlines(event))]
            if late:
                if self.present.get(member.name) is member:
                    forced.add((member.name, SeatEndCause.TIMEOUT))
                self.fail(member, now, [event for event in late if event not in member.unread])
        return forced

    def ready(self) -> dict[str, list[NaiveEvent]]:
        found: dict[str, list[NaiveEvent]] = {}
        for lane in {event.lane for event in self.events} - self.in_flight.keys():
            line = [event for event in self.events if event.lane == lane]
            count = next((n for n, event in enumerate(line) if event.pending), len(line))
            if count:
                found[lane] = line[:count]
        return found


class GroupAgainstNaive(RuleBasedStateMachine):
    MAX_BACKLOG = 4
    MAX_OUTSTANDING = 9
    SEAT_SECONDS = 0.0
    FULL_SECONDS = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.group = Group(
            self.MAX_BACKLOG,
            self.MAX_OUTSTANDING,
            seat_seconds=self.SEAT_SECONDS,
            seat_full_seconds=self.FULL_SECONDS,
        )
        self.naive = Naive(self.MAX_BACKLOG, self.MAX_OUTSTANDING, self.SEAT_SECONDS, self.FULL_SECONDS)
        self.members: dict[str, Member] = {}
        self.seqs: list[int] = []
        self.batches: list[LedgerBatch] = []
        self.now = 0.0

    @rule(name=names)
    def join(self, name: str) -> None:
        if name in self.naive.present:
            with pytest.raises(KeyError):
                self.group.join(name)
        else:
            self.members[name] = self.group.join(name)
            self.naive.join(name)

    def there(self, name: str) -> bool:
        """Return whether a member of this name is present, and not only its seat."""
        member = self.naive.present.get(name)
        return member is not None and member.seat_until is None

    @rule(name=names)
    def leave(self, name: str) -> None:
        if (seat := self.group.find_seat(name)) is not None:
            self.members[name] = seat
        if name in self.members:
            self.group.leave(self.members[name])
        if name in self.naive.present:
            self.naive.leave(self.naive.present[name])

    @rule(lane=lanes, passed=st.sampled_from([0.0, 0.0, 1.0, 4.0]))
    def publish(self, lane: str, passed: float) -> None:
        self.now += passed
        # The naive group checks for late members at every publish, the other only if one may be late.
        while forced := set(self.group.expired(self.now)):
            assert forced == self.naive.expire(self.now)
        assert not self.naive.expire(self.now)
        expected = self.naive.publish(lane, self.now)
        forced = self.group.send(self.naive.sent - 1, lane, self.now)
        assert set(forced) == expected
        assert len(forced) == len(expected)

    @rule(name=names, times=st.integers(1, 3))
    def pull(self, name: str, times: int) -> None:
        if self.there(name):
            for _ in range(times):
                assert self.group.pull(self.members[name]) == self.naive.pull(self.naive.present[name])

    @rule(name=names)
    def reject(self, name: str) -> None:
        if self.there(name):
            member = self.members[name]
            sent = member.window or member.refused
            if sent is None:
                return
            assert self.group.reject(member, sent) is self.naive.reject(self.naive.present[name])

    @rule(name=names, error=st.sampled_from(["broken", None]))
    def fail_held(self, name: str, error: str | None) -> None:
        if self.there(name):
            self.group.fail_held(self.members[name], error)
            self.naive.fail_held(self.naive.present[name], error)

    @rule(pick=picks)
    def refuse(self, pick: int) -> None:
        seqs = [self.seqs[pick % len(self.seqs)]] if self.seqs else []
        self.group.pending_events.refuse_persisted([*seqs, 10**9, -1], "refused")
        for seq in seqs:
            self.naive.refuse(seq)

    @rule(name=names)
    def release(self, name: str) -> None:
        if name in self.naive.present:
            self.group.release(self.group.find_seat(name) or self.members[name])
            self.naive.release(self.naive.present[name])

    @rule(name=names)
    def bind(self, name: str) -> None:
        seq = self.group.pending_events.bind_pending_event(trigger_id=name, key=id(self.group))
        member = self.naive.present.get(name)
        assert (seq is None) == (member is None or member.window is None)
        if seq is not None:
            assert seq not in self.seqs
            self.seqs.append(seq)
            member.unconfirmed[seq] = member.window
            member.bound_last = seq

    @rule(chosen=st.lists(picks, max_size=3))
    def confirm(self, chosen: list[int]) -> None:
        seqs = [self.seqs[pick % len(self.seqs)] for pick in chosen if self.seqs]
        self.group.confirm(*seqs, 10**9, -1)
        for seq in seqs:
            self.naive.confirm(seq)

    @rule(passed=st.sampled_from([0.0, 3.0, 6.0]))
    def expire(self, passed: float) -> None:
        self.now += passed
        expected = self.naive.expire(self.now)
        forced = self.group.expired(self.now)
        assert set(forced) == expected
        assert len(forced) == len(expected)

    @rule()
    def take(self) -> None:
        ready = self.naive.ready()
        batch = self.group.take()
        if batch is None:
            assert not ready
            return
        expected = [
            (one.number, one.results.count("acked"), one.results.count("failed"), one.results.count("rejected"))
            for one in ready[batch.lane]
        ]
        assert outcomes(batch) == expected
        for entry in batch.entries:
            told = {name: error for (number, name), error in self.naive.blame.items() if number == entry.event}
            blame = self.group.blame(entry)
            assert blame.failures.keys() == {name for name, error in told.items() if error is not None}
            assert set(blame.unread) == {name for name, error in told.items() if error is None}
        self.naive.in_flight[batch.lane] = ready[batch.lane]
        self.batches.append(batch)

    @rule(pick=picks)
    def settle(self, pick: int) -> None:
        if self.batches:
            batch = self.batches.pop(pick % len(self.batches))
            self.group.settle(batch)
            done = self.naive.in_flight.pop(batch.lane)
            self.naive.events = [event for event in self.naive.events if event not in done]

    @invariant()
    def both_say_the_same(self) -> None:
        assert set(self.group.members) == set(self.naive.present)
        assert self.group.outstanding == len(self.naive.events)
        assert (self.group.full_since is not None) == (len(self.naive.events) >= self.MAX_OUTSTANDING)
        report = {one.lane: one for one in self.group.report()}
        assert report.keys() == {event.lane for event in self.naive.events}
        for lane, line in report.items():
            events = [event for event in self.naive.events if event.lane == lane]
            assert (line.outstanding, line.head, line.since) == (len(events), events[0].number, events[0].at)
            assert set(line.holders) == {self.naive.all[number].name for number in events[0].pending}


class SeatsAgainstNaive(GroupAgainstNaive):
    SEAT_SECONDS = 12.0
    FULL_SECONDS = 4.0

    @rule(name=names)
    def suspend(self, name: str) -> None:
        if self.there(name):
            self.group.suspend(self.members[name], self.now)
            self.naive.suspend(self.naive.present[name], self.now)
            # A stale copy changes nothing.
            self.group.suspend(self.members[name], self.now)
            assert self.group.pull(self.members[name]) is None

    @rule(name=names)
    def move_past(self, name: str) -> None:
        if self.there(name):
            self.group.move_past(self.members[name])
            self.naive.move_past(self.naive.present[name])

    @rule(name=names)
    def resume(self, name: str) -> None:
        seat = self.group.find_seat(name)
        assert (seat is not None) == (name in self.naive.present and not self.there(name))
        if seat is not None:
            self.group.resume(seat, self.now)
            self.members[name] = seat
            self.naive.resume(self.naive.present[name], self.now)

    @rule(name=names)
    def add_seat(self, name: str) -> None:
        if name not in self.naive.present:
            self.group.add_seat(name, self.now + 7.0)
            self.naive.add_seat(name, self.now + 7.0)

    @invariant()
    def seats_are_known(self) -> None:
        seats = {name: one.seat_until for name, one in self.naive.present.items() if one.seat_until is not None}
        assert self.group.list_seats() == seats


TestGroupAgainstNaive = GroupAgainstNaive.TestCase
TestGroupAgainstNaive.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
TestSeatsAgainstNaive = SeatsAgainstNaive.TestCase
TestSeatsAgainstNaive.settings = settings(max_examples=examples(100), stateful_step_count=60, deadline=None)


@given(st.data())
@settings(max_examples=examples(30))
def test_every_member_counts_once_in_every_event_of_a_long_stream(data: st.DataObject) -> None:
    group = Group(max_backlog=2000, max_outstanding=10_000)
    members = [group.join(name) for name in NAMES]
    pulled = [0] * len(members)
    advanced = []
    for number in range(data.draw(st.integers(600, 900))):
        group.send(number)
        who = number % len(members)
        if data.draw(st.integers(0, 9)) == 0:
            for _ in range(data.draw(st.integers(0, 300))):
                pulled[who] += group.pull(members[who]) is not None
        advanced += group.one_lane()
    for member in members:
        group.leave(member)
    advanced += group.one_lane()
    assert [one[0] for one in advanced] == list(range(number + 1))
    assert all(acked + failed == len(members) and not rejected for _, acked, failed, rejected in advanced)
    assert [sum(one[1] for one in advanced), sum(one[2] for one in advanced)] == [
        sum(pulled),
        (number + 1) * len(members) - sum(pulled),
    ]


# -- each rule -------------------------------------------------------------------------------------------------------


def test_an_event_is_acked_by_requesting_the_next_one_even_if_there_is_none() -> None:
    group = Group()
    member = group.join("a")
    group.send("e1")
    assert group.pull(member) == "e1"
    assert group.advance() == []
    assert group.pull(member) is None
    assert group.advance() == [("x", [("e1", 1, 0, 0)])]


def test_a_member_that_joins_after_the_fan_out_does_not_count_in_it() -> None:
    group = Group()
    first = group.join("a")
    group.send("e1")
    group.join("late")
    group.pull(first), group.pull(first)
    assert group.one_lane() == [("e1", 1, 0, 0)]


def test_an_event_without_members_is_advanced_in_order_and_acked_by_nobody() -> None:
    group = Group()
    member = group.join("a")
    group.send("e1")
    group.leave(member)
    told = group.shell.told
    group.send("e2")
    assert group.shell.told == told + 1
    assert group.one_lane() == [("e1", 0, 1, 0), ("e2", 0, 0, 0)]
    again = group.join("a")
    group.send("e3")
    assert group.pull(again) == "e3"
    group.leave(again)
    assert group.one_lane() == [("e3", 1, 0, 0)]


def test_confirmations_may_come_in_any_order_and_all_are_awaited() -> None:
    group = Group()
    member = group.join("a")
    group.send("e1"), group.send("e2")
    group.pull(member)
    first, second = group.bound(member), group.bound(member)
    group.pull(member)
    third = group.bound(member)
    group.pull(member)
    group.confirm(third, second, third)
    assert group.one_lane() == []
    group.confirm(first)
    assert group.shell.told == 1
    assert group.one_lane() == [("e1", 1, 0, 0), ("e2", 1, 0, 0)]


def test_a_confirmation_while_the_member_is_still_on_the_event_resolves_nothing_yet() -> None:
    group = Group()
    member = group.join("a")
    group.send("e1")
    group.pull(member)
    group.confirm(group.bound(member))
    assert group.one_lane() == []
    group.pull(member)
    assert group.one_lane() == [("e1", 1, 0, 0)]


def test_a_member_that_leaves_fails_what_it_never_read_and_acks_what_it_read_once_confirmed() -> None:
    group = Group()
    member, other = group.join("a"), group.join("b")
    group.send("e1"), group.send("e2")
    group.pull(member)
    seq = group.bound(member)
    group.leave(member)
    group.leave(member)  # changes nothing
    for _ in range(3):
        group.pull(other)
    assert group.one_lane() == []
    assert group.report()[0].holders == ("a",)
    group.confirm(seq)
    assert group.one_lane() == [("e1", 2, 0, 0), ("e2", 1, 1, 0)]


def test_events_unconfirmed_by_a_member_that_left_fail_at_the_ack_timeout_without_a_forced_member() -> None:
    group = Group()
    member = group.join("a")
    group.send("e1", now=0.0), group.send("e2", now=5.0)
    group.pull(member)
    group.bound(member)
    group.pull(member)
    late = group.bound(member)
    group.leave(member)
    assert group.expired(9.9) == []
    assert group.expired(10.0) == []
    group.confirm(late)
    assert group.one_lane() == [("e1", 0, 1, 0), ("e2", 0, 1, 0)]


def test_the_ack_timeout_fails_only_pending_members_and_everything_they_hold() -> None:
    group = Group()
    slow, unconfirmed, good = group.join("slow"), group.join("unconfirmed"), group.join("good")
    group.send("e1", now=0.0), group.send("e2", now=8.0)
    group.pull(slow)
    group.pull(unconfirmed)
    seq = group.bound(unconfirmed)
    group.pull(unconfirmed), group.pull(unconfirmed)
    for _ in range(3):
        group.pull(good)
    assert group.expired(9.999) == []
    assert sorted(group.expired(10.0)) == [("slow", SeatEndCause.TIMEOUT), ("unconfirmed", SeatEndCause.TIMEOUT)]
    group.confirm(seq)
    assert group.bound(slow) is None
    assert list(group.members) == ["good"]
    # The one that was not confirmed had moved past the second event.
    assert group.one_lane() == [("e1", 1, 2, 0), ("e2", 2, 1, 0)]
    assert group.send("e3", now=30.0) == []
    group.pull(good), group.pull(good)
    assert group.one_lane() == [("e3", 1, 0, 0)]


def test_events_that_waited_in_a_seat_have_the_whole_ack_timeout_to_be_stored() -> None:
    group = Group(seat_seconds=60.0)
    member, other = group.join("a"), group.join("b")
    group.suspend(member, 0.0)
    for n in range(3):
        group.send(n, now=0.0)
        group.pull(other)
    group.pull(other)
    seat = group.find_seat("a")
    assert seat is not None
    group.resume(seat, 20.0)
    seqs = []
    for _ in range(3):
        group.pull(seat)
        seqs.append(group.bind(seat))
    # It leaves while its trigger event waits to be stored.
    group.suspend(seat, 21.0)
    assert group.expired(29.9) == []
    group.confirm(*seqs[:2])
    assert group.one_lane() == [(0, 2, 0, 0), (1, 2, 0, 0)]
    assert group.expired(30.0) == []
    assert group.one_lane() == [(2, 1, 1, 0)]


def test_a_member_that_came_back_does_not_hide_one_that_holds_an_event_for_too_long() -> None:
    group = Group(seat_seconds=60.0)
    away, other = group.join("a"), group.join("b")
    group.suspend(away, 0.0)
    group.send(0, now=0.0), group.send(1, now=5.0)
    for _ in range(2):
        group.pull(other)
    group.bind(other)
    seat = group.find_seat("a")
    assert seat is not None
    group.resume(seat, 9.0)
    group.pull(seat)
    group.bind(seat)
    group.pull(seat)
    assert group.expired(15.0) == [("b", SeatEndCause.TIMEOUT)]


def test_only_events_that_are_too_late_or_kept_others_unread_are_blamed() -> None:
    group = Group(max_backlog=2)
    late, slow = group.join("late"), group.join("slow")
    group.send(0, now=0.0), group.send(1, now=9.0)
    for member in (late, slow):
        group.pull(member)
        group.bind(member)
        group.pull(member)
    group.confirm(2)
    group.expire(10.0)
    group.send(2, now=11.0), group.send(3, now=11.0)
    assert group.send(4, now=11.0) == [("slow", SeatEndCause.OVERFLOW)]
    batch = group.take()
    assert batch is not None
    assert [(set(group.blame(entry).failures), group.blame(entry).unread) for entry in batch.entries[:3]] == [
        ({"late"}, ()),
        ({"slow"}, ("late",)),
        (set(), ("slow",)),
    ]


def test_an_event_that_all_have_moved_past_but_none_confirms_fails_at_the_ack_timeout() -> None:
    group = Group()
    member = group.join("a")
    group.send("e1"), group.send("e2")
    group.pull(member)
    group.bound(member), group.bound(member)
    group.pull(member), group.pull(member)
    assert group.take() is None
    assert group.expired(TIMEOUT) == [("a", SeatEndCause.TIMEOUT)]
    assert group.one_lane() == [("e1", 0, 1, 0), ("e2", 1, 0, 0)]


def test_deadlines_are_checked_before_a_fan_out() -> None:
    group = Group()
    group.join("a")
    group.send("e1", now=0.0)
    assert group.send("e2", now=10.0) == [("a", SeatEndCause.TIMEOUT)]
    assert group.one_lane() == [("e1", 0, 1, 0), ("e2", 0, 0, 0)]


def test_a_clock_that_goes_back_makes_nothing_due_too_early() -> None:
    group = Group()
    member = group.join("a")
    group.send("e1", now=100.0), group.send("e2", now=50.0)
    group.pull(member), group.pull(member)
    assert group.expired(59.9) == []
    assert group.expired(60.0) == [("a", SeatEndCause.TIMEOUT)]


def test_an_overflow_fails_that_member_alone_in_all_it_holds_and_in_the_event_that_was_too_many() -> None:
    group = Group(max_backlog=2)
    slow, good = group.join("slow"), group.join("good")
    forced = []
    for number in range(4):
        forced += group.send(number)
        group.pull(good)
        if number == 0:
            group.pull(slow)
            seq = group.bound(slow)
    assert forced == [("slow", SeatEndCause.OVERFLOW)]
    group.pull(good)
    group.confirm(seq)
    assert group.one_lane() == [(number, 1, 1, 0) for number in range(4)]
    assert group.pull(slow) is None


def test_the_members_that_failed_an_event_are_known_until_it_is_settled() -> None:
    group = Group()
    for name in ("a", "b"):
        member = group.join(name)
        group.send(name)
        group.leave(member)
    batch = group.take()
    assert [group.blame(entry) for entry in batch.entries] == [MemberBlame({}, ("a",)), MemberBlame({}, ("b",))]
    group.settle(batch)
    assert [group.blame(entry) for entry in batch.entries] == [MemberBlame({}, ())] * 2


def test_a_reject_resolves_at_once_and_binds_nothing_and_is_a_reject_only_once() -> None:
    group = Group()
    member = group.join("a")
    group.send("e1"), group.send("e2")
    group.pull(member)
    first = member.window
    early = [group.bound(member), group.bound(member)]
    assert group.reject(member, first) is RejectOutcome.REJECTED
    assert group.bound(member) is None
    assert group.reject(member, first) is RejectOutcome.REJECTED_BEFORE
    assert group.one_lane() == [("e1", 0, 0, 1)]
    group.confirm(*early)
    group.pull(member)
    assert group.reject(member, first) is not RejectOutcome.REJECTED
    assert group.reject(member, member.window) is RejectOutcome.REJECTED
    group.pull(member)
    assert group.reject(member, first) is RejectOutcome.STALE
    assert group.one_lane() == [("e2", 0, 0, 1)]


def test_lanes_do_not_wait_for_each_other_and_events_after_a_pending_head_go_into_the_next_batch() -> None:
    group = Group()
    member = group.join("a")
    for number, lane in enumerate("xyxy"):
        group.send(number, lane)
    group.pull(member)
    seq = group.bind(member)
    for _ in range(4):
        group.pull(member)
    assert group.advance() == [("y", [(1, 1, 0, 0), (3, 1, 0, 0)])]
    assert [line.lane for line in group.report()] == ["x"]
    group.confirm(seq)
    assert group.advance() == [("x", [(0, 1, 0, 0), (2, 1, 0, 0)])]
    assert group.report() == []


def test_an_event_with_an_unhashable_lane_is_not_published() -> None:
    group = Group()
    group.join("a")
    with pytest.raises(TypeError):
        group.send("e1", lane=[])
    assert group.outstanding == 0


def test_outstanding_events_are_bounded_until_they_are_settled() -> None:
    group = Group(max_outstanding=2)
    member = group.join("a")
    group.send("e1", now=1.0)
    assert group.full_since is None
    group.send("e2", now=2.0), group.send("e3", now=3.0)
    assert group.full_since == 2.0
    group.pull(member), group.pull(member)
    batch = group.take()
    assert group.full_since == 2.0
    group.settle(batch)
    assert group.full_since == 2.0
    group.pull(member)
    assert group.one_lane() == [("e2", 1, 0, 0)]
    assert group.full_since is None


def test_closing_gives_up_what_is_not_resolved_and_leaves_the_rest_to_be_taken() -> None:
    group = Group()
    on_it, waiting, gone = group.join("on it"), group.join("waiting"), group.join("gone")
    group.send("e1"), group.send("e2")
    for member in (on_it, waiting, gone):
        group.pull(member), group.pull(member)
    seqs = [group.bound(on_it), group.bound(gone), group.bound(waiting)]
    group.pull(waiting)
    group.leave(gone)
    group.close()
    assert group.members == {}
    group.confirm(*seqs)
    assert group.one_lane() == [("e1", 3, 0, 0)]
    assert group.outstanding == 1
    assert group.pull(on_it) is None
    assert group.expired(1000.0) == []
    group.close()


def test_numbers_are_unique_over_all_groups_and_confirmed_together() -> None:
    pending_events = PendingEvents()
    groups = [Group(pending_events=pending_events) for _ in range(2)]
    members = [group.join("a") for group in groups]
    seqs = []
    for group, member in zip(groups, members, strict=True):
        group.send("e1")
        group.pull(member)
        seqs += [group.bound(member), group.bound(member)]
        group.pull(member)
    assert len(set(seqs)) == 4
    pending_events.confirm_persisted(iter(seqs))
    assert [group.one_lane() for group in groups] == [[("e1", 1, 0, 0)]] * 2


def test_numbers_that_are_done_take_no_memory() -> None:
    pending_events = PendingEvents()
    group = Group(pending_events=pending_events)
    member, other = group.join("a"), group.join("b")
    group.send("e1")
    group.pull(member), group.pull(other)
    stuck = group.bound(other)
    for _ in range(3000):
        group.confirm(group.bound(member))
    assert pending_events.trim() == 3001
    group.confirm(stuck)
    assert pending_events.trim() == 0
    newest = group.bound(member)
    group.confirm(stuck)
    group.confirm(newest)
    group.pull(member), group.pull(other)
    assert group.one_lane() == [("e1", 2, 0, 0)]


def test_a_lane_reports_which_members_hold_its_head_and_since_when() -> None:
    group = Group()
    slow, unconfirmed, good = group.join("slow"), group.join("unconfirmed"), group.join("good")
    group.send("e1", now=3.0), group.send("e2", now=4.0)
    group.pull(unconfirmed)
    group.bound(unconfirmed)
    for member in (unconfirmed, good, good, good):
        group.pull(member)
    (line,) = group.report()
    assert (line.lane, line.outstanding, line.head, line.since) == ("x", 2, 0, 3.0)
    assert line.holders == ("slow", "unconfirmed")
    group.pull(slow), group.leave(slow)
    assert group.report()[0].holders == ("unconfirmed",)


def test_members_that_come_and_go_beside_a_stuck_one_leave_nothing_behind() -> None:
    group = Group()
    group.join("stuck")
    group.send("e1")
    for _ in range(500):
        member = group.join("passing")
        group.leave(member)
    assert len(group._crowd._laggards.members) < 50


@pytest.mark.parametrize("limits", [{"max_backlog": 0}, {"max_outstanding": 0}])
def test_limits_below_one_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Group(**limits)


# -- runs that end otherwise than by finishing -------------------------------------------------------------------------


def test_an_interrupted_member_fails_the_event_it_is_on_at_once_and_nothing_else() -> None:
    group = Group()
    member, other = group.join("a"), group.join("b")
    for number in range(3):
        group.send(number)
    group.pull(member)
    moved_past = group.bound(member)
    group.pull(member)
    on_it = group.bound(member)
    for _ in range(4):
        group.pull(other)
    group.fail_held(member, "broken")
    group.fail_held(member, "once more")
    group.confirm(on_it)
    assert group.advance() == []
    group.confirm(moved_past)
    batch = group.take()
    assert outcomes(batch) == [(0, 2, 0, 0), (1, 1, 1, 0)]
    assert group.blame(batch.entries[1]) == MemberBlame({"a": "broken"}, ())
    group.settle(batch)
    assert group.pull(member) == 2


def test_an_interruption_without_an_error_blames_nobody() -> None:
    group = Group()
    member = group.join("a")
    group.send("e1")
    group.pull(member)
    group.fail_held(member, None)
    batch = group.take()
    assert outcomes(batch) == [("e1", 0, 1, 0)]
    assert group.blame(batch.entries[0]) == MemberBlame({}, ("a",))


@pytest.mark.parametrize("still_on_it", [True, False])
def test_an_event_fails_at_once_when_what_was_derived_from_it_is_refused(still_on_it: bool) -> None:
    group = Group()
    member = group.join("a")
    group.send("e1"), group.send("e2")
    group.pull(member)
    first, second = group.bound(member), group.bound(member)
    if not still_on_it:
        group.pull(member)
    told = group.shell.told
    group.pending_events.refuse_persisted([second, second, 10**9, -5], "too odd")
    assert group.shell.told > told
    group.confirm(first, second)
    group.pull(member), group.pull(member)
    batch = group.take()
    assert outcomes(batch) == [("e1", 0, 1, 0), ("e2", 1, 0, 0)]
    assert group.blame(batch.entries[0]) == MemberBlame({"a": "too odd"}, ())
    assert group.pending_events.trim() <= 2


def test_a_refused_event_is_found_after_older_events_that_still_wait() -> None:
    group = Group()
    member = group.join("a")
    seqs = []
    for number in range(3):
        group.send(number)
        group.pull(member)
        seqs.append(group.bound(member))
    group.pull(member)
    group.pending_events.refuse_persisted([seqs[1]], "too odd")
    group.confirm(seqs[0], seqs[2])
    assert group.one_lane() == [(0, 1, 0, 0), (1, 0, 1, 0), (2, 1, 0, 0)]


def test_a_key_binds_in_its_latest_group_and_a_member_in_its_own() -> None:
    pending_events = PendingEvents()
    first, second = Group(pending_events=pending_events), Group(pending_events=pending_events)
    members = first.join("a"), second.join("a")
    for group, member in zip((first, second), members, strict=True):
        group.send("e1")
        group.pull(member)
        pending_events.open("key", group.members)
    assert pending_events.bind_pending_event(trigger_id="a", key="key") is not None
    assert (members[0].newest, members[1].newest > 0) == (0, True)
    assert pending_events.bind_pending_event(trigger_id="b", key="key") is None
    pending_events.close("key", first.members)
    assert pending_events.bind_pending_event(trigger_id="a", key="key") is not None
    pending_events.close("key", second.members)
    assert pending_events.bind_pending_event(trigger_id="a", key="key") is None
    one, other = first.bind(members[0]), first.bind(members[0])
    assert one != other
    assert list(members[0].carried) == [one]
    first.pull(members[0])
    assert first.bind(members[0]) is None


def test_a_released_member_does_not_count_in_what_it_holds_and_is_awaited_for_what_it_moved_past() -> None:
    group = Group()
    gone, stays = group.join("gone"), group.join("stays")
    for number in range(3):
        group.send(number)
    group.pull(gone)
    seq = group.bound(gone)
    group.pull(gone), group.bound(gone)
    for _ in range(4):
        group.pull(stays)
    group.release(gone)
    assert group.advance() == []
    group.confirm(seq)
    assert group.one_lane() == [(0, 2, 0, 0), (1, 1, 0, 0), (2, 1, 0, 0)]
    group.release(gone)
    assert list(group.members) == ["stays"]


def test_a_member_that_moved_past_its_event_before_it_was_released_accepts_it_once_it_is_confirmed() -> None:
    group = Group()
    gone = group.join("gone")
    for number in range(2):
        group.send(number)
    group.pull(gone)
    seq = group.bound(gone)
    group.move_past(gone)
    group.release(gone)
    assert group.advance() == []
    group.confirm(seq)
    assert group.one_lane() == [(0, 1, 0, 0), (1, 0, 0, 0)]


def test_a_refusal_of_what_a_released_member_derived_fails_nobody() -> None:
    group = Group()
    gone, stays = group.join("gone"), group.join("stays")
    group.send("e1"), group.send("e2")
    group.pull(gone)
    seq = group.bound(gone)
    group.pull(gone)
    for _ in range(3):
        group.pull(stays)
    group.release(gone)
    group.pending_events.refuse_persisted([seq], "too odd")
    assert group.one_lane() == [("e1", 1, 0, 0), ("e2", 1, 0, 0)]


def test_an_event_whose_members_were_all_released_is_accepted_by_nobody() -> None:
    group = Group()
    group.join("gone")
    group.send("e1")
    group.release(group.members["gone"])
    assert group.one_lane() == [("e1", 0, 0, 0)]


# -- seats -------------------------------------------------------------------------------------------------------------


def test_events_published_meanwhile_wait_in_a_seat_and_are_read_only_by_its_owner() -> None:
    group = Group(seat_seconds=60.0)
    away, stays = group.join("away"), group.join("stays")
    group.send("e1"), group.send("e2")
    group.pull(away)
    group.suspend(away, now=1.0)
    assert (group.list_seats(), group.has_seats) == ({"away": 61.0}, True)
    for event in ("e3", "e4"):
        group.send(event, now=2.0)
    for _ in range(5):
        group.pull(stays)
    assert group.pull(away) is None
    assert group.one_lane() == [("e1", 2, 0, 0)]
    back = group.find_seat("away")
    group.resume(back, now=5.0)
    assert [group.pull(back) for _ in range(4)] == ["e2", "e3", "e4", None]
    assert group.one_lane() == [("e2", 2, 0, 0), ("e3", 2, 0, 0), ("e4", 2, 0, 0)]
    assert (group.list_seats(), group.has_seats) == ({}, False)


def test_neither_overflow_nor_ack_timeout_applies_to_a_seat_until_its_owner_has_caught_up() -> None:
    group = Group(max_backlog=2, seat_seconds=1000.0)
    member = group.join("a")
    group.suspend(member, now=0.0)
    for number in range(6):
        assert group.send(number, now=0.0) == []
    assert group.expired(TIMEOUT) == []
    seat = group.find_seat("a")
    group.resume(seat, now=TIMEOUT)
    assert group.send(6, now=TIMEOUT) == []
    assert group.pull(seat) == 0
    assert group.expired(2 * TIMEOUT - 0.1) == []
    assert group.expired(2 * TIMEOUT) == [("a", SeatEndCause.TIMEOUT)]


def test_a_member_that_came_back_and_caught_up_overflows_like_any_other() -> None:
    group = Group(max_backlog=2, seat_seconds=1000.0)
    group.suspend(group.join("a"), now=0.0)
    for number in range(4):
        group.send(number)
    seat = group.find_seat("a")
    group.resume(seat, now=1.0)
    for _ in range(5):
        group.pull(seat)
    assert [group.send(number, now=1.0) for number in range(3)] == [[], [], [("a", SeatEndCause.OVERFLOW)]]


def test_a_seat_ends_after_its_time_and_what_it_held_is_unread() -> None:
    group = Group(seat_seconds=60.0)
    group.suspend(group.join("a"), now=0.0)
    group.send("e1", now=1.0)
    assert group.expired(59.9) == []
    group.keep_seat(group.find_seat("a"), until=80.0)
    assert group.expired(60.0) == []
    assert group.expired(80.0) == [("a", SeatEndCause.SEAT_TIMEOUT)]
    batch = group.take()
    assert outcomes(batch) == [("e1", 0, 1, 0)]
    assert group.blame(batch.entries[0]) == MemberBlame({}, ("a",))
    assert group.find_seat("a") is None


def test_a_seat_that_alone_keeps_the_stream_full_ends() -> None:
    group = Group(max_outstanding=2, seat_seconds=60.0, seat_full_seconds=5.0)
    first, second, quick = group.join("first"), group.join("second"), group.join("quick")
    group.suspend(first, now=0.0)
    group.send("e1"), group.send("e2")
    group.pull(quick), group.pull(quick), group.pull(second)
    # The seat is not the only cause while other members have something to do.
    assert group.expired(1.0) == group.expired(9.0) == []
    group.suspend(second, now=9.0)
    group.pull(quick)
    assert group.expired(10.0) == group.expired(14.9) == []
    assert group.expired(15.0) == [("first", SeatEndCause.SEAT_FULL)]
    assert group.one_lane() == [("e1", 2, 1, 0)]
    assert group.full_since is None
    assert group.expired(20.0) == []


def test_a_seat_does_not_end_because_of_a_slow_advance() -> None:
    group = Group(max_outstanding=2, seat_seconds=60.0, seat_full_seconds=5.0)
    member = group.join("a")
    group.send("e1")
    group.pull(member)
    group.suspend(member, now=0.0)
    group.send("e2")
    batch = group.take()
    assert group.expired(0.0) == group.expired(8.0) == []
    group.settle(batch)
    group.send("e3")
    group.resume(group.find_seat("a"), now=8.0)
    assert group.expired(8.0) == group.expired(17.0) == []


def test_with_seats_a_member_that_was_forced_to_fail_misses_no_later_event() -> None:
    group = Group(max_backlog=1, seat_seconds=60.0)
    slow = group.join("slow")
    group.send("e1")
    assert group.send("e2") == [("slow", SeatEndCause.OVERFLOW)]
    group.send("e3"), group.send("e4")
    batch = group.take()
    assert outcomes(batch) == [("e1", 0, 1, 0), ("e2", 0, 1, 0)]
    assert group.blame(batch.entries[1]) == MemberBlame({}, ("slow",))
    assert group.pull(slow) is None
    seat = group.find_seat("slow")
    group.resume(seat, now=1.0)
    assert [group.pull(seat), group.pull(seat)] == ["e3", "e4"]


def test_a_seat_can_exist_from_the_beginning() -> None:
    group = Group(seat_seconds=60.0)
    group.add_seat("a", until=30.0)
    group.send("e1", now=1.0)
    assert group.list_seats() == {"a": 30.0}
    assert group.one_lane() == []
    seat = group.find_seat("a")
    group.resume(seat, now=2.0)
    assert group.pull(seat) == "e1"


def test_a_refused_event_fails_alone_although_older_ones_are_not_confirmed() -> None:
    group = Group()
    member = group.join("a")
    group.send("e1"), group.send("e2"), group.send("e3")
    group.pull(member)
    first = group.bound(member)
    group.pull(member)
    second, third = group.bound(member), group.bound(member)
    group.pull(member)
    group.pending_events.refuse_persisted([third, second], "too large")
    group.confirm(first)
    assert group.one_lane() == [("e1", 1, 0, 0), ("e2", 0, 1, 0)]


def test_a_member_that_came_back_has_the_whole_ack_timeout_for_events_published_meanwhile() -> None:
    group = Group(seat_seconds=60.0)
    away, other = group.join("away"), group.join("other")
    group.suspend(away, now=0.0)
    group.send("e1", now=1.0)
    seat = group.find_seat("away")
    group.resume(seat, now=TIMEOUT)
    group.send("e2", now=TIMEOUT)
    group.pull(seat)
    unconfirmed = group.bound(seat)
    group.pull(seat)
    group.pull(other), group.pull(other)
    assert group.expire(2 * TIMEOUT - 1.0) == []
    assert {one.member.name for one in group.expire(2 * TIMEOUT)} == {"away", "other"}
    group.confirm(unconfirmed)
    assert group.one_lane() == [("e1", 1, 1, 0), ("e2", 0, 2, 0)]


# -- a stream whose reading has ended ----------------------------------------------------------------------------------


def test_after_stop_reading_a_member_can_move_past_its_event_and_no_other_is_resolved() -> None:
    group = Group(seat_seconds=60.0)
    on_it, waits, away = group.join("on it"), group.join("waits"), group.join("away")
    group.suspend(away, now=0.0)
    seat = group.find_seat("away")
    group.send("e1"), group.send("e2")
    group.resume(seat, now=0.0)
    group.pull(on_it), group.pull(waits), group.pull(waits), group.pull(waits)
    group.pull(seat), group.pull(seat)
    group.stop_reading()
    assert group.busy
    assert (group.pull(on_it), group.pull(waits)) == (None, None)
    assert group.one_lane() == [("e1", 3, 0, 0)]
    seq = group.bind(seat)
    assert group.pull(seat) is None
    assert group.busy
    group.confirm(seq)
    assert not group.busy
    assert group.one_lane() == []
    group.close()
    assert (group.take(), group.outstanding) == (None, 1)


@pytest.mark.parametrize("seat_seconds", [0.0, 60.0])
def test_after_stop_reading_a_late_member_fails_its_event_and_acks_nothing_that_it_left_unread(
    seat_seconds: float,
) -> None:
    group = Group(seat_seconds=seat_seconds)
    slow = group.join("slow")
    group.send("e1"), group.send("e2")
    group.pull(slow)
    group.stop_reading()
    assert [(one.member.name, one.cause) for one in group.expire(TIMEOUT)] == [("slow", SeatEndCause.TIMEOUT)]
    assert group.one_lane() == [("e1", 0, 1, 0)]
    assert (group.busy, group.take(), group.outstanding) == (False, None, 1)


@pytest.mark.parametrize("kind", [GroupAgainstNaive, SeatsAgainstNaive])
@pytest.mark.parametrize("seed", range(examples(60)))
def test_the_group_agrees_with_the_model_over_long_schedules(kind: type[GroupAgainstNaive], seed: int) -> None:
    """Hypothesis prefers short schedules; this finds failures that take many steps."""
    rng = random.Random(seed)
    machine = kind()

    def name() -> str:
        return rng.choice(NAMES)

    acts: list[tuple[int, Callable[[], None]]] = [
        (6, lambda: machine.join(name())),
        (1, lambda: machine.leave(name())),
        (12, lambda: machine.publish(rng.choice("xy"), rng.choice([0.0, 0.0, 0.0, 1.0]))),
        (16, lambda: machine.pull(name(), rng.randint(1, 3))),
        (2, lambda: machine.reject(name())),
        (2, lambda: machine.fail_held(name(), rng.choice(["broken", None]))),
        (8, lambda: machine.bind(name())),
        (6, lambda: machine.confirm([rng.randrange(1000) for _ in range(3)])),
        (2, lambda: machine.refuse(rng.randrange(1000))),
        (1, lambda: machine.release(name())),
        (2, lambda: machine.expire(rng.choice([0.0, 1.0, 5.0]))),
        (10, lambda: machine.take()),
        (10, lambda: machine.settle(rng.randrange(1000))),
    ]
    if isinstance(machine, SeatsAgainstNaive):
        acts += [
            (5, lambda: machine.suspend(name())),
            (4, lambda: machine.resume(name())),
            (1, lambda: machine.add_seat(name())),
        ]
    weights, chosen = zip(*acts, strict=True)
    for act in rng.choices(chosen, weights, k=250):
        act()
        machine.both_say_the_same()
        if isinstance(machine, SeatsAgainstNaive):
            machine.seats_are_known()


def test_lanes_are_counted_without_their_holders() -> None:
    group = Group()
    member = group.join("a")
    group.send(1, "x", now=3.0)
    group.send(2, "y", now=4.0)
    group.send(3, "x", now=5.0)
    group.load_more(member)
    member.window = next(member.unread)
    assert group.reject(member, member.window) is RejectOutcome.REJECTED

    assert count_lanes(group.ledger) == [LaneCount("x", 2, 0, 3.0), LaneCount("y", 1, 0, 4.0)]
    assert group.failures

    list(member.unread)
    group.load_more(member)
    batch = group.take()
    assert batch is not None
    assert [lane.resolved for lane in count_lanes(group.ledger)] == [2, 1]
    group.settle(batch)
    assert count_lanes(group.ledger) == [LaneCount("y", 1, 1, 4.0)]
    assert not group.failures
