from __future__ import annotations

import pytest

from tidemill.core.tasks.rereading import Rereading, find_interval, find_pause


def test_what_is_cheap_is_read_as_often_as_asked_for_and_what_is_not_less_often() -> None:
    assert find_interval(60.0, 0.0) == 60.0
    assert find_interval(60.0, 6.0) == 60.0
    assert find_interval(60.0, 12.0) == pytest.approx(120.0)


@pytest.mark.parametrize("cpu_seconds", [0.0, 0.1, 5.0])
def test_reading_one_file_after_another_takes_a_tenth_of_a_core(cpu_seconds: float) -> None:
    pause = find_pause(cpu_seconds)
    assert cpu_seconds == pytest.approx(0.1 * (cpu_seconds + pause))


def test_the_file_that_was_read_longest_ago_is_due_first() -> None:
    files = Rereading(60.0)
    assert files.find_due(1000.0) is None
    files.note_read("a", 0.0)
    files.note_read("b", 1.0)
    assert files.find_due(59.9) is None
    assert files.find_due(60.0) == "a"
    files.note_read("a", 60.5)
    assert files.find_due(60.6) is None
    assert files.find_due(61.0) == "b"
    files.forget("b")
    files.forget("b")
    assert files.find_due(70.0) is None


def test_after_a_file_that_was_expensive_the_next_one_waits() -> None:
    files = Rereading(60.0)
    files.note_read("a", 0.0)
    files.note_read("b", 0.0)
    files.note_read("a", 61.0)
    files.note_cost(2.0, 61.0)
    assert files.find_due(78.9) is None
    assert files.find_due(79.1) == "b"
