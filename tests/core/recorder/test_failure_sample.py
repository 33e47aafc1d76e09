"""A sample of failures, and exact counts."""

from __future__ import annotations

from tidemill.core.recorder.failure_sample import MAX_CLASSES, OTHERS, FailureSample


def test_every_second_has_its_share_and_what_was_left_out_is_counted_by_kind_and_class() -> None:
    sample = FailureSample(2)
    admitted = [sample.admits(5.0 + n / 10, "task_failed", "a" if n % 2 else "b") for n in range(6)]
    assert admitted == [True, True, False, False, False, False]
    assert sample.take_counts(5.99) == {}
    assert sample.admits(6.0, "task_failed", "a")
    assert sample.take_counts(6.1) == {("task_failed", "a"): 2, ("task_failed", "b"): 2}
    assert sample.take_counts(9.0) == {}


def test_counts_of_several_seconds_add_up_until_they_are_taken() -> None:
    sample = FailureSample(0)
    for second in (1.0, 2.0, 3.0):
        assert not sample.admits(second, "sink_error", "x")
    assert sample.take_counts(3.5) == {("sink_error", "x"): 2}
    assert sample.take_last_counts() == {("sink_error", "x"): 1}


def test_countless_error_classes_take_bounded_memory_and_lose_no_count() -> None:
    sample = FailureSample(0)
    for n in range(MAX_CLASSES + 50):
        sample.admits(1.0, "task_failed", str(n))
    counts = sample.take_counts(2.0)
    assert len(counts) == MAX_CLASSES + 1
    assert counts["task_failed", OTHERS] == 50
