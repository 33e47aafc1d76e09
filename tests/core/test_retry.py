"""Retries: how long, how often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.retry import Backoff, GiveUp, Limit, Retry, decide

backoffs = st.builds(Backoff, st.floats(0.001, 10), st.floats(0.001, 1000), st.floats(1, 10, allow_nan=False))
bits = st.integers(0, 2**32 - 1)


@given(backoffs, st.integers(1, 10_000), bits)
def test_a_delay_is_never_negative_and_never_above_its_bound_or_the_maximum(
    backoff: Backoff, attempt: int, random_bits: int
) -> None:
    assert 0 <= backoff.compute_delay(attempt, random_bits) <= backoff.compute_bound(attempt) <= backoff.maximum_seconds


@given(backoffs, st.integers(1, 2000))
def test_bounds_never_shrink(backoff: Backoff, attempt: int) -> None:
    assert backoff.compute_bound(attempt) <= backoff.compute_bound(attempt + 1)


@given(backoffs, st.integers(0, 10), st.integers(1, 20), bits, st.floats(0, 100), st.floats(0, 100))
def test_a_retry_is_within_the_number_and_the_time_that_are_allowed(
    backoff: Backoff, max_retries: int, attempt: int, random_bits: int, elapsed: float, budget: float
) -> None:
    decision = decide(attempt, max_retries, backoff, random_bits, elapsed_seconds=elapsed, budget_seconds=budget)
    match decision:
        case Retry(delay_seconds):
            assert attempt <= max_retries
            assert elapsed + delay_seconds <= budget
        case GiveUp(limit):
            assert (limit is Limit.ATTEMPTS) == (attempt > max_retries)
            if limit is Limit.TIME:
                assert elapsed + backoff.compute_bound(attempt) > budget


def test_the_bound_doubles_up_to_the_maximum() -> None:
    backoff = Backoff(0.2, 30.0)
    assert [backoff.compute_bound(attempt) for attempt in (1, 2, 3, 9, 10_000)] == [0.2, 0.4, 0.8, 30.0, 30.0]


def test_the_jitter_is_full() -> None:
    backoff = Backoff(1.0, 30.0)
    assert backoff.compute_delay(1, 0) == 0.0
    assert backoff.compute_delay(1, 1 << 31) == 0.5


def test_no_attempt_begins_after_the_time_that_is_allowed() -> None:
    backoff = Backoff(1.0, 30.0)
    assert decide(1, 3, backoff, 1 << 31, elapsed_seconds=9.5, budget_seconds=10.0) == Retry(0.5)
    assert decide(1, 3, backoff, 1 << 31, elapsed_seconds=9.6, budget_seconds=10.0) == GiveUp(Limit.TIME)


def test_as_many_attempts_run_as_retries_are_allowed_and_one() -> None:
    backoff = Backoff(0.5, 30.0)
    runs = 1
    while isinstance(decide(runs, 3, backoff, 0), Retry):
        runs += 1
    assert runs == 4
    assert decide(1, 0, backoff, 0) == GiveUp(Limit.ATTEMPTS)
