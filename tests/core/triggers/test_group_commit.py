"""Group commit: by time, in order, nothing is lost, and an outage fails nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidemill.core.errors import InvariantError
from tidemill.core.retry import Backoff
from tidemill.core.triggers.group_commit import CommitLimits, GroupCommit, GroupCommitBatch, ProducerStanding

LIMITS = CommitLimits(
    linger_seconds=0.01,
    max_batch_count=4,
    max_batch_bytes=100,
    high_count=8,
    low_count=3,
    high_bytes=400,
    outage_seconds=1.0,
    backoff=Backoff(0.5, 2.0),
)
MOST_BITS = (1 << 32) - 1


def values(batch: GroupCommitBatch[int] | None) -> list[int]:
    assert batch is not None
    return [item for item, _ in batch.items]


def commits_with(*items: int, size_bytes: int = 1, at: float = 0.0) -> GroupCommit[int]:
    commits = GroupCommit[int](LIMITS)
    for item in items:
        commits.add(item, size_bytes, at)
    return commits


class Machine(RuleBasedStateMachine):
    """Random schedules against a database that accepts, refuses or cannot be reached."""

    @initialize()
    def start(self) -> None:
        self.commits = GroupCommit[int](LIMITS)
        self.now = 0.0
        self.added: list[int] = []
        self.gone: list[int] = []
        self.sizes: dict[int, int] = {}
        self.flying: GroupCommitBatch[int] | None = None

    @rule(size=st.integers(0, 150))
    def add(self, size: int) -> None:
        self.commits.add(len(self.added), size, self.now)
        self.sizes[len(self.added)] = size
        self.added.append(len(self.added))

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def look(self) -> None:
        due, flying = self.commits.due, self.flying
        taken = self.commits.take(self.now)
        if taken is None:
            assert due is None or due > self.now or flying is not None
            return
        assert flying is None
        assert due is not None
        assert due <= self.now
        items = values(taken)
        assert items == self.added[len(self.gone) : len(self.gone) + len(items)]
        assert 0 < len(items) <= LIMITS.max_batch_count
        assert taken.size_bytes == sum(self.sizes[item] for item in items)
        assert taken.size_bytes <= LIMITS.max_batch_bytes or len(items) == 1
        self.flying = taken

    @precondition(lambda self: self.flying is not None)
    @rule()
    def commit(self) -> None:
        self.gone += values(self.flying)
        self.flying = None
        self.commits.note_committed()
        assert self.commits.standing is not ProducerStanding.DOWN

    @precondition(lambda self: self.flying is not None)
    @rule(bits=st.integers(0, MOST_BITS))
    def outage(self, bits: int) -> None:
        self.flying = None
        self.commits.note_unreachable(self.now, bits)
        assert self.commits.standing is ProducerStanding.DOWN
        assert self.commits.due is not None
        assert self.commits.due <= self.now + LIMITS.backoff.maximum_seconds

    @precondition(lambda self: self.flying is not None)
    @rule()
    def refuse(self) -> None:
        taken, self.flying = self.flying, None
        alone = self.commits.note_refused(self.now)
        assert taken is not None
        assert (alone is taken) == (len(taken.items) == 1)
        if alone is not None:
            self.gone += values(alone)

    @rule()
    def drain(self) -> None:
        self.commits.drain()

    @invariant()
    def nothing_is_lost_or_out_of_order(self) -> None:
        waiting = self.added[len(self.gone) :]
        assert self.gone == self.added[: len(self.gone)]
        assert self.commits.pending == len(waiting)
        assert self.commits.pending_bytes == sum(self.sizes[item] for item in waiting)
        if waiting and self.flying is None:
            assert self.commits.due is not None
        if self.commits.pending >= LIMITS.high_count:
            assert self.commits.standing is not ProducerStanding.OPEN
        if not waiting:
            assert self.commits.standing is ProducerStanding.OPEN


TestGroupCommitUnderRandomSchedules = Machine.TestCase


@given(st.integers(1, 50))
def test_a_number_of_items_alone_never_starts_a_batch(count: int) -> None:
    commits = commits_with(*range(count))

    assert commits.take(math.nextafter(LIMITS.linger_seconds, 0)) is None
    assert values(commits.take(LIMITS.linger_seconds)) == list(range(min(count, LIMITS.max_batch_count)))


def test_the_default_linger_leaves_half_of_the_20_milliseconds_to_the_start_of_the_transaction() -> None:
    assert CommitLimits().linger_seconds <= 0.01


def test_the_oldest_item_sets_the_time() -> None:
    commits = commits_with(1)
    commits.add(2, 1, 0.009)

    assert commits.due == 0.01
    assert values(commits.take(0.01)) == [1, 2]


def test_items_added_during_a_write_are_due_at_their_own_time() -> None:
    commits = commits_with(1)
    commits.take(0.01)
    commits.add(2, 1, 0.5)
    commits.note_committed()

    assert commits.due == 0.51


def test_a_batch_that_failed_is_the_same_when_it_is_tried_again_and_later_items_wait_behind_it() -> None:
    commits = commits_with(1, 2)
    batch = commits.take(0.01)
    commits.add(3, 1, 0.02)
    commits.note_unreachable(1.0, MOST_BITS)

    assert commits.due == pytest.approx(1.5)
    assert commits.take(1.4) is None
    assert commits.take(1.5) is batch
    commits.note_committed()
    assert values(commits.take(1.5)) == [3]


def test_delays_grow_with_each_failure_and_are_reset_by_a_commit() -> None:
    commits = commits_with(1)
    now, waits = 0.01, []
    for _ in range(4):
        commits.take(now)
        commits.note_unreachable(now, MOST_BITS)
        assert commits.due is not None
        waits.append(commits.due - now)
        now = commits.due
    assert waits == pytest.approx([0.5, 1.0, 2.0, 2.0])
    commits.take(now)
    commits.note_committed()
    commits.add(2, 1, now)
    commits.take(now + 0.01)
    commits.note_unreachable(now, MOST_BITS)
    assert commits.due == pytest.approx(now + 0.5)


def test_a_write_that_is_not_answered_counts_as_an_outage_until_it_is() -> None:
    commits = commits_with(1)
    commits.take(0.01)

    assert commits.due == 1.01
    assert commits.take(1.0) is None
    assert commits.standing is ProducerStanding.OPEN
    assert commits.take(1.01) is None
    assert commits.standing is ProducerStanding.DOWN
    assert commits.due is None
    commits.note_committed()
    assert commits.standing is ProducerStanding.OPEN


def test_refused_content_is_halved_until_the_culprit_is_alone() -> None:
    commits = commits_with(1, 2, 3)
    refused, committed = [], []
    commits.take(0.01)
    for _ in range(6):
        if commits.pending == 0:
            break
        alone = commits.note_refused(0.01)
        refused += values(alone) if alone else []
        batch = commits.take(0.01)
        while batch is not None and 3 not in values(batch):
            committed += values(batch)
            commits.note_committed()
            batch = commits.take(0.01)
    assert (refused, committed) == ([3], [1, 2])
    assert commits.pending_bytes == 0


def test_producers_are_held_above_the_high_mark_until_the_low_mark() -> None:
    commits = commits_with(*range(8))
    assert commits.standing is ProducerStanding.FULL

    commits.take(0.01)
    commits.note_committed()
    assert (commits.pending, commits.standing) == (4, ProducerStanding.FULL)
    commits.take(0.01)
    commits.note_committed()
    assert commits.standing is ProducerStanding.OPEN


def test_bytes_hold_producers_too() -> None:
    commits = commits_with(1, size_bytes=400)

    assert commits.standing is ProducerStanding.FULL


def test_at_the_end_nothing_lingers() -> None:
    commits = commits_with(1)
    commits.drain()

    assert values(commits.take(0.0)) == [1]


def test_an_answer_without_a_batch_is_a_bug() -> None:
    with pytest.raises(InvariantError):
        GroupCommit[int](LIMITS).note_committed()
