"""Pauses that are worth recording."""

from __future__ import annotations

from tidemill.core.recorder.pause_watch import PauseWatch


def test_a_pause_that_lasts_is_told_once_and_its_end_once() -> None:
    watch = PauseWatch(2.0)
    assert watch.look(0.0, ["t/0", "t/1"]) == ([], [])
    assert watch.look(1.9, ["t/0"]) == ([], [])
    assert watch.look(2.0, ["t/0", "t/1"]) == (["t/0"], [])
    assert watch.look(3.0, ["t/0"]) == ([], [])
    assert watch.look(4.0, []) == ([], [])
    assert watch.look(5.9, []) == ([], [])
    assert watch.look(6.0, []) == ([], ["t/0"])
    assert watch.look(7.0, []) == ([], [])


def test_partitions_that_are_held_and_released_all_the_time_are_not_told() -> None:
    watch = PauseWatch(2.0)
    for n in range(100):
        assert watch.look(n / 4, ["t/0"] if n % 4 else []) == ([], [])


def test_a_short_break_in_a_long_pause_does_not_end_it() -> None:
    watch = PauseWatch(2.0)
    watch.look(0.0, ["t/0"])
    assert watch.look(2.0, ["t/0"]) == (["t/0"], [])
    for at, held in ((3.0, []), (4.0, ["t/0"]), (5.0, []), (6.5, [])):
        assert watch.look(at, held) == ([], [])
    assert watch.look(7.0, []) == ([], ["t/0"])
