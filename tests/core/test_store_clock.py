from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.store_clock import TOLERANCE_US, ClockReading, choose_reading, find_error_us

SECOND_US = 1_000_000
NOON_US = 1_780_315_200_000_000
#: How far the clock of a host is ahead of the store's.
ahead = st.sampled_from([0, 1, -1, 600, -600, 10**8, -(10**8)]).map(lambda seconds: seconds * SECOND_US)
spans = st.integers(0, 3 * SECOND_US)


@given(ahead, st.lists(st.tuples(spans, spans, spans, spans), min_size=1, max_size=10))
def test_a_host_goes_by_its_own_clock_where_that_is_right_and_is_never_ahead_of_the_store_where_not(
    ahead_us: int, calls: list[tuple[int, int, int, int]]
) -> None:
    now_us, reading = NOON_US, None
    for pause_us, there_us, back_us, later_us in calls:
        now_us += pause_us
        asked_us, store_us = now_us, now_us + there_us
        now_us = store_us + back_us
        # Elapsed time begins anywhere.
        new = ClockReading(store_us, now_us - NOON_US, now_us - asked_us)
        reading = choose_reading(reading, new)
        now_us += later_us

        error_us = find_error_us(reading, now_us + ahead_us, now_us - NOON_US)

        time_us = now_us + ahead_us - error_us
        if abs(ahead_us) <= TOLERANCE_US:
            assert error_us == 0
        else:
            assert now_us - reading.took_us <= time_us <= now_us


def test_without_a_reading_the_clock_of_the_host_is_right() -> None:
    assert find_error_us(None, NOON_US, 0) == 0


def test_a_host_whose_clock_is_set_while_the_store_is_away_goes_on_by_elapsed_time() -> None:
    reading = ClockReading(NOON_US, at_us=0, took_us=0)
    for set_by_us in (0, 600 * SECOND_US, -600 * SECOND_US):
        assert find_error_us(reading, NOON_US + 3600 * SECOND_US + set_by_us, 3600 * SECOND_US) == set_by_us


def test_a_quick_reading_is_preferred_until_it_may_have_drifted_unless_the_clock_of_the_store_has_been_set() -> None:
    quick = ClockReading(NOON_US, at_us=0, took_us=1_000)
    slow = ClockReading(NOON_US + SECOND_US, at_us=SECOND_US, took_us=500_000)
    assert choose_reading(None, slow) is slow
    assert choose_reading(slow, quick) is quick
    assert choose_reading(quick, slow) is quick
    much_later = slow._replace(store_us=NOON_US + 7200 * SECOND_US, at_us=7200 * SECOND_US)
    assert choose_reading(quick, much_later) is much_later
    after_outage = ClockReading(NOON_US + 700 * SECOND_US, at_us=700 * SECOND_US, took_us=690 * SECOND_US)
    assert choose_reading(quick, after_outage) is quick
    very_slow = ClockReading(NOON_US + 9 * SECOND_US, at_us=10 * SECOND_US, took_us=10 * SECOND_US)
    assert choose_reading(quick, very_slow) is quick
    was_set = slow._replace(store_us=NOON_US + 3600 * SECOND_US)
    assert choose_reading(quick, was_set) is was_set
