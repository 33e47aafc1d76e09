"""Slow and failed tasks are shown, of the others one per executor with how many it stands for."""

from __future__ import annotations

from tidemill.core.pipeline.task_sample import TaskSample


def test_fast_tasks_are_sampled_per_executor_and_all_are_counted() -> None:
    sample: TaskSample[int] = TaskSample(0.5, 100)
    for number in range(1000):
        sample.add(number % 3, number, 0.1, failed=False)
    shown, left_out = sample.take()
    assert [item for item, _ in shown] == [999, 997, 998]
    assert sum(count for _, count in shown) == 1000
    assert left_out == 0
    assert sample.take() == ([], 0)


def test_slow_and_failed_tasks_are_all_shown_up_to_a_limit() -> None:
    sample: TaskSample[int] = TaskSample(0.5, 3)
    sample.add(0, 1, 0.5, failed=False)
    sample.add(0, 2, 0.1, failed=True)
    sample.add(0, 3, 0.1, failed=False)
    for number in (4, 5, 6):
        sample.add(0, number, 2.0, failed=False)
    assert sample.take() == ([(1, 1), (2, 1), (4, 1), (3, 1)], 2)
