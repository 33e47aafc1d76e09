"""Triggers that end their process, among many, after any times."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.examples import examples
from tests.core.triggers.suspect_world import Killer, World

from tidemill.core.triggers.suspects import ALONE_DEATHS, ALONE_KILLS, SUSPECT_DEATHS

_YEAR = 365 * 86400.0
#: How often what lives between 0.1 s and 10 min can be cleared before it is tried for longer than that.
_ROUNDS = 11


def count_halvings(count: int) -> int:
    return math.ceil(math.log2(count)) if count > 1 else 0


def make(count: int, killers: dict[int, Killer], streams: dict[int, str] | None = None) -> World:
    return World({number: (streams or {}).get(number) for number in range(count)}, killers)


def draw_any(seed: int) -> Killer:
    """Return one that lives for anything between 0.1 s and 10 min, each time anew."""
    chance = random.Random(seed)
    return Killer(lambda: math.exp(chance.uniform(math.log(0.1), math.log(600.0))), kill=chance.random() < 0.3)


@pytest.mark.parametrize("lived", [0.1, 1.0, 29.0, 31.0, 600.0, 36000.0])
@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_one_that_lives_for_about_the_same_time_is_blamed_after_few_deaths(lived: float, kill: bool, count: int):
    chance = random.Random(count)
    world = make(count, {count // 2: Killer(lambda: lived * chance.uniform(1.0, 1.9), kill)})
    world.run(_YEAR)
    assert world.failed == [count // 2]
    assert world.deaths <= SUSPECT_DEATHS + count_halvings(count) + (ALONE_KILLS if kill else ALONE_DEATHS)


@pytest.mark.parametrize("seed", range(10))
def test_several_that_live_for_about_the_same_time_need_no_more_deaths_than_each_of_them_alone(seed: int):
    chance = random.Random(seed)
    lives = dict(zip(chance.sample(range(33), 3), (62.0, 62.0, 20.0), strict=True))
    world = make(
        33, {one: Killer(lambda lived=lived: lived * chance.uniform(1.0, 1.02)) for one, lived in lives.items()}
    )
    world.run(_YEAR)
    assert sorted(world.failed) == sorted(lives)
    assert world.deaths <= len(lives) * (SUSPECT_DEATHS + count_halvings(33) + ALONE_DEATHS)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 1000), st.integers(), st.data())
def test_one_that_lives_irregularly_is_blamed_after_a_bounded_number_of_deaths(
    count: int, seed: int, data: st.DataObject
):
    culprit = data.draw(st.integers(0, count - 1))
    world = make(count, {culprit: draw_any(seed)})
    world.run(_YEAR)
    assert world.failed == [culprit]
    assert world.trial_deaths <= _ROUNDS * (count_halvings(count) + ALONE_KILLS)
    assert world.deaths - world.trial_deaths <= SUSPECT_DEATHS + 3 * _ROUNDS


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 300), st.sets(st.integers(0, 299), max_size=6), st.integers(), st.integers(0, 4), st.data())
def test_all_of_several_are_blamed_and_nobody_else(
    count: int, culprits: set[int], seed: int, stream_count: int, data: st.DataObject
):
    chance = random.Random(seed)
    killers = {number: draw_any(seed + number) for number in culprits if number < count}
    streams = {number: chance.choice("abcd"[:stream_count]) for number in range(count) if stream_count}
    streams = {number: stream for number, stream in streams.items() if chance.random() < 0.7}
    world = make(count, killers, streams)
    world.run(_YEAR)
    assert sorted(world.failed) == sorted(killers)
    assert world.trial_deaths <= len(killers) * _ROUNDS * (2 * count_halvings(count) + 2 * ALONE_KILLS)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.floats(0.5, 1.5), st.sampled_from(["triggerer", "all", "all, others first"])), max_size=200),
    st.sampled_from([3.0, 30.0, 300.0, 30000.0]),
    st.integers(),
    st.booleans(),
)
def test_whoever_kills_the_triggerer_by_hand_has_no_trigger_blamed(
    count: int, kills: list[tuple[float, str]], seconds: float, seed: int, has_killer: bool
):
    killers = {count // 2: draw_any(seed)} if has_killer else {}
    world = make(count, killers)
    for pause, what in kills:
        world.run(world.now + seconds * pause)
        if what == "triggerer":
            world.kill_triggerer()
        else:
            world.kill_all(trials_first=what != "all")
    world.run(_YEAR)
    assert set(world.failed) == set(killers)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(2, 200), st.lists(st.floats(5.0, 40000.0), max_size=200), st.integers(0, 1))
def test_nobody_is_blamed_for_fewer_kills_of_trials_than_one_that_is_alone_needs(
    count: int, pauses: list[float], which: int
):
    world = make(count, {0: Killer(lambda: math.inf)})
    for _ in range(SUSPECT_DEATHS):
        world.kill_triggerer()
        world.run(world.now + 100.0)
    halvings = math.floor(math.log2(count)) - 1  # the first needs no death of a trial
    for pause in pauses[: halvings + ALONE_KILLS - 1]:
        world.kill_trial(which)
        world.run(world.now + pause)
    assert world.failed == []
