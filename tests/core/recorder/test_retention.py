"""What is removed of a recording."""

from __future__ import annotations

from tidemill.core.recorder.retention import PeriodSize, RetentionLimits, RetentionRemoval, SegmentSize, choose_removal

NOW = 1_000_000.0
CURRENT = PeriodSize("now", NOW, 100, 10)
SEGMENTS = [SegmentSize("s1", 40), SegmentSize("s2", 40)]


def past(name: str, age: float = 0.0, size: int = 100, events: int = 10) -> PeriodSize:
    return PeriodSize(name, NOW - age, size, events)


def test_nothing_goes_while_all_limits_are_kept():
    limits = RetentionLimits(3_600, 300, 30)
    assert choose_removal(NOW, limits, [past("a"), past("b")], CURRENT, SEGMENTS) == RetentionRemoval()


def test_periods_go_by_age_each_for_itself():
    limits = RetentionLimits(3_600, 0, 0)
    removal = choose_removal(NOW, limits, [past("a", 10), past("b", 3_601), past("c", 3_600)], CURRENT, SEGMENTS)
    assert removal == RetentionRemoval(["b"])


def test_the_oldest_periods_go_until_the_rest_fits():
    removal = choose_removal(NOW, RetentionLimits(3_600, 250, 0), [past("a"), past("b"), past("c")], CURRENT, SEGMENTS)
    assert removal == RetentionRemoval(["a", "b"])


def test_periods_go_for_their_events():
    removal = choose_removal(NOW, RetentionLimits(3_600, 0, 25), [past("a"), past("b")], CURRENT, SEGMENTS)
    assert removal == RetentionRemoval(["a"])


def test_in_the_current_period_the_oldest_segments_go():
    removal = choose_removal(NOW, RetentionLimits(3_600, 90, 0), [past("a")], CURRENT, SEGMENTS)
    assert removal == RetentionRemoval(["a"], ["s1"])


def test_segments_end_before_the_limit_is_kept_if_there_are_no_more():
    assert choose_removal(NOW, RetentionLimits(3_600, 1, 0), [], CURRENT, SEGMENTS) == RetentionRemoval(
        [], ["s1", "s2"]
    )


def test_in_the_current_period_the_oldest_events_go():
    removal = choose_removal(NOW, RetentionLimits(3_600, 0, 4), [past("a")], CURRENT, SEGMENTS)
    assert removal == RetentionRemoval(["a"], [], 6)


def test_a_period_from_the_future_stays_after_the_clock_was_set_back():
    assert choose_removal(NOW, RetentionLimits(3_600, 0, 0), [past("a", -90_000)], CURRENT, []) == RetentionRemoval()
