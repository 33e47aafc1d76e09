"""The queue in front of a sink: every path by example, the invariants by random schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.examples import examples

from tidemill.core.delivery.breaker import BreakerState
from tidemill.core.delivery.culprit import SendFault, find_fault, split_batch
from tidemill.core.delivery.send_items import AskDecision, Decision, GaveUp, Item, ItemsDelivered, SendLimits, WhenOpen
from tidemill.core.delivery.send_queue import SendQueue
from tidemill.core.errors import ConfigError, RemoteError, TargetMissingError
from tidemill.core.retry import Backoff

FULL = (1 << 32) - 1
BUDGET = 100.0


@dataclass(frozen=True)
class Refusal:
    error: str = "no"
    retryable: bool = True
    oversize: bool = False
    waits: bool = False


AGAIN = Refusal()
NEVER = Refusal("never", retryable=False)
WAITS = Refusal("waits", waits=True)


def new_queue(
    count: int = 3,
    size: int = 100,
    linger: float = 0.0,
    *,
    retries: int = 20,
    failures: int = 100,
    when_open: WhenOpen = WhenOpen.HOLD,
) -> SendQueue[str, str]:
    return SendQueue(SendLimits(count, size, linger, BUDGET, Backoff(1.0, 8.0), retries, failures, 4.0, when_open))


def add(
    queue: SendQueue[str, str], *names: str, now: float = 0.0, lane: str = "p", size: int = 1
) -> list[Item[str, str]]:
    """Add items; the first letter is the key, '-' is none."""
    items = [Item(lane, None if name[0] == "-" else name[0], size, name) for name in names]
    queue.add(items, now)
    return items


def names(items: Sequence[Item[str, str]]) -> list[str]:
    return [item.value for item in items]


def test_a_batch_is_sent_at_once_and_items_that_arrive_meanwhile_form_the_next_one() -> None:
    queue = new_queue()
    add(queue, "a1")
    assert queue.due == 0.0
    assert names(queue.take(0.0)) == ["a1"]
    add(queue, "a2", "b1")
    assert queue.take(0.0) == ()
    assert queue.due is None
    assert queue.in_flight
    (effect,) = queue.note_answers([None], 0.0, 0)
    assert isinstance(effect, ItemsDelivered)
    assert names(effect.items) == ["a1"]
    assert names(queue.take(0.0)) == ["a2", "b1"]
    assert queue.outstanding == 2


def test_an_empty_queue_is_never_due() -> None:
    queue = new_queue()
    assert queue.take(0.0) == ()
    assert queue.due is None


def test_batches_are_bounded_by_count_and_bytes_and_one_large_item_goes_alone() -> None:
    queue = new_queue(count=3, size=10)
    add(queue, "a1", "a2", "a3", "a4")
    assert names(queue.take(0.0)) == ["a1", "a2", "a3"]
    queue.note_answers([None] * 3, 0.0, 0)
    add(queue, "b1", size=50)
    add(queue, "b2")
    assert names(queue.take(0.0)) == ["a4"]
    queue.note_answers([None], 0.0, 0)
    assert names(queue.take(0.0)) == ["b1"]
    queue.note_answers([None], 0.0, 0)
    assert names(queue.take(0.0)) == ["b2"]


def test_linger_waits_for_more_unless_the_batch_is_full() -> None:
    queue = new_queue(count=2, linger=5.0)
    add(queue, "a1", now=1.0)
    assert queue.take(2.0) == ()
    assert queue.due == 6.0
    assert names(queue.take(6.0)) == ["a1"]
    queue.note_answers([None], 6.0, 0)
    add(queue, "a2", "a3", now=7.0)
    assert names(queue.take(7.0)) == ["a2", "a3"]


def test_items_of_a_refused_key_wait_while_others_are_sent() -> None:
    queue = new_queue()
    add(queue, "a1", "b1")
    queue.take(0.0)
    add(queue, "a2", "b2", "-1")
    (delivered,) = queue.note_answers([AGAIN, None], 0.0, FULL)
    assert names(delivered.items) == ["b1"]
    assert queue.failing == (0.0, "no")
    assert names(queue.take(0.0)) == ["b2", "-1"]
    queue.note_answers([None, None], 0.5, 0)
    assert queue.take(0.5) == ()
    assert queue.due is not None
    assert 0.9 < queue.due <= 1.0
    add(queue, "a3", now=0.6)
    assert names(queue.take(1.0)) == ["a1"]
    queue.note_answers([None], 1.0, 0)
    assert queue.failing is None
    assert names(queue.take(1.0)) == ["a2", "a3"]


def test_a_probe_that_is_refused_again_waits_longer() -> None:
    queue = new_queue()
    add(queue, "a1")
    now = 0.0
    waits = []
    for _ in range(5):
        assert names(queue.take(now)) == ["a1"]
        assert queue.note_answers([AGAIN], now, FULL) == []
        due = queue.due
        assert due is not None
        waits.append(round(due - now))
        now = due
    assert waits == [1, 2, 4, 8, 8]


def test_items_without_a_key_hold_nothing() -> None:
    queue = new_queue()
    add(queue, "-1", "-2")
    queue.take(0.0)
    queue.note_answers([AGAIN, None], 0.0, FULL)
    add(queue, "-3")
    assert names(queue.take(0.0)) == ["-3"]
    queue.note_answers([None], 0.0, 0)
    assert names(queue.take(1.0)) == ["-1"]


def test_a_failing_sink_pauses_the_whole_queue_and_keeps_its_order() -> None:
    queue = new_queue(count=4)
    add(queue, "-1", "a1", "-2")
    queue.take(0.0)
    add(queue, "-3", "a2")
    assert queue.note_failure("down", True, 0.0, FULL) == []
    assert queue.take(0.5) == ()
    due = queue.due
    assert due is not None
    assert 0.9 < due <= 1.0
    assert names(queue.take(due)) == ["-1", "a1", "-2", "-3"]
    queue.note_failure("down", True, due, FULL)
    second = queue.due
    assert second is not None
    assert round(second - due) == 2
    assert names(queue.take(second)) == ["-1", "a1", "-2", "-3"]
    queue.note_answers([None] * 4, second, 0)
    assert names(queue.take(second)) == ["a2"]


def test_probes_respect_the_bytes_of_a_batch() -> None:
    queue = new_queue(count=4, size=10)
    add(queue, "-1", "-2", size=5)
    queue.take(0.0)
    queue.note_answers([AGAIN, AGAIN], 0.0, FULL)
    add(queue, "-3", size=6)
    assert names(queue.take(0.5)) == ["-3"]
    queue.note_answers([AGAIN], 0.0, FULL)
    assert names(queue.take(1.0)) == ["-1", "-2"]
    assert queue.due is None
    queue.note_answers([None, None], 1.0, 0)
    assert queue.due == 1.0 or queue.due == 0.0
    assert names(queue.take(1.0)) == ["-3"]


def test_an_item_that_cannot_be_retried_needs_a_decision_and_its_key_waits_for_it() -> None:
    queue = new_queue()
    add(queue, "a1", "a2")
    queue.take(0.0)
    (ask,) = queue.note_answers([NEVER, AGAIN], 0.0, FULL)
    assert isinstance(ask, AskDecision)
    assert (names(ask.items), ask.error, ask.attempts, queue.asked) == (["a1"], "never", 1, 1)
    assert queue.take(50.0) == ()
    assert queue.note_decision(ask, Decision.DROP, 50.0, 0) == []
    assert queue.asked == 0
    assert names(queue.take(50.0)) == ["a2"]
    assert queue.outstanding == 1


def test_items_with_the_same_answer_share_one_decision() -> None:
    queue = new_queue()
    add(queue, "-1", "-2", "-3")
    queue.take(0.0)
    first, second = queue.note_answers([NEVER, Refusal("big", False, True), NEVER], 0.0, 0)
    assert isinstance(first, AskDecision)
    assert isinstance(second, AskDecision)
    assert (names(first.items), names(second.items), second.oversize) == (["-1", "-3"], ["-2"], True)


def test_a_decision_to_retry_is_carried_out_within_the_budget_then_given_up() -> None:
    queue = new_queue()
    add(queue, "a1")
    queue.take(0.0)
    (ask,) = queue.note_answers([NEVER], 0.0, 0)
    queue.note_decision(ask, Decision.RETRY, 1.0, 0)
    assert names(queue.take(1.0)) == ["a1"]
    (ask,) = queue.note_answers([NEVER], 2.0, 0)
    queue.note_decision(ask, Decision.RETRY, 3.0, 0)
    assert names(queue.take(3.0)) == ["a1"]
    (ask,) = queue.note_answers([NEVER], 3.0, 0)
    assert ask.attempts == 3
    (effect,) = queue.note_decision(ask, Decision.RETRY, 1.0 + BUDGET, 0)
    assert isinstance(effect, GaveUp)
    assert names(effect.items) == ["a1"]
    assert queue.outstanding == 0


def test_after_the_budget_a_decision_is_needed_and_a_retry_gives_one_more_budget() -> None:
    queue = new_queue()
    add(queue, "a1")
    queue.take(0.0)
    queue.note_answers([AGAIN], 0.0, 0)
    queue.take(BUDGET)
    (ask,) = queue.note_answers([AGAIN], BUDGET, 0)
    assert isinstance(ask, AskDecision)
    assert queue.note_decision(ask, Decision.RETRY, BUDGET, 0) == []
    queue.take(BUDGET)
    assert queue.note_answers([AGAIN], BUDGET, 0) == []
    queue.take(2 * BUDGET)
    (effect,) = queue.note_answers([AGAIN], 2 * BUDGET, 0)
    assert isinstance(effect, GaveUp)
    assert effect.attempts == 4


def test_a_permanent_failure_of_a_sink_needs_a_decision_at_once() -> None:
    queue = new_queue()
    add(queue, "a1", "b1")
    queue.take(0.0)
    (ask,) = queue.note_failure("forbidden", False, 0.0, 0)
    assert (names(ask.items), ask.sink_failed) == (["a1", "b1"], True)
    add(queue, "c1")
    assert names(queue.take(0.0)) == ["c1"]
    (ask,) = queue.note_failure("wrong type", True, 0.0, 0, SendFault.DATA)
    assert (names(ask.items), ask.sink_failed) == (["c1"], False), "the item is at fault, not the sink"


def test_an_item_that_cannot_be_sent_needs_one_decision() -> None:
    queue = new_queue()
    item = Item("p", "a", 1, "a1")
    ask = queue.refuse(item, "cannot be encoded", 5.0)
    assert queue.outstanding == 1
    assert queue.take(5.0) == ()
    (effect,) = queue.note_decision(ask, Decision.RETRY, 5.0, 0)
    assert isinstance(effect, GaveUp)
    assert queue.outstanding == 0


def test_decisions_about_items_behind_the_head_keep_the_order() -> None:
    queue = new_queue(count=5)
    add(queue, "a1", "a2", "a3", "a4")
    queue.take(0.0)
    (ask,) = queue.note_answers([AGAIN, AGAIN, NEVER, AGAIN], 0.0, 0)
    assert names(queue.take(0.0)) == ["a1"]
    queue.note_answers([None], 0.0, 0)
    # a3 still needs a decision, so a2 goes as a probe and a4 waits.
    assert names(queue.take(0.0)) == ["a2"]
    queue.note_answers([None], 0.0, 0)
    assert queue.take(0.0) == ()
    assert queue.due is None
    queue.note_decision(ask, Decision.RETRY, 0.0, 0)
    assert names(queue.take(0.0)) == ["a3"]
    queue.note_answers([None], 0.0, 0)
    assert names(queue.take(0.0)) == ["a4"]


def test_an_item_behind_the_head_that_is_retried_or_dropped_waits_for_its_turn() -> None:
    queue = new_queue(count=5)
    add(queue, "a1", "a2", "a3")
    queue.take(0.0)
    ask2, ask3 = queue.note_answers([AGAIN, NEVER, Refusal("other", False)], 0.0, 0)
    queue.note_decision(ask2, Decision.DROP, 0.0, 0)
    queue.note_decision(ask3, Decision.RETRY, 0.0, 0)
    assert names(queue.take(0.0)) == ["a1"]
    queue.note_answers([None], 0.0, 0)
    assert names(queue.take(0.0)) == ["a3"]


def test_abandoning_a_lane_forgets_its_items_wherever_they_are() -> None:
    queue = new_queue(count=9)
    add(queue, "a1", "b1", "c1", "c2", "d1", "-1", lane="p")
    add(queue, "a2", "c3", "d2", lane="q")
    queue.take(0.0)
    effects = queue.note_answers([AGAIN, None, NEVER, AGAIN, AGAIN, NEVER, AGAIN, NEVER, NEVER], 0.0, FULL)
    add(queue, "e1", lane="p")
    add(queue, "e2", lane="q")
    queue.abandon("p")
    assert queue.outstanding == 4
    assert queue.asked == 2
    assert names(queue.take(0.0)) == ["e2"]
    queue.note_answers([None], 0.0, 0)
    for effect in effects:
        if isinstance(effect, AskDecision):
            queue.note_decision(effect, Decision.DROP, 0.0, 0)
    assert names(queue.take(10.0)) == ["a2"]
    queue.note_answers([None], 10.0, 0)
    queue.take(10.0)
    assert queue.outstanding == 0
    assert list(queue.list_items()) == []


def test_an_asked_item_behind_the_head_can_be_abandoned() -> None:
    queue = new_queue()
    add(queue, "a1", lane="q")
    add(queue, "a2", lane="p")
    queue.take(0.0)
    queue.note_answers([AGAIN, NEVER], 0.0, 0)
    queue.abandon("p")
    add(queue, "a3", lane="q")
    queue.take(0.0)
    queue.note_answers([None], 0.0, 0)
    assert names(queue.take(0.0)) == ["a3"]


def test_abandoned_items_between_others_of_their_key_are_left_out() -> None:
    queue = new_queue(count=5)
    add(queue, "a1", "a2", lane="q")
    add(queue, "a3", lane="p")
    add(queue, "a4", lane="q")
    queue.take(0.0)
    queue.note_answers([AGAIN] * 4, 0.0, 0)
    queue.abandon("p")
    queue.take(0.0)
    queue.note_answers([None], 0.0, 0)
    assert names(queue.take(0.0)) == ["a2", "a4"]


def test_answers_about_an_abandoned_batch_change_nothing() -> None:
    queue = new_queue()
    add(queue, "a1", lane="p")
    add(queue, "b1", lane="q")
    queue.take(0.0)
    queue.abandon("p")
    (delivered,) = queue.note_answers([None, None], 0.0, 0)
    assert names(delivered.items) == ["b1"]
    assert queue.outstanding == 0


def test_abandoning_twice_or_an_unknown_lane_changes_nothing() -> None:
    queue = new_queue()
    add(queue, "a1")
    queue.take(0.0)
    queue.note_answers([NEVER], 0.0, 0)
    queue.abandon("other")
    assert queue.outstanding == 1
    queue.abandon("p")
    queue.abandon("p")
    assert queue.outstanding == 0


# -- what was not tried because of another ------------------------------------------------------------------------


def test_waiting_for_another_item_is_not_a_refusal_and_leaves_the_whole_budget() -> None:
    queue = new_queue(count=4)
    items = add(queue, "a1", "a2", "a3")
    now = 0.0
    while True:
        batch = queue.take(now)
        effects = queue.note_answers([AGAIN, *[WAITS] * (len(batch) - 1)], now, FULL)
        if effects:
            break
        assert queue.due is not None
        now = queue.due
    (ask,) = effects
    assert isinstance(ask, AskDecision)
    assert (names(ask.items), now >= BUDGET) == (["a1"], True)
    assert [(item.attempts, item.deadline) for item in items[1:]] == [(0, None)] * 2
    queue.note_decision(ask, Decision.DROP, now, 0)
    assert names(queue.take(now)) == ["a2", "a3"]
    assert queue.note_answers([AGAIN, WAITS], now, 0) == []
    assert items[1].deadline == now + BUDGET


def test_items_that_wait_without_a_key_are_retried_in_order_with_the_refused_one() -> None:
    queue = new_queue(count=5)
    add(queue, "-1", "-2", "-3")
    queue.take(0.0)
    add(queue, "-4")
    assert queue.note_answers([AGAIN, WAITS, WAITS], 0.0, FULL) == []
    assert names(queue.take(0.0)) == ["-4"]
    queue.note_answers([None], 0.0, 0)
    due = queue.due
    assert due is not None
    assert round(due) == 1
    assert names(queue.take(due)) == ["-1", "-2", "-3"]


def test_a_waiting_item_is_sent_at_once_when_nothing_is_left_to_wait_for() -> None:
    queue = new_queue(count=5, retries=1)
    add(queue, "a1", "a2", "-1", "-2", "a3")
    queue.take(0.0)
    retried, dropped = queue.note_answers([NEVER, None, Refusal("other", False), WAITS, WAITS], 0.0, 0)[1:]
    assert names(queue.take(0.0)) == ["-2"]
    queue.note_answers([None], 0.0, 0)
    queue.note_decision(dropped, Decision.DROP, 0.0, 0)
    queue.note_decision(retried, Decision.RETRY, 0.0, 0)
    add(queue, "a4")
    assert names(queue.take(0.0)) == ["a1"]
    (effect,) = queue.note_answers([NEVER], 0.0, 0)
    assert isinstance(effect, GaveUp)
    assert names(queue.take(0.0)) == ["a3", "a4"]


def test_after_an_item_is_given_up_waiting_items_of_its_key_go_before_later_ones() -> None:
    queue = new_queue(count=5, retries=1)
    add(queue, "a1", "a2", "a3")
    queue.take(0.0)
    first, second = queue.note_answers([NEVER, Refusal("other", False), WAITS], 0.0, 0)
    # The decision about the second leaves it behind the first, so both return to the queue with one retry left.
    queue.note_decision(second, Decision.RETRY, 0.0, 0)
    queue.note_decision(first, Decision.DROP, 0.0, 0)
    assert names(queue.take(0.0)) == ["a2", "a3"]
    add(queue, "a4")
    (effect,) = queue.note_answers([NEVER, WAITS], 0.0, FULL)
    assert isinstance(effect, GaveUp)
    assert names(queue.take(0.0)) == ["a3"]
    queue.note_answers([None], 0.0, 0)
    assert names(queue.take(0.0)) == ["a4"]


def test_an_item_that_waits_for_nothing_is_refused() -> None:
    queue = new_queue()
    item, _ = add(queue, "a1", "-1")
    queue.take(0.0)
    assert queue.note_answers([WAITS, None], 0.0, FULL)[1:] == []
    assert item.attempts == 1
    assert queue.take(0.5) == ()


def test_an_abandoned_item_is_not_waited_for() -> None:
    queue = new_queue()
    add(queue, "a1", lane="p")
    (item,) = add(queue, "a2", lane="q")
    queue.take(0.0)
    queue.abandon("p")
    assert queue.note_answers([AGAIN, WAITS], 0.0, FULL) == []
    assert item.attempts == 0
    assert names(queue.take(0.0)) == ["a2"]


# -- the circuit breaker and the number of tries ------------------------------------------------------------------


def test_failures_in_a_row_open_the_breaker_and_one_item_probes_the_sink() -> None:
    queue = new_queue(count=5, failures=2)
    add(queue, "a1", "b1", "c1", "-1")
    queue.take(0.0)
    queue.note_failure("down", True, 0.0, 0)
    assert queue.find_breaker_state(0.0) is BreakerState.CLOSED
    assert len(queue.take(0.0)) == 4
    queue.note_failure("down", True, 0.0, FULL)
    assert (queue.find_breaker_state(0.0), queue.opened) == (BreakerState.OPEN, 1)
    add(queue, "d1")
    assert queue.take(3.9) == ()
    due = queue.due
    assert due is not None
    assert round(due) == 4
    assert queue.find_breaker_state(due) is BreakerState.HALF_OPEN
    assert names(queue.take(due)) == ["a1"]
    queue.note_failure("down", True, due, 0)
    assert queue.find_breaker_state(due) is BreakerState.OPEN
    again = due + 2.0
    assert names(queue.take(again)) == ["a1"]
    queue.note_answers([None], again, 0)
    assert queue.find_breaker_state(again) is BreakerState.CLOSED
    assert names(queue.take(again)) == ["b1", "c1", "-1", "d1"], "the order is kept"


def test_after_a_refused_probe_another_item_is_the_next_probe() -> None:
    queue = new_queue(count=5, failures=1)
    add(queue, "a1", "b1")
    queue.take(0.0)
    queue.note_answers([AGAIN, AGAIN], 0.0, 0)
    now = 2.0
    for _ in range(4):
        probe = queue.take(now)
        if names(probe) == ["b1"]:
            break
        queue.note_answers([AGAIN], now, FULL >> 1)
        now += 3.0
    assert names(probe) == ["b1"]


def test_refusals_of_everything_new_count_as_failures_of_the_sink() -> None:
    queue = new_queue(failures=2)
    for name in ("a1", "b1"):
        add(queue, name)
        queue.take(0.0)
        queue.note_answers([AGAIN], 0.0, FULL)
    assert queue.find_breaker_state(0.0) is BreakerState.OPEN


def test_repeated_refusals_of_one_item_do_not_open_the_breaker() -> None:
    queue = new_queue(failures=2)
    add(queue, "a1")
    now = 0.0
    for _ in range(5):
        assert names(queue.take(now)) == ["a1"]
        queue.note_answers([AGAIN], now, FULL)
        assert queue.due is not None
        now = queue.due
    assert queue.find_breaker_state(now) is BreakerState.CLOSED


def test_items_that_only_waited_prove_nothing_about_the_sink() -> None:
    queue = new_queue(failures=2)
    add(queue, "a1", "-1")
    queue.take(0.0)
    queue.note_answers([AGAIN, WAITS], 0.0, FULL)
    queue.take(1.0)
    queue.note_answers([AGAIN, WAITS], 1.0, FULL)
    assert queue.find_breaker_state(1.0) is BreakerState.CLOSED
    add(queue, "b1", now=1.0)
    queue.take(1.0)
    queue.note_answers([AGAIN], 1.0, FULL)
    assert queue.find_breaker_state(1.0) is BreakerState.OPEN


def test_a_sink_that_fails_at_the_item_that_all_wait_for_opens_the_breaker_and_counts_only_that_item() -> None:
    queue = new_queue(count=4, failures=3)
    items = add(queue, "a1", "a2", "a3")
    queue.take(0.0)
    queue.note_answers([AGAIN, WAITS, WAITS], 0.0, 0)
    for now in (1.0, 10.0):
        assert names(queue.take(now)) == ["a1"]
        queue.note_failure("down", True, now, 0)
    assert queue.find_breaker_state(10.0) is BreakerState.OPEN
    assert [item.attempts for item in items] == [3, 0, 0]
    assert names(queue.take(20.0)) == ["a1"]
    queue.note_answers([None], 20.0, 0)
    assert names(queue.take(20.0)) == ["a2", "a3"]


def test_a_definite_refusal_shows_that_the_sink_works() -> None:
    queue = new_queue(failures=1)
    add(queue, "a1")
    queue.take(0.0)
    queue.note_failure("down", True, 0.0, 0)
    queue.take(2.0)
    queue.note_answers([NEVER], 2.0, 0)
    assert queue.find_breaker_state(2.0) is BreakerState.CLOSED
    add(queue, "b1", "c1", now=2.0)
    queue.take(2.0)
    queue.note_failure("down", True, 2.0, 0)
    queue.take(4.0)
    queue.note_failure("forbidden", False, 4.0, 0)
    assert queue.find_breaker_state(4.0) is BreakerState.CLOSED


def test_an_open_breaker_can_give_up_what_waits() -> None:
    queue = new_queue(count=5, failures=1, when_open=WhenOpen.GIVE_UP)
    add(queue, "a1", "b1")
    queue.take(0.0)
    queue.note_answers([NEVER, None], 0.0, 0)
    add(queue, "c1", "a2")
    queue.take(0.0)
    add(queue, "d1")
    (effect,) = queue.note_failure("down", True, 0.0, 0)
    assert isinstance(effect, GaveUp)
    assert (names(effect.items), effect.error, effect.attempts) == (["c1", "a2", "d1"], "down", 1)
    assert (queue.outstanding, queue.asked) == (1, 1), "an item that awaits a decision is not given up"
    add(queue, "e1", now=1.0)
    (effect,) = queue.shed(1.0)
    assert isinstance(effect, GaveUp)
    assert (names(effect.items), effect.attempts) == (["e1"], 0)
    assert queue.shed(1.0) == []
    add(queue, "f1", "g1", now=2.0)
    assert queue.shed(2.0) == []
    assert names(queue.take(2.0)) == ["f1"]
    queue.note_answers([None], 2.0, 0)
    assert names(queue.take(2.0)) == ["g1"]


def test_a_breaker_opened_by_refusals_gives_up_too() -> None:
    queue = new_queue(failures=1, when_open=WhenOpen.GIVE_UP)
    add(queue, "a1")
    queue.take(0.0)
    (effect,) = queue.note_answers([AGAIN], 0.0, 0)
    assert isinstance(effect, GaveUp)
    assert effect.error == "no"
    assert queue.outstanding == 0


def test_after_a_decision_to_retry_an_item_is_tried_max_retries_times_then_given_up() -> None:
    queue = new_queue(retries=2)
    add(queue, "a1")
    queue.take(0.0)
    (ask,) = queue.note_answers([NEVER], 0.0, 0)
    for _ in range(2):
        queue.note_decision(ask, Decision.RETRY, 0.0, 0)
        assert names(queue.take(0.0)) == ["a1"]
        (ask,) = queue.note_answers([NEVER], 0.0, 0)
    assert isinstance(ask, GaveUp)
    assert (names(ask.items), ask.attempts) == (["a1"], 3)


def test_retryable_refusals_count_against_max_retries_too() -> None:
    queue = new_queue(retries=2)
    add(queue, "a1")
    queue.take(0.0)
    (ask,) = queue.note_answers([NEVER], 0.0, 0)
    queue.note_decision(ask, Decision.RETRY, 0.0, 0)
    queue.take(0.0)
    assert queue.note_answers([AGAIN], 0.0, 0) == []
    queue.take(0.0)
    (effect,) = queue.note_answers([AGAIN], 0.0, 0)
    assert isinstance(effect, GaveUp)


# -- a sink that raises -------------------------------------------------------------------------------------------


class Raising:
    """A sink that writes items one by one and raises at some, behind a queue whose decision is always to drop."""

    def __init__(self, queue: SendQueue[str, str], *bad: str, fault: SendFault) -> None:
        self.queue = queue
        self.bad = bad
        self.fault = fault
        self.now = 0.0
        self.down = False
        self.written: Counter[str] = Counter()
        self.delivered: list[str] = []
        self.asked: list[str] = []
        self.sent: list[list[str]] = []

    def run(self, until: float = 60.0) -> None:
        while (due := self.queue.due) is not None and due <= until:
            self.now = max(self.now, due)
            self.call()

    def call(self) -> None:
        batch = self.queue.take(self.now)
        if not batch:
            return
        self.sent.append(names(batch))
        for item in batch:
            if self.down or item.value in self.bad:
                self.effects(self.queue.note_failure("raised", True, self.now, FULL, self.fault))
                return
            self.written[item.value] += 1
        self.effects(self.queue.note_answers([None] * len(batch), self.now, FULL))

    def effects(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            if isinstance(effect, ItemsDelivered):
                self.delivered += names(effect.items)
            else:
                self.asked += names(effect.items)
                if isinstance(effect, AskDecision):
                    self.queue.note_decision(effect, Decision.DROP, self.now, 0)


def test_an_exception_shows_whether_the_sink_or_a_payload_may_be_at_fault() -> None:
    wrong = [TypeError(), ValueError(), KeyError(), IndexError(), AttributeError(), OverflowError(), UnicodeError()]
    assert {find_fault(each) for each in wrong} == {SendFault.DATA}
    assert {find_fault(each) for each in (OSError(), RuntimeError(), TimeoutError())} == {SendFault.UNKNOWN}
    assert find_fault(TargetMissingError("no folder")) is SendFault.TARGET
    assert find_fault(ExceptionGroup("tasks", [ValueError(), ExceptionGroup("more", [KeyError()])])) is SendFault.DATA
    assert find_fault(ExceptionGroup("tasks", [ValueError(), OSError()])) is SendFault.UNKNOWN
    assert {find_fault(each) for each in (RemoteError("down"), ConfigError("not connected"))} == {SendFault.SINK}
    assert [list(part) for part in split_batch([1, 2], is_part=False)] == [[1], [2]]


@pytest.mark.parametrize("fault", [SendFault.DATA, SendFault.UNKNOWN])
@pytest.mark.parametrize("at", [0, 1, 6, 7, 24, 48, 49])
def test_the_item_at_which_a_sink_raises_is_found_and_nothing_else_is_written_more_than_three_times(
    fault: SendFault, at: int
) -> None:
    queue = new_queue(count=50)
    add(queue, *(f"-{n}" for n in range(50)))
    sink = Raising(queue, f"-{at}", fault=fault)
    sink.run()
    assert sink.asked == [f"-{at}"]
    assert sorted(sink.delivered) == sorted(f"-{n}" for n in range(50) if n != at)
    assert max(sink.written.values()) <= 3
    assert len(sink.sent) <= 18
    assert sink.now <= 1.0, "an innocent waited longer than one backoff"
    assert queue.opened == 0
    assert queue.outstanding == 0


@pytest.mark.parametrize("fault", [SendFault.DATA, SendFault.UNKNOWN])
def test_the_order_of_a_key_is_kept_while_the_culprit_is_sought(fault: SendFault) -> None:
    queue = new_queue(count=30)
    add(queue, *(f"{'abc'[n % 3]}{n}" for n in range(30)))
    sink = Raising(queue, "a0", "a9", "b10", fault=fault)
    sink.call()
    add(queue, "a30", "b31", now=0.0)
    sink.run()
    assert sorted(sink.asked) == ["a0", "a9", "b10"]
    for key in "abc":
        numbers = [int(name[1:]) for name in sink.delivered if name[0] == key]
        assert numbers == sorted(numbers)
    assert len(sink.delivered) == 29


def test_after_a_decision_while_parts_are_left_waiting_items_go_first() -> None:
    queue = new_queue(count=4)
    add(queue, "a1", "a2", "b1", "a3")
    queue.take(0.0)
    assert queue.note_failure("raised", True, 0.0, 0, SendFault.DATA) == []
    assert names(queue.take(0.0)) == ["a1", "a2"]
    queue.note_failure("raised", True, 0.0, 0, SendFault.DATA)
    assert names(queue.take(0.0)) == ["a1"]
    (ask,) = queue.note_failure("raised", True, 0.0, 0, SendFault.DATA)
    assert isinstance(ask, AskDecision)
    assert names(queue.take(0.0)) == ["b1"], "a2 and a3 wait for the decision"
    queue.note_failure("raised", True, 0.0, 0, SendFault.SINK)
    queue.note_decision(ask, Decision.DROP, 0.0, 0)
    order: list[str] = []
    while queue.due is not None:
        batch = queue.take(queue.due)
        order += names(batch)
        queue.note_answers([None] * len(batch), 0.0, 0)
    assert [name for name in order if name[0] == "a"] == ["a2", "a3"]
    assert sorted(order) == ["a2", "a3", "b1"]


def test_items_that_waited_for_a_decision_go_before_the_remaining_parts() -> None:
    queue = new_queue(count=9)
    add(queue, "a1", "a2", "b1", "b2", "b3", "b4", "a3", "a4", "b5")
    queue.take(0.0)
    queue.note_failure("raised", True, 0.0, 0, SendFault.DATA)
    assert names(queue.take(0.0)) == ["a1", "a2", "b1"]
    (ask,) = queue.note_answers([NEVER, WAITS, None], 0.0, 0)[1:]
    queue.note_decision(ask, Decision.DROP, 0.0, 0)
    assert names(queue.take(0.0)) == ["a2"]
    queue.note_answers([None], 0.0, 0)
    assert names(queue.take(0.0)) == ["b2", "b3", "b4"]
    queue.note_answers([None] * 3, 0.0, 0)
    assert names(queue.take(0.0)) == ["a3", "a4", "b5"]


def test_a_sink_that_raises_at_every_item_has_failed_and_no_item_is_blamed() -> None:
    queue = new_queue(count=20, failures=5)
    items = add(queue, *(f"-{n}" for n in range(20)))
    sink = Raising(queue, fault=SendFault.UNKNOWN)
    sink.down = True
    sink.run(BUDGET / 2)
    assert queue.opened == 1
    assert (sink.asked, sink.delivered) == ([], [])
    assert all(item.attempts >= 1 and item.deadline is not None for item in items), "the budget of each began"
    sink.down = False
    sink.run()
    assert sorted(sink.delivered) == sorted(item.value for item in items)
    assert sink.asked == []


def test_if_the_sink_fails_while_a_culprit_is_sought_no_other_item_is_blamed() -> None:
    queue = new_queue(count=20, failures=5)
    add(queue, *(f"-{n}" for n in range(20)))
    sink = Raising(queue, "-9", fault=SendFault.UNKNOWN)
    for _ in range(3):
        sink.call()
    assert sink.delivered
    sink.down = True
    sink.run(BUDGET / 4)
    sink.down = False
    sink.run()
    assert sink.asked == ["-9"]
    assert len(sink.delivered) == 19


def test_a_lone_item_at_which_the_sink_raises_waits_until_another_delivery_shows_that_the_sink_works() -> None:
    queue = new_queue()
    add(queue, "a1")
    sink = Raising(queue, "a1", fault=SendFault.UNKNOWN)
    sink.run(3.0)
    assert sink.asked == []
    add(queue, "b1", now=sink.now)
    sink.run(20.0)
    assert (sink.asked, sink.delivered) == (["a1"], ["b1"])


def test_many_bad_items_are_not_mistaken_for_a_failing_sink() -> None:
    queue = new_queue(count=40, failures=5)
    add(queue, *(f"-{n}" for n in range(40)))
    bad = [f"-{n}" for n in range(40) if n % 2 == 0 or n < 8]
    sink = Raising(queue, *bad, fault=SendFault.UNKNOWN)
    sink.run(BUDGET * 0.9)
    assert sorted(sink.asked) == sorted(bad)
    assert len(sink.delivered) == 40 - len(bad)


def test_bad_data_does_not_count_as_a_failure_of_the_sink() -> None:
    queue = new_queue(failures=1)
    add(queue, "a1")
    queue.take(0.0)
    queue.note_failure("down", True, 0.0, FULL)
    assert queue.take(4.0)
    (ask,) = queue.note_failure("raised", True, 4.0, 0, SendFault.DATA)
    assert isinstance(ask, AskDecision)
    assert queue.find_breaker_state(4.0) is BreakerState.HALF_OPEN
    add(queue, "b1", "c1", now=4.0)
    assert names(queue.take(4.0)) == ["b1"]


def test_while_the_breaker_is_open_parts_go_one_by_one() -> None:
    queue = new_queue(count=9, failures=1)
    add(queue, *(f"-{n}" for n in range(9)))
    queue.take(0.0)
    queue.note_failure("raised", True, 0.0, 0, SendFault.UNKNOWN)
    assert len(queue.take(0.0)) == 3
    queue.note_failure("down", True, 0.0, 0)
    assert queue.opened == 1
    assert queue.take(1.0) == ()
    assert names(queue.take(10.0)) == ["-3"]
    queue.note_answers([None], 10.0, 0)
    assert names(queue.take(10.0)) == ["-4", "-5"]


def test_parts_respect_the_bytes_of_a_batch() -> None:
    queue = new_queue(count=9, size=4)
    add(queue, "a0", "b1", "b2", size=1)
    queue.take(0.0)
    add(queue, "a3", "a4", "a5", size=2)
    (ask,) = queue.note_answers([NEVER, None, None], 0.0, 0)[1:]
    add(queue, "c6", "c7")
    assert names(queue.take(0.0)) == ["c6", "c7"]
    queue.note_failure("raised", True, 0.0, 0, SendFault.DATA)
    queue.note_decision(ask, Decision.DROP, 0.0, 0)
    assert names(queue.take(0.0)) == ["a3", "a4"]
    queue.note_answers([None, None], 0.0, 0)
    assert names(queue.take(0.0)) == ["a5"]


def test_an_item_whose_call_raised_is_sent_alone_after_a_decision_to_retry_it() -> None:
    queue = new_queue(count=9)
    add(queue, "a1", "b1")
    queue.take(0.0)
    queue.note_answers([AGAIN, AGAIN], 0.0, FULL)
    add(queue, "c1")
    queue.take(0.0)
    (ask,) = queue.note_failure("raised", True, 0.0, 0, SendFault.DATA)
    queue.note_decision(ask, Decision.RETRY, 0.0, 0)
    assert names(queue.take(9.0)) == ["a1", "b1"]
    queue.note_answers([None, None], 9.0, 0)
    add(queue, "d1", now=9.0)
    assert names(queue.take(9.0)) == ["c1"]


@pytest.mark.parametrize("when_open", WhenOpen)
def test_while_the_place_that_a_sink_writes_to_is_missing_everything_waits_and_nothing_is_counted(
    when_open: WhenOpen,
) -> None:
    queue = new_queue(count=4, failures=1, when_open=when_open)
    items = add(queue, "a1", "-1", "a2")
    now = 0.0
    pauses = []
    while now < 10 * BUDGET:
        assert names(queue.take(now)) in (["a1", "-1", "a2"], ["a1", "-1"])
        assert queue.note_failure("no folder", True, now, FULL, SendFault.TARGET) == []
        assert queue.shed(now) == []
        assert queue.due is not None
        pauses.append(round(queue.due - now))
        now = queue.due
    assert pauses[:4] == [1, 2, 4, 8]
    assert (queue.opened, queue.failing, queue.outstanding) == (0, (0.0, "no folder"), 3)
    assert [(item.attempts, item.deadline) for item in items] == [(0, None)] * 3
    order: list[str] = []
    while queue.due is not None:
        batch = queue.take(queue.due)
        order += names(batch)
        queue.note_answers([None] * len(batch), now, 0)
    assert sorted(order) == ["-1", "a1", "a2"]
    assert order.index("a1") < order.index("a2")
    assert queue.failing is None


def test_parts_are_forgotten_with_their_lane_or_shed_by_an_open_breaker() -> None:
    for when_open in WhenOpen:
        queue = new_queue(count=9, failures=1, when_open=when_open)
        add(queue, "a1", "a2", lane="p")
        add(queue, "b1", "b2", lane="q")
        queue.take(0.0)
        queue.note_failure("raised", True, 0.0, 0, SendFault.UNKNOWN)
        queue.abandon("p")
        assert queue.outstanding == 2
        assert names(queue.take(0.0)) == ["b1", "b2"]
        queue.abandon("p")
        effects = queue.note_failure("down", True, 0.0, 0)
        assert [names(effect.items) for effect in effects] == ([["b1", "b2"]] if when_open is WhenOpen.GIVE_UP else [])


# -- random schedules -----------------------------------------------------------------------------------------

WORDS = {"ok": None, "again": AGAIN, "never": NEVER, "big": Refusal("big", False, True), "waits": WAITS}
ANSWERS = st.sampled_from(["ok", "again", *WORDS])
STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("aab-"), st.sampled_from("ppq"), st.integers(1, 60), st.integers(1, 4)),
    st.tuples(st.just("answer"), st.lists(ANSWERS, max_size=6)),
    st.tuples(st.just("fail"), st.booleans()),
    st.tuples(st.just("raise"), st.sampled_from([SendFault.DATA, SendFault.UNKNOWN, SendFault.TARGET])),
    st.tuples(st.just("decide"), st.integers(0, 5), st.sampled_from(Decision)),
    st.tuples(st.just("time"), st.sampled_from([0.5, 3.0, BUDGET])),
    st.tuples(st.just("abandon"), st.sampled_from("pq")),
    st.tuples(st.just("refuse"), st.sampled_from("ab")),
)


class Schedule:
    """Drives a queue and checks the invariants at every step."""

    def __init__(self, when_open: WhenOpen) -> None:
        self.when_open = when_open
        self.queue = new_queue(count=4, retries=3, failures=2, when_open=when_open)
        self.now = 0.0
        self.items: list[Item[str, str]] = []
        self.ended: dict[int, str] = {}
        self.delivered: dict[Any, list[int]] = {}
        # How often the sink refused an item, and when it did so first.
        self.tries: Counter[int] = Counter()
        self.first: dict[int, float] = {}
        self.asks: list[AskDecision[str, str]] = []
        self.batch: list[Item[str, str]] = []

    def end(self, item: Item[str, str], how: str) -> None:
        assert item.number not in self.ended, f"{item.value} ended twice: {self.ended[item.number]}, {how}"
        self.ended[item.number] = how

    def effects(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            if isinstance(effect, AskDecision):
                self.asks.append(effect)
                for item in effect.items:
                    assert item.attempts >= 1, "what was never tried is asked about"
                    assert effect.error != "no" or self.now >= self.first[item.number] + BUDGET or item.extended
                continue
            for item in effect.items:
                self.end(item, type(effect).__name__)
                if isinstance(effect, ItemsDelivered) and item.key is not None:
                    order = self.delivered.setdefault(item.key, [])
                    assert not order or order[-1] < item.number, "a key was delivered out of order"
                    order.append(item.number)

    def take(self) -> None:
        self.effects(self.queue.shed(self.now))
        state = self.queue.find_breaker_state(self.now)
        batch = self.queue.take(self.now)
        if batch:
            assert not self.batch, "two batches in flight"
            assert len(batch) <= {BreakerState.CLOSED: 4, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 0}[state]
            self.batch = list(batch)

    def answer(self, script: list[str]) -> None:
        """Answer in order; like a sink that keeps order, refuse items that follow a refusal of their key."""
        answers: list[Refusal | None] = []
        refused: set[Any] = set()
        refusals = False
        for index, item in enumerate(self.batch):
            word = script[index] if index < len(script) else "ok"
            answer = WORDS[word]
            if item.key in refused and answer is None:
                answer = WAITS
            if answer is not None and item.key is not None:
                refused.add(item.key)
            if answer is not None and not (answer.waits and refusals):
                self.tried(item)
            refusals = refusals or answer is not None or item.gone
            answers.append(answer)
        self.batch = []
        self.effects(self.queue.note_answers(answers, self.now, FULL))

    def tried(self, item: Item[str, str], *, ended: bool = False) -> None:
        if ended or not item.gone:
            self.tries[item.number] += 1
            self.first.setdefault(item.number, self.now)

    def raised(self, fault: SendFault) -> None:
        """Raise: for one item it is a refusal; for several it counts once the sink is found to have failed."""
        batch, self.batch = self.batch, []
        before = {item.number: item.attempts for item in self.items}
        effects = self.queue.note_failure("raised", True, self.now, FULL, fault)
        if len(batch) > 1 or fault is SendFault.TARGET:
            assert effects == []
            assert all(item.attempts == before[item.number] for item in batch)
        self.caught_up(before, batch)
        self.effects(effects)

    def caught_up(self, before: dict[int, int], batch: list[Item[str, str]]) -> None:
        """Count what a failure of the sink counts: one refusal for each item of parts that was not tried alone."""
        for item in self.items:
            if item.attempts != before[item.number]:
                assert item.attempts == before[item.number] + 1
                assert item in batch or (before[item.number] == 0 and item.doubted_at is not None)
                self.tried(item, ended=True)

    def decide(self, ask: AskDecision[str, str], decision: Decision) -> None:
        if decision is Decision.DROP:
            for item in ask.items:
                if not item.gone:
                    self.end(item, "dropped")
        self.effects(self.queue.note_decision(ask, decision, self.now, FULL))

    def step(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("add", key, lane, size, count):
                first = len(self.items)
                new = [Item(lane, None if key == "-" else key, size, f"{key}{first + n}") for n in range(count)]
                self.items += new
                self.queue.add(new, self.now)
            case ("refuse", key):
                item = Item("p", key, 1, f"{key}{len(self.items)}")
                self.items.append(item)
                self.asks.append(self.queue.refuse(item, "bad", self.now))
                self.tried(item)
            case ("answer", script) if self.batch:
                self.answer(script)
            case ("fail", retryable) if self.batch:
                batch, self.batch = self.batch, []
                before = {item.number: item.attempts for item in self.items}
                effects = self.queue.note_failure("down", retryable, self.now, FULL)
                self.caught_up(before, batch)
                self.effects(effects)
            case ("raise", fault) if self.batch:
                self.raised(fault)
            case ("decide", index, decision) if self.asks:
                self.decide(self.asks.pop(index % len(self.asks)), decision)
            case ("time", seconds):
                self.now += seconds
            case ("abandon", lane):
                for item in self.items:
                    if item.lane == lane and item.number not in self.ended:
                        self.end(item, "abandoned")
                self.queue.abandon(lane)
        self.take()
        self.check()

    def check(self) -> None:
        open_items = len(self.items) - len(self.ended)
        assert self.queue.outstanding == open_items
        assert all(item.attempts == self.tries[item.number] for item in self.items), "tries are not those of the sink"
        assert all((item.deadline is None) is (self.tries[item.number] == 0) for item in self.items)
        if self.when_open is WhenOpen.GIVE_UP and self.queue.find_breaker_state(self.now) is BreakerState.OPEN:
            assert open_items == self.queue.asked, "something waits for an open breaker"
        if open_items and not self.batch and not any(not item.gone for ask in self.asks for item in ask.items):
            assert self.queue.due is not None, "something is left that nobody will ever send"

    def finish(self) -> None:
        for _ in range(4 * len(self.items) + 20):
            while self.asks:
                self.decide(self.asks.pop(), Decision.DROP)
            self.take()
            if self.batch:
                self.answer([])
            self.now += 10.0
        assert sorted(self.ended) == [item.number for item in self.items]
        assert list(self.queue.list_items()) == []
        assert not self.queue._holds


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(STEPS, max_size=80), st.sampled_from(WhenOpen))
def test_every_item_ends_once_and_keys_stay_in_order(steps: list[tuple[Any, ...]], when_open: WhenOpen) -> None:
    schedule = Schedule(when_open)
    for step in steps:
        schedule.step(step)
    schedule.finish()


def test_memory_is_proportional_to_what_is_outstanding() -> None:
    queue = new_queue(count=50, size=10_000)
    for number in range(20_000):
        add(queue, f"{'abcdef'[number % 6]}{number}")
        if number % 25 == 24:
            batch = queue.take(0.0)
            if batch:
                queue.note_answers(
                    [AGAIN if number % 1000 == 999 and i == 0 else None for i in range(len(batch))], 0.0, 0
                )
            assert len(set(queue.list_items())) == queue.outstanding
            assert queue.outstanding < 200
