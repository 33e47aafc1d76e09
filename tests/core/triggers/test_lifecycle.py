from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.triggers.lifecycle import (
    BACKOFF,
    HEALTHY_SECONDS,
    CancelReason,
    EndVerdict,
    Next,
    Restart,
    TriggerEnding,
    TriggerLife,
)

MOST = (1 << 32) - 1
SHORTEST, LONGEST = BACKOFF.initial_seconds, BACKOFF.maximum_seconds


@pytest.mark.parametrize("restart", [Restart.ON_FAILURE, Restart.NEVER])
def test_a_trigger_that_fired_and_returned_is_finished(restart):
    assert TriggerLife(restart).decide_ended(TriggerEnding.RETURNED, 1, 0.0, 0) == Next(
        EndVerdict.FINISHED, None, from_start=True
    )


def test_with_always_it_runs_again_from_its_beginning_after_a_pause():
    following = TriggerLife(Restart.ALWAYS).decide_ended(TriggerEnding.RETURNED, 3, 5.0, 0)
    assert following == Next(EndVerdict.FINISHED, SHORTEST, from_start=True)


@pytest.mark.parametrize("events", [0, 1])
def test_with_always_a_trigger_that_took_an_event_from_its_stream_and_returned_restarts_at_once(events):
    life = TriggerLife(Restart.ALWAYS)
    life.decide_ended(TriggerEnding.RAISED, 0, 0.0, MOST)
    assert life.decide_ended(TriggerEnding.RETURNED, events, 0.0, MOST, taken=1) == Next(
        EndVerdict.FINISHED, 0.0, from_start=True
    )
    # It worked, so the pauses start over.
    assert life.decide_ended(TriggerEnding.RAISED, events, 0.0, MOST, taken=1).pause_seconds == pytest.approx(SHORTEST)


@pytest.mark.parametrize("restart", [Restart.ON_FAILURE, Restart.NEVER])
def test_without_always_a_trigger_that_took_an_event_and_fired_nothing_has_failed(restart):
    assert TriggerLife(restart).decide_ended(TriggerEnding.RETURNED, 0, 0.0, 0, taken=1).verdict is EndVerdict.FAILED


@pytest.mark.parametrize(
    ("ending", "events"), [(TriggerEnding.RAISED, 0), (TriggerEnding.RAISED, 5), (TriggerEnding.RETURNED, 0)]
)
def test_a_trigger_that_raised_or_fired_nothing_has_failed(ending, events):
    assert TriggerLife(Restart.NEVER).decide_ended(ending, events, 0.0, 0) == Next(EndVerdict.FAILED)
    again = TriggerLife(Restart.ON_FAILURE).decide_ended(ending, events, 0.0, 0)
    assert (again.verdict, again.from_start) == (EndVerdict.FAILED, False)
    assert again.pause_seconds is not None


def test_pauses_grow_to_their_maximum_and_start_over_after_a_long_run():
    life = TriggerLife(Restart.ON_FAILURE)
    pauses = [life.decide_ended(TriggerEnding.RAISED, 0, 0.0, MOST).pause_seconds for _ in range(8)]
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(SHORTEST)
    assert pauses[-1] == pytest.approx(LONGEST)
    assert life.decide_ended(TriggerEnding.RAISED, 0, HEALTHY_SECONDS, MOST).pause_seconds == pytest.approx(SHORTEST)


@pytest.mark.parametrize("restart", list(Restart))
@pytest.mark.parametrize("reason", list(CancelReason))
def test_a_cancelled_trigger_runs_again_only_after_a_timeout(restart, reason):
    following = TriggerLife(restart).decide_cancelled(reason, 0)
    runs_again = reason is CancelReason.TIMEOUT and restart is not Restart.NEVER
    assert (following.pause_seconds is not None) is runs_again
    expected = {CancelReason.TIMEOUT: EndVerdict.FAILED, CancelReason.DONE: EndVerdict.FINISHED}
    assert following.verdict is expected.get(reason, EndVerdict.CANCELLED)


@given(
    st.lists(
        st.tuples(st.sampled_from(TriggerEnding), st.integers(0, 2), st.floats(0, 100), st.integers(0, MOST)),
        min_size=1,
        max_size=20,
    )
)
def test_no_pause_is_shorter_or_longer_than_allowed(runs):
    life = TriggerLife(Restart.ALWAYS)
    for ending, events, seconds, bits in runs:
        pause = life.decide_ended(ending, events, seconds, bits).pause_seconds
        assert pause is not None
        assert SHORTEST <= pause <= LONGEST


@pytest.mark.parametrize("restart", Restart)
def test_one_that_others_have_disturbed_runs_again_after_a_pause_whatever_its_restart(restart: Restart):
    following = TriggerLife(restart).decide_ended(TriggerEnding.DISTURBED, 0, 0.0, 0)
    assert following.verdict is EndVerdict.FAILED
    assert following.pause_seconds == pytest.approx(SHORTEST)
