"""A map whose source is cleared stays open: elements whose items are equal are left alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.tasks.comparison import compute_digest, has_to_run_again
from tidemill.core.tasks.dependencies import TaskOutcome, Told
from tidemill.core.tasks.expansion import (
    Arrived,
    Compared,
    ElementsMoved,
    Expansion,
    GroupMoved,
    Look,
    MapInput,
    MapPolicy,
    MapRow,
    MapStopReason,
    Opened,
    Shortened,
    SourceAgain,
    SourceEnded,
    Stopped,
    feed,
    find_uncompared,
)
from tidemill.core.tasks.task_row import TaskEnding, TaskRow, TaskState

S, F, U, K = TaskOutcome.SUCCESS, TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED, TaskOutcome.SKIPPED
NONE, RUNNING, ENDING, REMOVED = TaskState.NONE, TaskState.RUNNING, TaskState.ENDING, TaskState.REMOVED


def play(row: MapRow, *inputs: MapInput, policy: MapPolicy | None = None) -> Expansion:
    expansion = Expansion(row)
    for one in inputs:
        expansion = feed(expansion.row, one, policy or MapPolicy())
    return expansion


def build(**counts: int | bool | str | None) -> MapRow:
    """Return a map that has ended, and has told its end."""
    done = MapRow(opened=True, closed=True)._replace(**counts)  # type: ignore[arg-type]
    return play(done, Look()).row


# -- digests -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.text(max_size=3), max_size=4), st.lists(st.none() | st.text(max_size=3), max_size=4))
@settings(max_examples=50)
def test_elements_have_the_same_digest_exactly_if_their_items_are_the_same(first, second) -> None:
    one, two = (compute_digest(items, range(len(items))) for items in (first, second))
    assert (one == two) == (first == second)
    assert 0 <= one < 1 << 63


def test_the_index_counts_only_for_items_that_are_not_stored() -> None:
    assert compute_digest(["1"], [1]) == compute_digest(["1"], [2])
    assert compute_digest([None], [1]) != compute_digest([None], [2])


@pytest.mark.parametrize(
    ("task", "ran_with", "changed", "wanted"),
    [
        (TaskRow(state=NONE), 1, True, False),
        (TaskRow(state=TaskState.QUEUED, tries=1, tries_before=1), 1, True, False),
        (TaskRow(state=RUNNING, tries=1), 1, False, True),
        (TaskRow(state=RUNNING, tries=1), 2, True, False),
        (TaskRow(state=TaskState.UP_FOR_RETRY, tries=1), 1, False, True),
        (TaskRow(state=TaskState.DEFERRED, tries=1), 1, False, True),
        (TaskRow(state=TaskState.FAILED, tries=1), 2, True, False),
        (TaskRow(state=TaskState.SUCCESS, tries=1), 1, False, True),
        # It ended before its first attempt, or that had not read its items.
        (TaskRow(state=TaskState.SKIPPED), None, True, True),
        (TaskRow(state=TaskState.SKIPPED), None, False, False),
        (TaskRow(state=REMOVED, tries=1), 2, False, True),
        (TaskRow(state=ENDING, tries=1, ending=TaskEnding(NONE)), 1, False, False),
        (TaskRow(state=ENDING, tries=1, ending=TaskEnding(REMOVED)), 2, False, True),
        (TaskRow(state=ENDING, tries=1, ending=TaskEnding(TaskState.SUCCESS)), 1, False, True),
    ],
)
def test_elements_that_have_begun_with_other_items_run_again(task, ran_with, changed, wanted) -> None:
    assert has_to_run_again(task, ran_with, 2, changed=changed) is wanted


# -- single steps ------------------------------------------------------------------------------------------------------


def test_a_map_opens_again_and_tells_so_until_its_elements_are_compared() -> None:
    done = build(arrived=3, created=3, success=3)
    assert done.done
    again = play(done, SourceAgain())
    assert again.told == Told(frozenset((S,)))
    assert find_uncompared(again.row, 2) == range(2)
    half = play(again.row, Arrived(2), Compared(2))
    assert find_uncompared(half.row, 2) == range(2, 2)
    assert not play(half.row, Arrived(3), SourceEnded(S, 3)).row.done
    assert play(half.row, Arrived(3), SourceEnded(S, 3), Compared(3)).row == done


def test_new_elements_wait_until_the_old_ones_are_compared() -> None:
    again = play(build(arrived=2, created=2, success=2), SourceAgain(), Arrived(4), SourceEnded(S, 4))
    assert not again.create
    assert play(again.row, Compared(2)).create == range(2, 4)


def test_new_elements_need_not_be_compared() -> None:
    row = play(build(arrived=2, created=2, success=2), SourceAgain(), Arrived(4), Compared(2)).row
    assert (row.created, row.compared, find_uncompared(row, 4)) == (4, 4, range(4, 4))
    assert play(row, Arrived(5)).create == range(4, 5)
    assert play(row, SourceAgain()).row.compared == 0


def test_a_shorter_source_ends_once_the_elements_beyond_it_are_removed() -> None:
    row = play(build(arrived=3, created=3, success=2, failed=1), SourceAgain(), SourceEnded(S, 1), Compared(1)).row
    assert (row.arrived, row.created, row.compared, row.done) == (1, 3, None, False)
    moved = [ElementsMoved(TaskState.SUCCESS, REMOVED), ElementsMoved(TaskState.FAILED, REMOVED)]
    short = play(row, *moved, Shortened())
    assert short.row == build(arrived=1, created=1, success=1)
    assert play(short.row, Shortened()).row == short.row


@pytest.mark.parametrize("outcome", [F, U])
def test_a_source_that_fails_again_leaves_the_elements_as_they_are(outcome) -> None:
    row = play(build(arrived=3, created=3, success=3), SourceAgain(), Arrived(1), SourceEnded(outcome, 1)).row
    assert row == build(arrived=3, created=3, success=3, upstream_failed=1)
    assert play(row, SourceAgain()).row.upstream_failed == 0


def test_a_source_that_is_skipped_leaves_no_element() -> None:
    row = play(build(arrived=1, created=1, success=1), SourceAgain(), SourceEnded(K, 0)).row
    assert play(row, ElementsMoved(TaskState.SUCCESS, REMOVED), Shortened()).row == build()


@pytest.mark.parametrize("reason", list(MapStopReason))
def test_what_only_the_stop_of_a_map_counted_is_forgotten(reason) -> None:
    row = play(MapRow(), Opened(5), policy=MapPolicy(2)).row
    stopped = play(row, ElementsMoved(RUNNING, TaskState.FAILED, 2), Stopped(reason), policy=MapPolicy(2)).row
    assert (stopped.skipped, stopped.created) == (1, 4)
    again = play(stopped, SourceAgain()).row
    assert (again.failed, again.skipped, again.stop, again.arrived) == (2, 0, None, 4)


def test_failures_of_elements_that_are_not_compared_stop_no_map() -> None:
    policy = MapPolicy(max_failed=0)
    again = play(build(arrived=2, created=2, failed=1, success=1), SourceAgain(), policy=policy)
    assert again.row.stop is None
    assert play(again.row, Compared(2), policy=policy).row.stop == MapStopReason.FAILED_ELEMENTS


def test_failures_of_elements_beyond_the_new_end_stop_no_map() -> None:
    policy = MapPolicy(max_failed=0)
    inputs = SourceAgain(), SourceEnded(S, 2), Compared(2)
    row = play(build(arrived=3, created=3, success=2, failed=1), *inputs, policy=policy).row
    assert (row.stop, row.done) == (None, False)
    row = play(row, ElementsMoved(TaskState.FAILED, REMOVED), Shortened(), policy=policy).row
    assert row == build(arrived=2, created=2, success=2)


def test_a_map_that_is_stopped_while_its_source_runs_again_ends_with_its_elements() -> None:
    row = play(build(arrived=3, created=3, success=3), SourceAgain(), SourceEnded(S, 1)).row
    stopped = play(row, Stopped(MapStopReason.CANCELLED)).row
    assert (stopped.done, stopped.arrived, stopped.skipped) == (True, 3, 0)


def test_a_map_that_never_opened_and_a_source_without_a_number_are_left_alone() -> None:
    assert play(MapRow(), SourceAgain(), Compared(1), Shortened()).row == MapRow()
    assert find_uncompared(MapRow(), 3) == range(0)
    row = play(build(arrived=1, created=1, success=1), SourceAgain(), SourceEnded(S)).row
    assert (row.closed, row.compared) == (True, 0)


def test_the_maps_of_tasks_in_a_group_are_compared_with_it() -> None:
    group = play(build(arrived=2, created=2, success=2), SourceAgain()).row
    part = play(build(arrived=2, created=2, success=1, upstream_failed=1), SourceAgain(1), GroupMoved(group)).row
    assert (part.compared, part.closed, part.done, part.upstream_failed) == (0, False, False, 1)
    group = play(group, SourceEnded(S, 2), Compared(2)).row
    assert play(part, GroupMoved(group, S)).row.done


# -- lives -------------------------------------------------------------------------------------------------------------


@dataclass
class Element:
    state: TaskState = TaskState.SCHEDULED
    ran_with: int | None = None
    started: bool = False
    after: TaskState = NONE
    runs: list[int] = field(default_factory=list)

    @property
    def row(self) -> TaskRow:
        ending = TaskEnding(self.after) if self.state is ENDING else None
        return TaskRow(state=self.state, tries=int(self.started), ending=ending)


class World:
    """A map with its elements, as a store keeps them."""

    def __init__(self, policy: MapPolicy) -> None:
        self.policy = policy
        self.row = MapRow()
        self.elements: dict[int, Element] = {}
        self.items: list[int] = []
        self.coming: list[int] = []
        self.given, self.ended = 0, False

    def feed(self, given: MapInput) -> None:
        expansion = feed(self.row, given, self.policy)
        self.row = expansion.row
        waiting = [one for _, one in sorted(self.elements.items()) if one.state is NONE]
        for one in waiting[: expansion.again]:
            one.state = TaskState.SCHEDULED
        for index in expansion.create:
            # A removed element comes back.
            one = self.elements.setdefault(index, Element())
            one.state, one.started = TaskState.SCHEDULED, False

    def move(self, index: int, state: TaskState) -> None:
        one = self.elements[index]
        before, one.state = one.state, state
        self.feed(ElementsMoved(before, state))

    def end(self, index: int, state: TaskState) -> None:
        one = self.elements[index]
        if one.state is RUNNING or one.state is ENDING:
            one.after = state
            self.move(index, ENDING)
        else:
            one.started = one.started and state is not NONE
            self.move(index, state)

    def begin(self, items: list[int]) -> None:
        self.coming, self.given, self.ended = items, 0, False
        self.feed(SourceAgain() if self.row.opened else Opened())

    def step(self, choice: int, items: list[int]) -> None:
        there = sorted(self.elements)
        match choice % 8:
            case 0:
                self.begin(items)
            case 1 | 2 if self.given < len(self.coming):
                self.items[self.given : self.given + 1] = [self.coming[self.given]]
                self.given += 1
                self.feed(Arrived(self.given))
            case 2 if self.row.opened and not self.ended:
                self.ended = True
                self.feed(SourceEnded(S, self.given))
            case 3 | 4 if there:
                self.run(there[choice % len(there)])
            case 5:
                self.compare(1 + choice % 3)
            case 6:
                self.remove()
            case _:
                self.feed(Look())

    def run(self, index: int) -> None:
        one = self.elements[index]
        if one.state is TaskState.SCHEDULED:
            one.ran_with, one.started = self.items[index], True
            one.runs.append(self.items[index])
            self.move(index, RUNNING)
        elif one.state is RUNNING:
            self.move(index, TaskState.SUCCESS)
        elif one.state is ENDING:
            one.started = one.started and one.after is not NONE
            self.move(index, one.after)

    def compare(self, number: int) -> None:
        indexes = find_uncompared(self.row, self.given)[:number]
        differing = [
            index
            for index in indexes
            if has_to_run_again(
                self.elements[index].row, self.elements[index].ran_with, self.items[index], changed=True
            )
        ]
        for index in differing:
            self.end(index, NONE)
        if indexes and not differing:
            self.feed(Compared(indexes.stop))

    def remove(self) -> None:
        if self.row.closed and self.row.arrived < self.row.created:
            beyond = range(self.row.arrived, self.row.created)
            for index in beyond:
                one = self.elements[index]
                if one.state is not REMOVED and not (one.state is ENDING and one.after is REMOVED):
                    self.end(index, REMOVED)
            if all(self.elements[index].state is REMOVED for index in beyond):
                self.feed(Shortened())

    def finish(self) -> None:
        for _ in range(200):
            for choice in (1, 2, 5, 6, 7):
                self.step(choice, [])
            for index in sorted(self.elements):
                self.run(index)
            if self.row.done and self.ended:
                return
        raise AssertionError(self.row)


ITEMS = st.lists(st.integers(0, 2), max_size=5)


@given(
    ITEMS,
    st.lists(st.tuples(st.integers(0, 200), ITEMS), max_size=60),
    ITEMS,
    st.integers(1, 4).map(MapPolicy),
)
@settings(max_examples=50, deadline=None)
def test_in_the_end_each_element_has_run_with_its_item_and_once_more_only_if_that_had_changed(
    first, steps, last, policy
) -> None:
    world = World(policy)
    world.begin(first)
    for choice, items in steps:
        world.step(choice, items)
        open_ones = [one for one in world.elements.values() if one.state in (TaskState.SCHEDULED, RUNNING, ENDING)]
        assert world.row.unfinished == len(open_ones)
    world.finish()
    world.begin(last)
    before = {index: (one.state, list(one.runs)) for index, one in world.elements.items()}
    world.finish()

    assert world.row.arrived == world.row.created == world.row.success == len(last)
    assert world.row.compared is None
    for index, one in world.elements.items():
        state, runs = before.get(index, (REMOVED, []))
        if index >= len(last):
            assert one.state is REMOVED
        elif state is TaskState.SUCCESS and runs[-1] == last[index]:
            assert one.runs == runs
        else:
            assert one.runs == [*runs, last[index]]
