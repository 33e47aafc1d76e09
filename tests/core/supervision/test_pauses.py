"""Pauses end by themselves, once, and each for what it paused."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tidemill.core.supervision.pauses import Pause, Pauses


def test_nothing_is_paused_at_first() -> None:
    pauses = Pauses()
    assert (pauses.all, pauses.is_whole, pauses.partitions, pauses.due) == ([], False, [], None)
    assert pauses.tick(1e9) == pauses.resume(None) == pauses.resume(3) == []


def test_a_pause_ends_by_itself_and_once() -> None:
    pauses = Pauses()
    whole, single = Pause(None, 60.0, "ann"), Pause(3, 90.0, "rob")
    pauses.pause(single)
    pauses.pause(whole)
    assert pauses.all == [whole, single]
    assert (pauses.is_whole, pauses.partitions, pauses.due) == (True, [3], 60.0)
    assert pauses.tick(59.9) == []
    assert pauses.tick(60.0) == [whole]
    assert (pauses.is_whole, pauses.partitions, pauses.due) == (False, [3], 90.0)
    assert pauses.tick(1000.0) == [single]
    assert pauses.due is None


def test_a_further_pause_changes_when_it_ends() -> None:
    pauses = Pauses()
    pauses.pause(Pause(0, 60.0, "ann"))
    pauses.pause(Pause(0, 10.0, "rob"))
    assert pauses.tick(10.0) == [Pause(0, 10.0, "rob")]
    assert pauses.all == []


def test_a_resume_ends_what_it_names_or_everything() -> None:
    pauses = Pauses()
    for partition in (None, 0, 1):
        pauses.pause(Pause(partition, 60.0, "ann"))
    assert pauses.resume(1) == [Pause(1, 60.0, "ann")]
    assert pauses.is_whole
    assert [pause.partition for pause in pauses.resume(None)] == [None, 0]
    assert pauses.all == []


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(0, 20)), max_size=12), st.integers(0, 20))
def test_at_any_time_exactly_the_pauses_are_left_whose_time_is_not_over(
    given_pauses: list[tuple[int | None, int]], now: int
) -> None:
    pauses = Pauses()
    for partition, until in given_pauses:
        pauses.pause(Pause(partition, until, "ann"))
    expected = dict(given_pauses)
    ended = pauses.tick(now)
    assert {pause.partition: pause.until for pause in pauses.all} == {p: at for p, at in expected.items() if at > now}
    assert {pause.partition: pause.until for pause in ended} == {p: at for p, at in expected.items() if at <= now}
