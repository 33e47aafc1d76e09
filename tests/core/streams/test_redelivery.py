"""The commit floor and its redeliveries: each rule by itself, then random schedules compared with a naive model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.examples import examples

from tidemill.core.retry import Backoff
from tidemill.core.streams.offset_metadata import decode_metadata, encode_metadata
from tidemill.core.streams.redelivery import Redelivery
from tidemill.core.streams.redelivery_items import (
    Commit,
    OffsetDelivery,
    RedeliveryLimits,
    RedeliveryVerdict,
    SkipReason,
    judge_outcome,
)

HALF = 1 << 31
Log = Redelivery[str, int]


def log_of(
    *offsets: int, who: tuple[str, ...] = ("t",), **limits: object
) -> tuple[Log, list[OffsetDelivery[str, int]]]:
    """Return a log with lane 'a' and these offsets delivered to `who`."""
    log: Log = Redelivery(RedeliveryLimits(**{"backoff": Backoff(2.0, 8.0), **limits}))
    log.assign("a")
    for one in who:
        log.note_joined(one)
    return log, [admitted(log, offset) for offset in offsets]


def admitted(log: Log, offset: int, lane: str = "a") -> OffsetDelivery[str, int]:
    delivery = log.admit(lane, offset, offset * 10, 1)
    assert isinstance(delivery, OffsetDelivery)
    return delivery


def fail(log: Log, delivery: OffsetDelivery[str, int], now: float = 0.0, *who: str) -> bool:
    return log.resolve(delivery, RedeliveryVerdict.FAILED, now, HALF, who)


def clean(log: Log, *deliveries: OffsetDelivery[str, int]) -> None:
    for delivery in deliveries:
        assert log.resolve(delivery, RedeliveryVerdict.CLEAN, 0.0, 0) is False


def floors(log: Log) -> dict[str, int]:
    return {commit.lane: commit.floor for commit in log.take_commits()}


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((1, 0, 0), RedeliveryVerdict.CLEAN),
        ((5, 1, 0), RedeliveryVerdict.FAILED),
        ((5, 1, 1), RedeliveryVerdict.REJECTED),
        ((0, 0, 1), RedeliveryVerdict.REJECTED),
        ((0, 0, 0), RedeliveryVerdict.UNSEEN),
        ((0, 2, 0, 1), RedeliveryVerdict.FAILED),
        ((0, 2, 0, 2), RedeliveryVerdict.UNREAD),
        ((5, 1, 0, 1), RedeliveryVerdict.UNREAD),
        ((0, 1, 1, 1), RedeliveryVerdict.REJECTED),
    ],
)
def test_a_reject_outweighs_a_failure_which_outweighs_unread_which_outweighs_any_number_of_acks(counts, expected):
    assert judge_outcome(*counts) is expected


def test_clean_offsets_move_the_floor_only_in_order():
    log, (a, b, c) = log_of(5, 6, 7)
    clean(log, b)
    assert log.take_commits() == [Commit("a", 5, ((6, 7),), ())]
    clean(log, a)
    assert floors(log) == {"a": 7}
    clean(log, c)
    assert floors(log) == {"a": 8}
    assert floors(log) == {}


def test_offsets_that_do_not_exist_hold_nothing_up():
    log, (a, b) = log_of(5, 9)
    clean(log, a)
    assert floors(log) == {"a": 9}
    clean(log, b)
    assert floors(log) == {"a": 10}


def test_a_failed_offset_freezes_the_floor_until_it_is_clean():
    log, (a, b, c) = log_of(0, 1, 2)
    fail(log, b, 0.0)
    clean(log, a, c)
    assert log.take_commits() == [Commit("a", 1, ((2, 3),), ((1, 1),))]
    (again,) = log.take(1.0)
    assert (again.offset, again.held, again.failures) == (1, 10, 1)
    clean(log, again)
    assert log.take_commits() == [Commit("a", 3, (), ())]


def test_a_redelivery_waits_for_its_backoff():
    log, (a,) = log_of(0)
    fail(log, a, 10.0)
    assert log.due == 11.0
    assert log.take(10.9) == []
    assert [d.offset for d in log.take(11.0)] == [0]
    assert log.due is None


def unread(log: Log, delivery: OffsetDelivery[str, int], now: float = 0.0, *who: str) -> bool:
    return log.resolve(delivery, RedeliveryVerdict.UNREAD, now, HALF, who)


@pytest.mark.parametrize("resolve", [fail, unread])
@pytest.mark.parametrize("early", [True, False])
def test_a_redelivery_waits_until_a_subscriber_that_failed_it_or_left_it_unread_is_back(resolve, early):
    log, (a,) = log_of(0, who=("t", "u"))
    if early:
        log.note_left("t")
    resolve(log, a, 0.0, "t")
    log.note_left("u")
    log.note_joined("u")
    log.note_joined("v")
    assert log.take(50.0) == []
    if not early:
        log.note_joined("t")
        assert log.take(50.0) == [], "it never left"
        log.note_left("t")
        assert log.take(50.0) == []
    assert log.due == 60.0
    log.note_joined("t")
    assert [d.offset for d in log.take(50.0)] == [0]


@pytest.mark.parametrize("resolve", [fail, unread])
def test_subscribers_that_came_back_before_their_failure_was_reported_are_not_waited_for(resolve):
    log, (a,) = log_of(0, who=("t", "u"))
    for who in ("t", "u"):
        log.note_left(who)
        log.note_left(who)
        log.note_joined(who)
        log.note_joined(who)
    resolve(log, a, 0.0, "t", "u")
    assert log.take(0.9) == []
    assert [d.offset for d in log.take(1.0)] == [0]


def test_a_redelivery_waits_for_all_subscribers_that_failed_it_or_left_it_unread():
    log, (a,) = log_of(0, who=("t", "u"))
    log.note_left("t")
    log.note_left("u")
    fail(log, a, 0.0, "t", "u")
    log.note_joined("t")
    assert log.take(50.0) == []
    log.note_gone("u")
    assert [d.offset for d in log.take(50.0)] == [0]


def test_a_subscriber_that_left_permanently_before_its_failure_was_reported_is_not_waited_for():
    log, (a,) = log_of(0, who=("t", "u"))
    log.note_left("t")
    log.note_gone("t")
    fail(log, a, 0.0, "t")
    assert [d.offset for d in log.take(1.0)] == [0]


def test_a_subscriber_that_returns_after_leaving_permanently_is_not_waited_for_twice():
    log, (a,) = log_of(0, who=("t", "u"))
    log.note_gone("t")
    log.note_gone("t")
    log.note_joined("t")
    fail(log, a, 0.0, "t")
    assert [d.offset for d in log.take(1.0)] == [0]


def test_subscribers_that_do_not_come_back_in_time_are_reported():
    log, (a, b) = log_of(0, 1, who=("t", "u", "v"))
    log.note_left("t")
    log.note_left("u")
    fail(log, b, 5.0, "t")
    unread(log, a, 6.0, "u")
    assert log.find_overdue(64.9) is None
    overdue = log.find_overdue(65.0)
    assert overdue is not None
    assert (overdue.delivery.offset, overdue.missing) == (1, {"t"})
    log.note_gone("t")
    assert log.find_overdue(65.9) is None
    assert log.find_overdue(66.0).missing == {"u"}


def test_what_is_left_unread_is_never_dead_lettered_and_backs_off_further_each_time():
    log, (delivery,) = log_of(0, max_redeliveries=2)
    now, pauses = 0.0, []
    for _ in range(50):
        log.note_left("t")
        assert unread(log, delivery, now, "t") is False
        log.note_joined("t")
        pauses.append(log.due - now)
        now = log.due
        (delivery,) = log.take(now)
    assert pauses == [1.0, 2.0] + [4.0] * 48
    assert (delivery.failures, delivery.unread) == (0, 50)
    clean(log, delivery)
    assert log.take_commits() == [Commit("a", 1, (), ())]


def test_for_an_offset_that_is_also_left_unread_only_failures_count():
    log, (delivery,) = log_of(0, max_redeliveries=1)
    for resolve, failures, lettered in ((unread, 0, False), (fail, 1, False), (unread, 1, False), (fail, 2, True)):
        assert resolve(log, delivery, 0.0) is lettered
        assert delivery.failures == failures
        if not lettered:
            log.note_left("t")
            log.note_joined("t")
            (delivery,) = log.take(100.0)


def test_an_offset_that_nobody_saw_waits_for_a_subscriber_and_does_not_count_as_failed():
    log, (a,) = log_of(0, who=("t",))
    assert log.resolve(a, RedeliveryVerdict.UNSEEN, 0.0, HALF) is False
    assert log.take(50.0) == []
    assert log.find_overdue(60.0).missing == frozenset()
    log.note_joined("u")
    (again,) = log.take(50.0)
    assert (again.failures, again.unread) == (0, 1)
    log.note_joined("v")
    log.resolve(again, RedeliveryVerdict.UNSEEN, 50.0, HALF)
    assert log.due == 52.0, "a subscriber has joined since: only the backoff counts, and it grows"
    (third,) = log.take(52.0)
    fail(log, third, 52.0)
    assert log.due == 53.0


def test_an_offset_is_dead_lettered_after_its_last_redelivery_failed():
    log, (delivery,) = log_of(0, max_redeliveries=2)
    assert fail(log, delivery, 0.0) is False
    (delivery,) = log.take(100.0)
    assert fail(log, delivery, 100.0) is False
    (delivery,) = log.take(200.0)
    assert fail(log, delivery, 200.0) is True
    assert log.take(1000.0) == []
    assert floors(log) == {"a": 0}
    log.note_lettered(delivery)
    assert log.take_commits() == [Commit("a", 1, (), ())]
    log.note_lettered(delivery)
    assert log.take_commits() == []


def test_a_rejected_offset_is_dead_lettered_at_once_and_holds_the_floor_until_that_is_confirmed():
    log, (a, b) = log_of(0, 1)
    assert log.resolve(a, RedeliveryVerdict.REJECTED, 0.0, 0) is True
    clean(log, b)
    assert floors(log) == {"a": 0}
    assert log.open == 1
    log.note_lettered(a)
    assert floors(log) == {"a": 2}


def test_a_delivery_is_resolved_once():
    log, (a, b) = log_of(0, 1)
    fail(log, a)
    clean(log, a, b)
    assert fail(log, a) is False
    assert floors(log) == {"a": 0}
    (again,) = log.take(10.0)
    clean(log, a)
    assert log.open == 1
    clean(log, again)
    assert floors(log) == {"a": 2}
    assert log.take(100.0) == []


def test_stale_and_repeated_offsets_are_not_delivered():
    log, (a, _) = log_of(5, 6)
    clean(log, a)
    assert [log.admit("a", offset, 0) for offset in (6, 5, 4)] == [SkipReason.STALE] * 3
    assert log.admit("b", 0, 0) is SkipReason.FOREIGN
    assert floors(log) == {"a": 6}


def test_a_revoked_lane_has_no_more_redeliveries_or_outcomes():
    log, (a, b, c) = log_of(0, 1, 2, who=("t", "u"))
    log.note_left("t")
    fail(log, a, 0.0, "t")
    fail(log, b, 0.0)
    assert log.resolve(c, RedeliveryVerdict.REJECTED, 0.0, 0) is True
    log.revoke("a")
    log.revoke("a")
    clean(log, a, b)
    log.note_lettered(c)
    log.offer_again("a")
    assert log.take(100.0) == []
    assert (log.take_commits(), log.open, log.find_overdue(100.0), log.due) == ([], 0, None, None)
    assert "a" not in log
    assert log.wants("a") is False


def test_a_lane_that_is_assigned_again_knows_what_was_clean_and_how_often_the_rest_failed():
    log, _ = log_of()
    log.assign("a", Commit("a", 5, ((6, 8), (9, 10)), ((5, 4), (8, 5))))
    kinds = [log.admit("a", offset, 0) for offset in range(5, 11)]
    given = [one for one in kinds if isinstance(one, OffsetDelivery)]
    assert [(one.offset, one.failures) for one in given] == [(5, 4), (8, 5), (10, 0)]
    assert [one for one in kinds if not isinstance(one, OffsetDelivery)] == [SkipReason.CLEAN] * 3
    assert fail(log, given[1]) is True
    clean(log, given[0])
    assert floors(log) == {"a": 8}


def test_a_lane_that_was_recreated_begins_at_its_own_beginning():
    log, _ = log_of()
    log.assign("a", Commit("a", 5, ((6, 8),), ((5, 4),)))
    assert [admitted(log, offset).failures for offset in range(9)] == [0] * 9


def test_a_lane_whose_head_was_deleted_begins_after_what_is_done():
    log, _ = log_of()
    log.assign("a", Commit("a", 5, ((6, 8), (9, 10)), ((5, 4), (8, 1))))
    assert log.admit("a", 6, 0) is SkipReason.CLEAN
    assert log.take_commits() == [Commit("a", 8, ((9, 10),), ((8, 1),))]


def test_a_failed_offset_that_was_removed_from_the_log_is_forgotten():
    log, _ = log_of()
    log.assign("a", Commit("a", 5, (), ((5, 2), (7, 3), (9, 1))))
    (first,) = (admitted(log, 5),)
    ninth = admitted(log, 9)
    assert (first.failures, ninth.failures) == (2, 1)
    log.offer_again("a")
    assert log.take_commits() == [Commit("a", 5, ((6, 9),), ((5, 2), (9, 1)))]
    clean(log, first, ninth)
    (commit,) = log.take_commits()
    assert commit == Commit("a", 10, (), ())
    assert encode_metadata(commit) == ""


def test_a_failure_of_an_offset_that_the_same_commit_calls_clean_is_ignored():
    log, _ = log_of()
    log.assign("a", Commit("a", 5, ((7, 9),), ((8, 2),)))
    admitted(log, 5)
    log.offer_again("a")
    assert log.take_commits() == [Commit("a", 5, ((7, 9),), ())]


def test_open_offsets_are_bounded_in_number_and_bytes():
    log, (a, _) = log_of(0, 1, max_open=2)
    assert not log.wants("a")
    fail(log, a)
    assert not log.wants("a")
    clean(log, *log.take(10.0))
    assert log.wants("a")
    log, (a,) = log_of(0, max_open_bytes=1)
    log.assign("b")
    assert not log.wants("b")
    log.revoke("a")
    assert log.wants("b")


def test_a_failed_commit_is_repeated_with_the_then_current_state():
    log, (a, b) = log_of(0, 1)
    clean(log, a)
    assert floors(log) == {"a": 1}
    clean(log, b)
    log.offer_again("a")
    assert floors(log) == {"a": 2}
    log.offer_again("a")
    assert floors(log) == {"a": 2}
    log.assign("b")
    log.offer_again("b")
    assert floors(log) == {}


def test_redeliveries_are_taken_up_to_a_limit():
    log, deliveries = log_of(*range(5))
    for delivery in deliveries:
        fail(log, delivery)
    assert [d.offset for d in log.take(10.0, limit=3)] == [0, 1, 2]
    assert [d.offset for d in log.take(10.0, limit=3)] == [3, 4]


def test_a_subscriber_that_left_long_ago_is_forgotten_unless_it_may_have_failed_something():
    log, (held,) = log_of(0, who=("t",))
    for number in range(500):
        log.note_joined(number)
        log.note_left(number)
    assert len(log._absent) == 500, "each of them may have failed the offset that is open"
    clean(log, held)
    late = admitted(log, 1)
    log.note_left("t")
    for number in range(1000, 2500):
        log.note_joined(number)
        log.note_gone(number)
    fail(log, late, 0.0, "t")
    assert not any(number in log._absent for number in range(500))
    assert set(log._absent) == {"t"}
    assert log.take(10.0) == []


def test_the_repr_of_a_delivery_describes_it():
    _, (a,) = log_of(3)
    assert repr(a) == "<Delivery 2 of 'a' at 3, failed 0 times>"


# -- random schedules against a naive model ----------------------------------------------------------------------

SUBSCRIBERS = ("t", "u", "v")
PARTITION = st.lists(st.sampled_from((True, True, False)), min_size=1, max_size=40)


@pytest.mark.parametrize("kind", [RedeliveryVerdict.FAILED, RedeliveryVerdict.UNREAD])
def test_an_offset_that_others_accepted_is_clean_once_all_that_did_not_have_left_permanently(kind):
    log, (first, second) = log_of(0, 1, who=("a", "b"))
    log.note_left("a"), log.note_joined("a")
    log.resolve(first, kind, 0.0, HALF, ("a", "b"), accepted=True)
    log.resolve(second, kind, 0.0, HALF, ("a",), accepted=False)
    log.note_gone("a")
    log.note_gone("a")
    assert log.open == 2
    log.note_gone("b")
    assert log.open == 1
    [commit] = log.take_commits()
    assert commit.floor == 1
    log.note_joined("c")
    assert [again.offset for again in log.take(1000.0)] == [1]


def test_a_failure_by_a_subscriber_that_has_left_permanently_is_clean_if_others_accepted_it():
    log, (delivery,) = log_of(0, who=("a",))
    log.note_gone("a")
    log.resolve(delivery, RedeliveryVerdict.FAILED, 0.0, HALF, ("a",), accepted=True)
    assert log.open == 0


def test_a_permanent_leave_after_a_redelivery_or_a_revoke_changes_nothing():
    log, (delivery, other) = log_of(0, 1, who=("a",))
    log.note_left("a"), log.note_joined("a")
    for one in (delivery, other):
        log.resolve(one, RedeliveryVerdict.FAILED, 0.0, HALF, ("a",), accepted=True)
    [again, _] = log.take(1000.0)
    log.note_gone("a")
    assert log.open == 2
    log.resolve(again, RedeliveryVerdict.CLEAN, 1000.0, HALF)
    assert log.open == 1
    log.note_joined("b")
    log.resolve(admitted(log, 2), RedeliveryVerdict.FAILED, 0.0, HALF, ("b",), accepted=True)
    log.revoke("a")
    log.note_gone("b")
    assert log.open == 0


@dataclass
class World:
    """A partition with holes, its subscribers, a manager that fans out and resolves, and what actually happened."""

    offsets: list[int]
    chance: random.Random
    max_redeliveries: int
    log: Log = field(init=False)
    now: float = 0.0
    position: int = 0
    flying: list[tuple[OffsetDelivery[str, int], frozenset[str], int]] = field(default_factory=list)
    letters: list[OffsetDelivery[str, int]] = field(default_factory=list)
    present: set[str] = field(default_factory=set)
    owed: dict[int, frozenset[str]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    committed: int = 0
    note: str = ""
    crashed: bool = False
    clock: int = 0
    left_at: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    blamed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin with a new log at the committed offsets, as after a crash."""
        limits = RedeliveryLimits(max_redeliveries=self.max_redeliveries, max_open=8)
        self.log = Redelivery(limits)
        past = decode_metadata("a", self.note)
        assert past is None or past.floor == self.committed
        self.log.assign("a", past)
        known = {offset for start, end in (past.clean if past else ()) for offset in range(start, end)}
        self.done = {offset for offset in self.offsets if offset < self.committed or offset in known}
        self.crashed = bool(self.committed or self.note)
        self.position = next((i for i, offset in enumerate(self.offsets) if offset >= self.committed), 10**6)
        self.flying, self.letters, self.owed = [], [], {}
        self.present = set()
        for who in SUBSCRIBERS:
            self.join(who)

    def join(self, who: str) -> None:
        if who not in self.present:
            self.present.add(who)
            self.gone.discard(who)
            self.log.note_joined(who)
            self.forgive(who)

    def forgive(self, who: str) -> None:
        self.owed = {offset: missing - {who} for offset, missing in self.owed.items()}

    def leave(self, who: str, *, for_good: bool) -> None:
        if who in self.present and (len(self.present) > 1 or not for_good):
            self.present.discard(who)
            self.clock += 1
            self.left_at[who] = self.clock
            self.log.note_left(who)
            if for_good:
                self.gone.add(who)
                self.log.note_gone(who)
                self.forgive(who)

    def fan_out(self, delivery: OffsetDelivery[str, int]) -> None:
        assert delivery.offset not in self.done, "what is done is given to nobody again"
        assert self.crashed or delivery.failures <= self.max_redeliveries
        assert not self.owed.get(delivery.offset), "a subscriber that failed it, or left it unread, has not come back"
        self.flying.append((delivery, frozenset(self.present), self.clock))

    def read(self) -> None:
        if self.position < len(self.offsets) and self.log.wants("a"):
            offset = self.offsets[self.position]
            self.position += 1
            match self.log.admit("a", offset, offset, 1):
                case OffsetDelivery() as delivery:
                    self.fan_out(delivery)
                case skip:
                    assert skip is SkipReason.CLEAN
                    assert offset in self.done

    def repeat(self) -> None:
        """Deliver a message that was read before once more."""
        if 0 < self.position < len(self.offsets):
            offset = self.offsets[self.chance.randrange(self.position)]
            if offset >= self.committed and self.log.admit("a", self.offsets[self.position - 1], 0) is SkipReason.STALE:
                assert self.log.admit("a", offset, 0) is SkipReason.STALE

    def resolve(self, kind: str) -> None:
        if not self.flying:
            return
        delivery, members, sent_at = self.flying.pop(self.chance.randrange(len(self.flying)))
        awaited: frozenset[str] = frozenset()
        if not members:
            result = RedeliveryVerdict.UNSEEN
        elif kind == "reject":
            result = RedeliveryVerdict.REJECTED
        elif kind in ("fail", "unread"):
            result = RedeliveryVerdict.FAILED if kind == "fail" else RedeliveryVerdict.UNREAD
            awaited = frozenset(self.chance.sample(sorted(members), self.chance.randint(1, len(members))))
        else:
            result = RedeliveryVerdict.CLEAN
            self.done.add(delivery.offset)
        if result in (RedeliveryVerdict.FAILED, RedeliveryVerdict.REJECTED):
            self.blamed.add(delivery.offset)
        early = self.chance.random() < 0.5
        if early:
            self.end(awaited, sent_at)
        if self.log.resolve(delivery, result, self.now, self.chance.getrandbits(32), awaited):
            assert delivery.offset in self.blamed, "nobody failed or rejected it"
            self.letters.append(delivery)
        if not early:
            self.end(awaited, sent_at)
        self.owed[delivery.offset] = awaited - self.present - self.gone

    def end(self, awaited: frozenset[str], sent_at: int) -> None:
        """End the subscribers that failed an event or left it unread, unless they ended anyway; some return at once."""
        for who in sorted(awaited):
            if self.left_at.get(who, 0) <= sent_at:
                self.leave(who, for_good=False)
                if self.chance.random() < 0.3:
                    self.join(who)

    def letter(self) -> None:
        if self.letters:
            delivery = self.letters.pop(self.chance.randrange(len(self.letters)))
            self.done.add(delivery.offset)
            self.log.note_lettered(delivery)

    def redeliver(self) -> None:
        for delivery in self.log.take(self.now, self.chance.randint(1, 5)):
            self.fan_out(delivery)

    def commit(self) -> None:
        for commit in self.log.take_commits():
            assert commit.floor >= self.committed, "a commit moved back"
            below = {offset for offset in self.offsets if offset < commit.floor}
            assert below <= self.done, "a commit passed what is not done"
            above = {offset for start, end in commit.clean for offset in range(start, end)}
            assert above & set(self.offsets) <= self.done
            assert self.crashed or len(commit.clean) <= self.log.open + 1, "intervals are bounded by what is open"
            decoded = decode_metadata("a", encode_metadata(commit))
            assert decoded == (commit if commit.clean or commit.failures else None), "metadata cannot be decoded"
            if self.chance.random() < 0.2:
                self.log.offer_again("a")
                continue
            self.committed, self.note = commit.floor, encode_metadata(commit)

    def compact(self) -> None:
        """Remove some messages that were not read since the last start, whether or not they have failed before."""
        unread = self.offsets[self.position :]
        self.offsets[self.position :] = [offset for offset in unread if self.chance.random() < 0.7]

    def step(self, kind: str) -> None:
        match kind:
            case "compact":
                self.compact()
            case "read":
                self.read()
            case "repeat":
                self.repeat()
            case "clean" | "fail" | "reject" | "unread":
                self.resolve(kind)
            case "letter":
                self.letter()
            case "redeliver":
                self.redeliver()
            case "commit":
                self.commit()
            case "join":
                self.join(self.chance.choice(SUBSCRIBERS))
            case "leave":
                self.leave(self.chance.choice(SUBSCRIBERS), for_good=self.chance.random() < 0.3)
            case "wait":
                self.now += self.chance.choice((0.1, 3.0, 40.0))
            case "crash":
                self.start()
                if self.chance.random() < 0.5:
                    self.compact()

    def finish(self) -> None:
        """Let every subscriber return and succeed, until nothing is left to do."""
        for _ in range(40 * len(self.offsets) + 200):
            for who in SUBSCRIBERS:
                self.join(who)
            self.now += 31.0
            self.read()
            self.redeliver()
            self.resolve("clean")
            self.letter()
            self.commit()


STEPS = ["read"] * 4 + ["clean"] * 3 + ["fail"] * 2 + ["unread"] * 2 + ["redeliver"] * 2 + ["commit"] * 2
STEPS += ["repeat", "reject", "letter", "join", "join", "leave", "wait", "wait", "compact"]


@settings(max_examples=examples(300))
@given(PARTITION, st.integers(0, 100), st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 300))
def test_no_commit_passes_an_offset_that_is_not_done_and_all_end_clean_or_dead_lettered(
    exists: list[bool], first: int, seed: int, max_redeliveries: int, length: int
) -> None:
    offsets = [first + index for index, there in enumerate(exists) if there]
    world = World(offsets, random.Random(seed), max_redeliveries)
    for _ in range(length):
        world.step("crash" if world.chance.random() < 0.03 else world.chance.choice(STEPS))
    world.finish()
    assert world.done >= set(world.offsets)
    assert world.log.open == 0
    assert world.committed >= (world.offsets[-1] + 1 if world.offsets else 0)


HARMLESS = [step for step in STEPS if step not in ("fail", "reject")]


@settings(max_examples=examples(200))
@given(PARTITION, st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 300))
def test_an_offset_that_nobody_fails_or_rejects_is_never_dead_lettered_and_ends_clean_once_it_is_read(
    exists: list[bool], seed: int, max_redeliveries: int, length: int
) -> None:
    world = World([index for index, there in enumerate(exists) if there], random.Random(seed), max_redeliveries)
    for _ in range(length):
        world.step("crash" if world.chance.random() < 0.03 else world.chance.choice(HARMLESS))
        assert not world.letters
    world.finish()
    assert not world.blamed
    assert world.done >= set(world.offsets)
    assert world.log.open == 0
