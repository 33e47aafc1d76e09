"""Which triggers of deferred tasks a triggerer runs and stops, and what their ends mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.tasks.inputs import TriggerStopReason
from tidemill.core.triggers.event_plan import Duplicate, EventRefusal, EventRefused, EventStored
from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.core.triggers.task_triggers import HAND_OVER, ClaimKey, TaskEnd, TaskTriggers, decide_end, find_reason

KEYS = st.builds(ClaimKey, st.integers(1, 6), st.integers(1, 3))
REASONS = st.sampled_from(CancelReason)
OUTCOMES = st.one_of(
    st.builds(EventStored, st.just(0)),
    st.builds(Duplicate, st.just(0)),
    st.builds(EventRefused, st.sampled_from(EventRefusal)),
)


@pytest.mark.parametrize(
    ("reason", "outcome", "end"),
    [
        (None, EventStored(0), TaskEnd.RESUMED),
        (None, Duplicate(0), TaskEnd.RESUMED),
        (CancelReason.USER, EventStored(0), TaskEnd.RESUMED),
        (None, None, TaskEnd.FAILED),
        (None, EventRefused(EventRefusal.CONTENT), TaskEnd.FAILED),
        (None, EventRefused(EventRefusal.FENCED), TaskEnd.GIVEN_UP),
        (None, EventRefused(EventRefusal.UNKNOWN_TRIGGER), TaskEnd.GIVEN_UP),
        (CancelReason.USER, EventRefused(EventRefusal.CONTENT), TaskEnd.KILLED),
        (CancelReason.USER, None, TaskEnd.KILLED),
        (CancelReason.TIMEOUT, None, TaskEnd.STOPPED),
        (CancelReason.DONE, None, TaskEnd.STOPPED),
        (CancelReason.HAND_OVER, None, TaskEnd.GIVEN_UP),
        (CancelReason.SHUTDOWN, None, TaskEnd.GIVEN_UP),
    ],
)
def test_the_end_of_a_trigger_means_what_became_of_its_event_then_why_it_was_cancelled(reason, outcome, end):
    assert decide_end(reason, outcome) is end


@given(st.none() | REASONS, st.none() | OUTCOMES)
def test_only_a_user_has_something_killed_and_only_an_end_by_itself_fails_a_task(reason, outcome):
    end = decide_end(reason, outcome)

    assert (end is TaskEnd.KILLED) <= (reason is CancelReason.USER)
    assert (end is TaskEnd.FAILED) <= (reason is None and not isinstance(outcome, EventStored | Duplicate))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (TriggerStopReason.DONE, CancelReason.DONE),
        (TriggerStopReason.FAILED, CancelReason.DONE),
        (TriggerStopReason.TIMEOUT, CancelReason.TIMEOUT),
        (TriggerStopReason.USER, CancelReason.USER),
        (HAND_OVER, CancelReason.HAND_OVER),
        ("something new", CancelReason.HAND_OVER),
    ],
)
def test_the_word_of_the_store_says_why_a_trigger_is_cancelled(said, reason):
    assert find_reason(said) is reason


def test_an_answer_that_comes_twice_starts_nothing_twice_even_if_it_has_ended_meanwhile():
    triggers = TaskTriggers(10)
    answer = [ClaimKey(1, 1), ClaimKey(2, 1)]
    triggers.note_claimed(answer)
    triggers.note_ended(ClaimKey(1, 1))

    assert triggers.note_claimed(answer) == []
    assert triggers.held == [ClaimKey(2, 1)]


def test_a_trigger_that_was_claimed_again_is_another_one():
    triggers = TaskTriggers(10)
    triggers.note_claimed([ClaimKey(1, 1)])

    assert triggers.note_claimed([ClaimKey(1, 2)]) == [ClaimKey(1, 2)]


def test_one_that_is_told_to_stop_keeps_its_place_until_it_has_ended():
    triggers = TaskTriggers(1)
    key = ClaimKey(1, 1)
    triggers.note_claimed([key])

    assert triggers.note_stops([(key, "user"), (key, "timeout")]) == [(key, CancelReason.USER)]
    assert triggers.note_stops([(key, "timeout"), (ClaimKey(9, 9), "user")]) == []
    assert (triggers.held, triggers.running, triggers.room, triggers.is_idle) == ([], 0, 0, False)

    triggers.note_ended(key)
    assert (triggers.room, triggers.is_idle) == (1, True)


def test_the_triggers_of_a_stream_that_fits_nowhere_exceed_its_capacity():
    triggers = TaskTriggers(1)
    triggers.note_claimed([ClaimKey(1, 1)])
    assert (triggers.count, triggers.is_over) == (1, False)

    triggers.note_claimed([ClaimKey(2, 1), ClaimKey(3, 1)])
    assert (triggers.count, triggers.is_over, triggers.room) == (3, True, 0)


@given(st.integers(0, 5), st.lists(st.tuples(st.sampled_from(["claim", "repeat", "stop", "end"]), st.lists(KEYS))))
def test_whatever_happens_each_claim_starts_once_and_stops_once(capacity, steps):
    triggers = TaskTriggers(capacity)
    given_before: set[ClaimKey] = set()
    last: list[ClaimKey] = []
    started: list[ClaimKey] = []
    stopped: list[ClaimKey] = []
    for step, keys in steps:
        if step == "claim":
            # The store gives a token once, and no more than there is room.
            last = [key for key in dict.fromkeys(keys) if key not in given_before][: triggers.room]
            given_before.update(last)
            started += triggers.note_claimed(last)
        elif step == "repeat":
            started += triggers.note_claimed(last)
        elif step == "stop":
            stopped += [key for key, _ in triggers.note_stops([(key, "user") for key in keys])]
        else:
            for key in keys:
                triggers.note_ended(key)
        assert len(triggers.held) <= capacity - triggers.room

    assert sorted(started) == sorted(given_before)
    assert len(stopped) == len(set(stopped))
    assert set(stopped) <= given_before
