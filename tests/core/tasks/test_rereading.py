from __future__ import annotations

import pytest

from tidemill.core.tasks.rereading import find_interval, find_pause


def test_what_is_cheap_is_read_as_often_as_asked_for_and_what_is_not_less_often() -> None:
    assert find_interval(60.0, 0.0) == 60.0
    assert find_interval(60.0, 6.0) == 60.0
    assert find_interval(60.0, 12.0) == pytest.approx(120.0)


@pytest.mark.parametrize("cpu_seconds", [0.0, 0.1, 5.0])
def test_reading_one_file_after_another_takes_a_tenth_of_a_core(cpu_seconds: float) -> None:
    pause = find_pause(cpu_seconds)
    assert cpu_seconds == pytest.approx(0.1 * (cpu_seconds + pause))
