"""The ledger: its five invariants under random schedules, and a comparison with a naive model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.core.examples import examples

from tidemill.core.ledger import EntryOutcome, Ledger, LedgerBatch, LedgerEntry

LANES = ("a", "b", "c")
MEMBERS = 3
ALL = (1 << MEMBERS) - 1

lanes = st.sampled_from(LANES)
masks = st.integers(0, ALL)
#: Bits beyond `ALL` are not members.
some_members = st.integers(1, (ALL << 1) | 1)
outcomes = st.sampled_from(EntryOutcome)
picks = st.integers(0, 1000)

step = st.one_of(
    st.tuples(st.just("open"), lanes, masks),
    st.tuples(st.just("resolve"), picks, outcomes, some_members),
    st.tuples(st.just("resolve"), picks, outcomes, some_members),
    st.tuples(st.just("ready")),
    st.tuples(st.just("settle"), picks),
    st.tuples(st.just("settle"), picks),
    st.tuples(st.just("retry"), picks),
    st.tuples(st.just("abandon"), lanes),
)
schedules = st.lists(step, max_size=80)


@dataclass
class Played:
    """A schedule that was played, and what was observed."""

    ledger: Ledger[str, int] = field(default_factory=Ledger)
    entries: list[LedgerEntry[str, int]] = field(default_factory=list)
    batches: list[LedgerBatch[str, int]] = field(default_factory=list)
    settled: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    abandoned: set[int] = field(default_factory=set)

    def step(self, step: tuple) -> None:
        match step:
            case ("open", lane, members):
                self.entries.append(self.ledger.open(lane, len(self.entries), members))
            case ("resolve", pick, outcome, member) if self.entries:
                self.ledger.resolve(self.entries[pick % len(self.entries)], outcome, member)
            case ("ready",):
                self.batches += self.ledger.take_all()
            case ("settle", pick) if self.batches:
                self.settle(self.batches[pick % len(self.batches)])
            case ("retry", pick) if self.batches:
                self.ledger.retry(self.batches[pick % len(self.batches)])
            case ("abandon", lane):
                self.abandoned |= {e.position for e in self.outstanding(lane)}
                self.ledger.abandon(lane)

    def settle(self, batch: LedgerBatch[str, int]) -> None:
        before = self.ledger.count_outstanding(batch.lane)
        self.ledger.settle(batch)
        if self.ledger.count_outstanding(batch.lane) != before:
            self.settled[batch.lane] += [entry.position for entry in batch.entries]

    def outstanding(self, lane: str) -> list[LedgerEntry[str, int]]:
        gone = self.abandoned | set(self.settled[lane])
        return [entry for entry in self.entries if entry.lane == lane and entry.position not in gone]


def play(schedule: list[tuple]) -> Played:
    played = Played()
    for one in schedule:
        played.step(one)
    return played


# -- the invariants, by their numbers ----------------------------------------------------------------------------


@given(schedules)
def test_1_a_position_is_advanced_only_if_every_earlier_one_of_its_lane_is_resolved(schedule: list[tuple]) -> None:
    played = Played()
    for one in schedule:
        seen = len(played.batches)
        played.step(one)
        for batch in played.batches[seen:]:
            last = batch.entries[-1].position
            earlier = [entry for entry in played.outstanding(batch.lane) if entry.position <= last]
            assert earlier == list(batch.entries)
            assert all(entry.resolved for entry in earlier)


@given(schedules)
def test_2_nothing_is_advanced_twice_and_a_watermark_never_moves_back(schedule: list[tuple]) -> None:
    for positions in play(schedule).settled.values():
        assert positions == sorted(set(positions))


@given(schedules)
def test_3_an_entry_resolves_each_member_once_and_nothing_else_changes_it(schedule: list[tuple]) -> None:
    played = Played()
    members: dict[int, int] = {}
    first: dict[tuple[int, int], EntryOutcome] = {}
    for one in schedule:
        if one[0] == "resolve" and played.entries:
            entry = played.entries[one[1] % len(played.entries)]
            if entry.position not in played.abandoned:
                for bit in (1, 2, 4):
                    if one[3] & bit & members[entry.position]:
                        first.setdefault((entry.position, bit), one[2])
        played.step(one)
        if one[0] == "open":
            members[played.entries[-1].position] = one[2]
    for entry in played.entries:
        by_outcome = {
            EntryOutcome.ACKED: entry.acked,
            EntryOutcome.FAILED: entry.failed,
            EntryOutcome.REJECTED: entry.rejected,
        }
        for bit in (1, 2, 4):
            found = [outcome for outcome, mask in by_outcome.items() if mask & bit]
            expected = first.get((entry.position, bit))
            assert found == ([] if expected is None else [expected])
            assert bool(entry.pending & bit) == (expected is None and bool(members[entry.position] & bit))


@given(st.lists(st.tuples(st.sampled_from(["publish", "join", "leave", "pull", "confirm"]), st.integers(0, 4))))
def test_4_members_are_frozen_at_open_and_leaving_fails_what_was_never_pulled(script: list[tuple[str, int]]) -> None:
    ledger: Ledger[str, int] = Ledger()
    entries: list[LedgerEntry[str, int]] = []
    present: set[int] = set()
    pulled: dict[int, int] = {}  # member -> how many entries it has pulled or came too late for
    frozen: list[set[int]] = []
    expected: dict[tuple[int, int], EntryOutcome] = {}

    def tell(index: int, member: int, outcome: EntryOutcome) -> None:
        ledger.resolve(entries[index], outcome, 1 << member)
        if member in frozen[index]:
            expected.setdefault((index, member), outcome)

    for action, member in script:
        if action == "publish":
            frozen.append(set(present))
            entries.append(ledger.open("lane", len(entries), sum(1 << one for one in present)))
        elif action == "join" and member not in present:
            present.add(member)
            pulled[member] = len(entries)
        elif action == "pull" and member in present:
            pulled[member] = min(pulled[member] + 1, len(entries))
        elif action == "leave" and member in present:
            present.remove(member)
            for index in range(pulled[member], len(entries)):
                tell(index, member, EntryOutcome.FAILED)
        elif action == "confirm":  # who left since may still confirm what it pulled
            for index in range(pulled.get(member, 0)):
                tell(index, member, EntryOutcome.ACKED)
    for index, entry in enumerate(entries):
        touched = entry.pending | entry.acked | entry.failed | entry.rejected
        assert touched == sum(1 << member for member in frozen[index])
        assert entry.acked == sum(1 << m for m in frozen[index] if expected.get((index, m)) is EntryOutcome.ACKED)
        assert entry.failed == sum(1 << m for m in frozen[index] if expected.get((index, m)) is EntryOutcome.FAILED)


@given(masks, st.lists(st.tuples(outcomes, some_members)))
def test_5_an_outcome_that_nobody_accepted_is_not_clean(members: int, told: list[tuple[EntryOutcome, int]]) -> None:
    ledger: Ledger[str, None] = Ledger()
    entry = ledger.open("lane", None, members)
    for outcome, member in told:
        ledger.resolve(entry, outcome, member)
    if entry.clean:
        assert entry.acked == members != 0
    if entry.resolved and entry.acked == members != 0:
        assert entry.clean


# -- against a naive model -----------------------------------------------------------------------------------------


class Model:
    """One lane: what is outstanding, and how many of its head are in flight."""

    def __init__(self) -> None:
        self.entries: list[tuple[LedgerEntry[str, int], set[int]]] = []
        self.in_flight: LedgerBatch[str, int] | None = None


class LedgerAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger[str, int] = Ledger()
        self.model: dict[str, Model] = {}
        self.entries: list[LedgerEntry[str, int]] = []
        self.batches: list[LedgerBatch[str, int]] = []

    @rule(lane=lanes, members=masks)
    def open(self, lane: str, members: int) -> None:
        entry = self.ledger.open(lane, len(self.entries), members)
        assert entry.lane == lane
        assert not self.entries or entry.position > self.entries[-1].position
        self.entries.append(entry)
        lane_model = self.model.setdefault(lane, Model())
        lane_model.entries.append((entry, {bit for bit in (1, 2, 4) if members & bit}))

    @rule(lane=lanes, count=st.integers(0, 3))
    def open_all(self, lane: str, count: int) -> None:
        items = [len(self.entries) + number for number in range(count)]
        entries = self.ledger.open_all(lane, items)
        assert [(entry.lane, entry.item, entry.pending) for entry in entries] == [(lane, item, 1) for item in items]
        for entry in entries:
            assert not self.entries or entry.position > self.entries[-1].position
            self.entries.append(entry)
            self.model.setdefault(lane, Model()).entries.append((entry, {1}))

    @rule(some=st.lists(picks, max_size=5))
    def accept_all(self, some: list[int]) -> None:
        entries = [self.entries[pick % len(self.entries)] for pick in some if self.entries]
        self.ledger.accept_all(entries)
        for lane_model in self.model.values():
            for other, pending in lane_model.entries:
                if any(other is entry for entry in entries):
                    pending.discard(1)

    @rule(pick=picks, outcome=outcomes, member=some_members)
    def resolve(self, pick: int, outcome: EntryOutcome, member: int) -> None:
        if self.entries:
            entry = self.entries[pick % len(self.entries)]
            self.ledger.resolve(entry, outcome, member)
            for lane_model in self.model.values():
                for other, pending in lane_model.entries:
                    if other is entry:
                        pending -= {bit for bit in (1, 2, 4) if member & bit}

    @rule()
    def ready(self) -> None:
        expected = {}
        for lane, lane_model in self.model.items():
            prefix = []
            for entry, pending in lane_model.entries:
                if pending:
                    break
                prefix.append(entry)
            if prefix and lane_model.in_flight is None:
                expected[lane] = prefix
        batches = self.ledger.take_all()
        assert {batch.lane: list(batch.entries) for batch in batches} == expected
        assert len(batches) == len(expected)
        for batch in batches:
            self.model[batch.lane].in_flight = batch
        self.batches += batches

    @rule(pick=picks)
    def settle(self, pick: int) -> None:
        if self.batches:
            batch = self.batches[pick % len(self.batches)]
            self.ledger.settle(batch)
            lane_model = self.model.get(batch.lane)
            if lane_model is not None and lane_model.in_flight is batch:
                lane_model.in_flight = None
                del lane_model.entries[: len(batch.entries)]
                if not lane_model.entries:
                    del self.model[batch.lane]

    @rule(pick=picks)
    def retry(self, pick: int) -> None:
        if self.batches:
            batch = self.batches[pick % len(self.batches)]
            self.ledger.retry(batch)
            lane_model = self.model.get(batch.lane)
            if lane_model is not None and lane_model.in_flight is batch:
                lane_model.in_flight = None

    @rule(lane=lanes)
    def abandon(self, lane: str) -> None:
        self.ledger.abandon(lane)
        self.model.pop(lane, None)

    @invariant()
    def both_say_the_same(self) -> None:
        assert set(self.ledger.lanes) == self.model.keys()
        assert self.ledger.total == sum(len(one.entries) for one in self.model.values())
        for lane in LANES:
            outstanding = self.model[lane].entries if lane in self.model else []
            assert self.ledger.count_outstanding(lane) == len(outstanding)
            assert self.ledger.find_head(lane) is (outstanding[0][0] if outstanding else None)


TestLedgerAgainstModel = LedgerAgainstModel.TestCase
TestLedgerAgainstModel.settings = settings(max_examples=examples(60), stateful_step_count=60)


# -- examples -----------------------------------------------------------------------------------------------------


def test_out_of_order_completion_catches_up_at_once() -> None:
    ledger: Ledger[str, int] = Ledger()
    entries = {offset: ledger.open("lane", offset) for offset in range(10, 15)}
    for offset in (10, 11, 12, 14):
        ledger.resolve(entries[offset])
    (batch,) = ledger.take_all()
    assert [entry.item for entry in batch.entries] == [10, 11, 12]
    ledger.settle(batch)
    assert ledger.take_all() == []
    ledger.resolve(entries[13])
    (batch,) = ledger.take_all()
    assert [entry.item for entry in batch.entries] == [13, 14]


def test_an_entry_is_clean_only_if_every_member_accepted_it() -> None:
    ledger: Ledger[str, int] = Ledger()
    entries = [ledger.open("lane", n, members=0b11) for n in range(3)]
    for entry, outcome in zip(entries, (EntryOutcome.ACKED, EntryOutcome.FAILED, EntryOutcome.REJECTED), strict=True):
        ledger.resolve(entry, member=0b01)
        ledger.resolve(entry, outcome, 0b10)
    assert [(entry.acked, entry.failed, entry.rejected) for entry in entries] == [(3, 0, 0), (1, 2, 0), (1, 0, 2)]
    assert [entry.clean for entry in entries] == [True, False, False]


def test_a_batch_that_failed_is_offered_again_with_entries_resolved_since() -> None:
    ledger: Ledger[str, int] = Ledger()
    first, second = ledger.open("lane", 1), ledger.open("lane", 2)
    ledger.resolve(first)
    (batch,) = ledger.take_all()
    ledger.resolve(second)
    assert ledger.take_all() == []
    ledger.retry(batch)
    (again,) = ledger.take_all()
    assert list(again.entries) == [first, second]
    ledger.settle(batch)
    assert ledger.total == 2, "the old batch is not in flight any more"
    ledger.settle(again)
    assert ledger.total == 0


def test_entries_resolved_while_a_batch_was_in_flight_are_offered_once_it_is_settled() -> None:
    ledger: Ledger[str, int] = Ledger()
    first, second = ledger.open("lane", 1), ledger.open("lane", 2)
    ledger.resolve(first)
    (batch,) = ledger.take_all()
    ledger.resolve(second)
    ledger.settle(batch)
    (batch,) = ledger.take_all()
    assert list(batch.entries) == [second]


def test_an_entry_without_members_is_resolved_at_once_but_waits_for_those_before_it() -> None:
    ledger: Ledger[str, int] = Ledger()
    first = ledger.open("lane", 1)
    second = ledger.open("lane", 2, members=0)
    assert second.resolved
    assert not second.clean
    assert ledger.take_all() == []
    ledger.resolve(first)
    (batch,) = ledger.take_all()
    assert list(batch.entries) == [first, second]
    ledger.open("other", 3, members=0)
    (batch,) = ledger.take_all()
    assert batch.lane == "other"


def test_a_lane_that_was_abandoned_and_opened_again_has_no_past() -> None:
    ledger: Ledger[str, int] = Ledger()
    old = ledger.open("lane", 1)
    ledger.resolve(old)
    (old_batch,) = ledger.take_all()
    stale = ledger.open("lane", 2)
    ledger.abandon("lane")
    new = ledger.open("lane", 1)
    ledger.settle(old_batch)
    ledger.retry(old_batch)
    ledger.resolve(stale)
    assert not stale.resolved
    assert ledger.take_all() == []
    assert ledger.find_head("lane") is new


def test_a_lane_without_entries_takes_no_memory() -> None:
    ledger: Ledger[int, None] = Ledger()
    for lane in range(1000):
        ledger.resolve(ledger.open(lane, None))
    for batch in ledger.take_all():
        ledger.settle(batch)
    assert list(ledger.lanes) == []
    assert ledger.total == 0


def test_entries_that_are_accepted_together_are_what_each_of_them_would_be() -> None:
    ledger: Ledger[str, int] = Ledger()
    entries = ledger.open_all("a", [10, 11, 12])
    shared = ledger.open("a", 13, 0b11)
    ledger.resolve(entries[1], EntryOutcome.FAILED)
    ledger.accept_all([*entries, shared])
    assert [entry.clean for entry in entries] == [True, False, True]
    assert (shared.pending, shared.acked) == (0b10, 1)
    assert [entry.item for entry in ledger.take_all()[0].entries] == [10, 11, 12]


def test_the_repr_of_an_entry_shows_what_it_waits_for() -> None:
    ledger: Ledger[str, int] = Ledger()
    entry = ledger.open("lane", 7, 0b101)
    assert repr(entry) == "<LedgerEntry 1 of 'lane': 7, pending=0b101>"
    ledger.resolve(entry, EntryOutcome.REJECTED, 0b101)
    assert repr(entry) == "<LedgerEntry 1 of 'lane': 7, resolved>"


def test_members_are_a_bit_mask() -> None:
    with pytest.raises(ValueError, match="bit mask"):
        Ledger[str, int]().open("lane", 1, -1)


# -- entries whose members the caller counts -------------------------------------------------------------------------


def test_one_lane_is_taken_at_a_time_and_the_one_that_waited_longest_is_first() -> None:
    ledger: Ledger[str, int] = Ledger()
    assert ledger.take() is None
    for number, lane in enumerate("bab"):
        ledger.open(lane, number, 0)
    first = ledger.take()
    ledger.open("a", 3, 0)
    second = ledger.take()
    assert [(one.lane, [e.item for e in one.entries]) for one in (first, second)] == [("b", [0, 2]), ("a", [1, 3])]
    assert ledger.take() is None


def test_an_entry_of_the_caller_is_resolved_when_the_caller_reports_it() -> None:
    ledger: Ledger[str, int] = Ledger()
    first, second = LedgerEntry[str, int](7, 10, 2), LedgerEntry[str, int](9, 11, 1)
    for entry in (first, second):
        ledger.add("a", entry)
    second.pending = 0
    ledger.note_resolved(second)
    assert ledger.take() is None
    first.pending = 0
    ledger.note_resolved(first)
    batch = ledger.take()
    assert [entry.position for entry in batch.entries] == [7, 9]
    ledger.abandon("a")
    ledger.note_resolved(first)
    assert ledger.take() is None
    with pytest.raises(TypeError):
        ledger.add([], first)  # type: ignore[arg-type]


def test_a_cut_takes_a_part_of_the_prefix_and_the_rest_is_offered_again() -> None:
    ledger: Ledger[str, int] = Ledger()
    entries = [ledger.open("a", n) for n in range(4)]
    for entry in entries[:3]:
        ledger.resolve(entry)
    assert ledger.take_all(lambda lane, prefix: 0) == []
    (batch,) = ledger.take_all(lambda lane, prefix: len(prefix) - 1)
    assert [entry.item for entry in batch.entries] == [0, 1]
    assert ledger.take_all(lambda lane, prefix: 1) == []
    ledger.settle(batch)
    ledger.resolve(entries[3])
    (batch,) = ledger.take_all(lambda lane, prefix: len(prefix))
    assert [entry.item for entry in batch.entries] == [2, 3]
    assert ledger.take_all() == []
