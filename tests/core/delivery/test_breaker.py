"""The circuit breaker: every path by example, its invariants by random schedules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.delivery.breaker import Breaker, BreakerState

FULL = (1 << 32) - 1


def test_it_opens_after_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker(3, 10.0)
    assert [breaker.note_failure(0.0, 0) for _ in range(2)] == [BreakerState.CLOSED] * 2
    breaker.note_success()
    assert [breaker.note_failure(1.0, 0) for _ in range(2)] == [BreakerState.CLOSED] * 2
    assert breaker.note_failure(2.0, 0) is BreakerState.OPEN
    assert (breaker.opened, breaker.until) == (1, 7.0)


def test_after_the_cool_down_one_probe_decides() -> None:
    breaker = Breaker(1, 10.0)
    breaker.note_failure(0.0, FULL)
    assert breaker.find_state(9.9) is BreakerState.OPEN
    assert breaker.find_state(10.0) is BreakerState.HALF_OPEN
    assert breaker.note_failure(10.0, 0) is BreakerState.OPEN
    assert (breaker.opened, breaker.until) == (1, 15.0)
    breaker.note_success()
    assert (breaker.find_state(11.0), breaker.until) == (BreakerState.CLOSED, None)
    breaker.note_failure(20.0, 0)
    assert breaker.opened == 2


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.floats(0, 5), st.integers(0, FULL)), max_size=60))
def test_one_success_closes_and_cool_downs_are_bounded(failures: int, steps: list[tuple[bool, float, int]]) -> None:
    breaker, now, in_a_row = Breaker(failures, 4.0), 0.0, 0
    for well, seconds, bits in steps:
        now += seconds
        if well:
            breaker.note_success()
            in_a_row = 0
            assert breaker.find_state(now) is BreakerState.CLOSED
        else:
            in_a_row += 1
            state = breaker.note_failure(now, bits)
            assert state is (BreakerState.OPEN if in_a_row >= failures else BreakerState.CLOSED)
            if breaker.until is not None:
                assert now + 2.0 <= breaker.until <= now + 4.0
