"""What goes into the next transaction: examples, and the invariants over random schedules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.examples import examples

from tidemill.core.delivery.pending_records import PendingRecords, Staged, StagedState
from tidemill.core.ledger import Ledger


def results(taken: Any) -> list[str]:
    return [staged.result for staged in taken]


def test_without_staged_results_nothing_is_held_back() -> None:
    staging: PendingRecords[str, str] = PendingRecords()
    assert staging.find_cut("p", [1, 2, 3]) == 3
    assert staging.take("p", 3) == ()
    assert staging.settle("p") == ()
    assert staging.retry("p") == ()
    staging.abandon("p")
    assert staging.count_outstanding("p") == 0


def test_a_result_of_one_message_is_committed_with_it() -> None:
    staging: PendingRecords[str, str] = PendingRecords()
    for position in (1, 2, 3):
        staging.stage("p", position, position, f"r{position}")
    assert staging.find_cut("p", [1, 2]) == 2
    assert results(staging.take("p", 2)) == ["r1", "r2"]
    assert staging.count_outstanding("p") == 3
    assert results(staging.settle("p")) == ["r1", "r2"]
    assert staging.count_outstanding("p") == 1


def test_a_result_of_several_messages_holds_the_first_until_the_last_is_resolved() -> None:
    staging: PendingRecords[str, str] = PendingRecords()
    staging.stage("p", 2, 5, "wide")
    staging.stage("p", 2, 3, "narrow")
    staging.stage("p", 1, 1, "r1")
    assert staging.find_cut("p", [1, 2, 3, 4]) == 1
    assert staging.find_cut("p", [1, 2, 3, 4, 5]) == 5
    assert staging.find_cut("p", [2, 3]) == 0


def test_overlapping_results_hold_each_other() -> None:
    staging: PendingRecords[str, str] = PendingRecords()
    staging.stage("p", 1, 3, "a")
    staging.stage("p", 3, 6, "b")
    assert staging.find_cut("p", [1, 2, 3, 4]) == 0
    assert staging.find_cut("p", [1, 2, 3, 4, 6, 7]) == 6


def test_an_aborted_transaction_is_offered_again_before_later_results() -> None:
    staging: PendingRecords[str, str] = PendingRecords()
    staging.stage("p", 1, 1, "r1")
    staging.take("p", 1)
    staging.stage("p", 1, 1, "later")
    assert results(staging.retry("p")) == ["r1"]
    assert results(staging.take("p", 1)) == ["r1", "later"]


def test_an_undecided_result_holds_its_messages_and_all_later_ones_until_it_is_decided() -> None:
    staging: PendingRecords[str, str] = PendingRecords()
    first, second = staging.stage("p", 2, 2, "bad"), staging.stage("p", 3, 3, "worse")
    staging.take("p", 3)
    staging.retry("p")
    staging.withhold(first)
    staging.withhold(second)
    assert staging.find_cut("p", [1, 2, 3]) == 1
    staging.allow(first)
    assert staging.find_cut("p", [1, 2, 3]) == 2
    staging.drop(second)
    assert staging.find_cut("p", [1, 2, 3]) == 3
    assert results(staging.take("p", 3)) == ["bad"]


def test_only_an_undecided_result_can_be_decided() -> None:
    staging: PendingRecords[str, str] = PendingRecords()
    staged = staging.stage("p", 1, 1, "r")
    staging.allow(staged)
    staging.drop(staged)
    assert staged.state is StagedState.READY
    staging.abandon("p")
    staging.withhold(staged)
    staging.drop(staged)
    assert staged.state is StagedState.GONE
    assert staging.count_outstanding("p") == 0


def test_what_is_taken_is_in_the_order_of_its_messages_also_after_an_abort() -> None:
    staging: PendingRecords[str, str] = PendingRecords()
    for first, last, result in ((3, 3, "d"), (1, 1, "a"), (1, 2, "c"), (1, 1, "b"), (5, 5, "f"), (4, 4, "e")):
        staging.stage("p", first, last, result)
    assert [staged.result for staged in staging.take("p", 3)] == ["a", "b", "c", "d"]
    staging.retry("p")
    assert [staged.result for staged in staging.take("p", 5)] == ["a", "b", "c", "d", "e", "f"]


def test_results_that_are_staged_together_are_as_those_that_are_staged_one_by_one() -> None:
    together: PendingRecords[str, str] = PendingRecords()
    together.stage_all("p", [1, 2, 2], ["a", "b", "c"])
    together.stage("p", 3, 3, "d")
    together.stage_all("p", [4], ["e"])
    one_by_one: PendingRecords[str, str] = PendingRecords()
    for position, result in ((1, "a"), (2, "b"), (2, "c"), (3, "d"), (4, "e")):
        one_by_one.stage("p", position, position, result)
    for last in (2, 4):
        taken = [
            [(each.first, each.last, each.result) for each in staging.take("p", last)]
            for staging in (together, one_by_one)
        ]
        assert taken[0] == taken[1] != []
        together.settle("p")
        one_by_one.settle("p")
    with pytest.raises(ValueError, match="shorter"):
        together.stage_all("p", [1, 2], ["a"])


# -- random schedules, together with the ledger ----------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(st.just("open")),
    st.tuples(st.just("stage"), st.integers(0, 9), st.integers(0, 4)),
    st.tuples(st.just("resolve"), st.integers(0, 9)),
    st.tuples(st.just("collect")),
    st.tuples(st.just("end"), st.booleans(), st.integers(0, 9)),
    st.tuples(st.just("decide"), st.sampled_from(["allow", "drop"])),
    st.tuples(st.just("abandon")),
)


class Schedule:
    """One lane of messages and their results; as the shell does, a message is resolved once its results are staged."""

    def __init__(self) -> None:
        self.ledger: Ledger[str, int] = Ledger()
        self.staging: PendingRecords[str, float] = PendingRecords()
        self.entries: list[Any] = []
        self.spans: dict[float, tuple[int, int]] = {}
        self.withheld: list[Staged[str, float]] = []
        self.batch: Any = None
        self.taken: list[Staged[str, float]] = []
        self.gone: set[float] = set()
        self.committed = -1
        self.position = 0

    def step(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("open",):
                self.position += 2
                self.entries.append(self.ledger.open("p", self.position))
            case ("stage", index, width) if self.entries:
                self.stage(index % len(self.entries), width)
            case ("resolve", index) if self.entries:
                self.ledger.resolve(self.entries[index % len(self.entries)])
            case ("collect",) if self.batch is None:
                self.collect()
            case ("end", well, bad) if self.batch is not None:
                self.end(well, bad)
            case ("decide", how) if self.withheld:
                staged = self.withheld.pop()
                getattr(self.staging, how)(staged)
                if how == "drop":
                    self.gone.add(staged.result)
            case ("abandon",):
                self.ledger.abandon("p")
                self.staging.abandon("p")
                self.entries, self.withheld, self.batch, self.spans = [], [], None, {}

    def stage(self, index: int, width: int) -> None:
        members = self.entries[index : index + width + 1]
        if all(not entry.resolved for entry in members):
            number = len(self.spans) + 1000 * self.position
            first, last = members[0].item, members[-1].item
            if width == 0:
                self.staging.stage_all("p", [first, first], [number, number + 0.5])
                self.spans[number + 0.5] = (first, last)
            else:
                self.staging.stage("p", first, last, number)
            self.spans[number] = (first, last)

    def collect(self) -> None:
        batches = self.ledger.take_all(self.cut)
        if batches:
            (self.batch,) = batches
            self.taken = list(self.staging.take("p", self.batch.entries[-1].item))
            for staged in self.taken:
                assert staged.state is StagedState.READY, "what is undecided, or out already, went"
            last, taken = self.batch.entries[-1].item, {staged.result for staged in self.taken}
            for number, (first, end) in self.spans.items():
                inside = first <= last
                assert inside == (end <= last), "a transaction splits a result from its messages"
                assert (number in taken) == (inside and number not in self.gone)

    def cut(self, lane: str, prefix: Any) -> int:
        return self.staging.find_cut(lane, [entry.item for entry in prefix])

    def end(self, well: bool, bad: int) -> None:
        if well:
            self.ledger.settle(self.batch)
            assert list(self.staging.settle("p")) == self.taken
            self.gone |= {staged.result for staged in self.taken}
            assert self.batch.entries[-1].item > self.committed
            self.committed = self.batch.entries[-1].item
            self.entries = [entry for entry in self.entries if entry.item > self.committed]
        else:
            self.ledger.retry(self.batch)
            assert list(self.staging.retry("p")) == self.taken
            if bad < len(self.taken):
                self.staging.withhold(self.taken[bad])
                self.withheld.append(self.taken[bad])
        self.batch = None

    def finish(self) -> None:
        while self.withheld:
            self.step(("decide", "allow"))
        for entry in self.entries:
            self.ledger.resolve(entry)
        for _ in range(3):
            if self.batch is not None:
                self.end(True, 0)
            self.collect()
        assert self.ledger.total == 0, "something waits for ever"
        assert self.staging.count_outstanding("p") == 0


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(STEPS, min_size=30, max_size=80))  # in shorter ones, hardly any record is withheld
def test_results_and_their_messages_are_committed_together_once_and_all_are_in_the_end(
    steps: list[tuple[Any, ...]],
) -> None:
    schedule = Schedule()
    for step in steps:
        schedule.step(step)
    schedule.finish()
