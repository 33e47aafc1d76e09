"""When segments are sealed and periods end."""

from __future__ import annotations

from tidemill.core.recorder.sealing import SealPolicy, is_period_over

POLICY = SealPolicy(max_rows=10, max_age_seconds=600.0, max_bytes=1_000)


def test_a_segment_is_sealed_by_rows_bytes_or_age():
    assert not POLICY.is_full(9, 999, 599.0)
    assert POLICY.is_full(10, 0, 0.0)
    assert POLICY.is_full(1, 1_000, 0.0)
    assert POLICY.is_full(1, 0, 600.0)


def test_an_empty_segment_is_never_sealed():
    assert not POLICY.is_full(0, 0, 10_000.0)


def test_a_clock_that_was_set_back_seals_nothing_by_age():
    assert not POLICY.is_full(9, 0, -3_600.0)


def test_a_period_is_over_after_its_time():
    assert not is_period_over(59.0, 60.0)
    assert is_period_over(60.0, 60.0)
