"""A trigger that kills its whole host, among others, on several hosts that are started again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.examples import examples

from tidemill.core.triggers.lost_hosts import (
    CULPRIT_LOSSES,
    SUSPECT_LOSSES,
    FreeSuspect,
    LostTrial,
    TrialPlan,
    choose_trial,
    find_alone,
)


@dataclass
class Hosts:
    """Triggers on hosts that each run one trial at most; a host with the culprit is lost."""

    count: int
    triggers: int
    culprit: int
    chance: random.Random
    streams: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.deaths = dict.fromkeys(range(self.triggers), 0)
        self.alone = dict.fromkeys(range(self.triggers), 0)
        self.failed: list[int] = []
        self.losses = 0

    def play(self) -> None:
        """Place all triggers, lose the culprit's host, and clear the trials of the others."""
        culprits = [one for one, alone in self.alone.items() if alone >= CULPRIT_LOSSES]
        self.failed += culprits
        for one in culprits:
            del self.deaths[one], self.alone[one]
        free = [one for one, deaths in self.deaths.items() if deaths < SUSPECT_LOSSES]
        main: dict[int, list[int]] = {host: [] for host in range(self.count)}
        for one in free:
            main[self.chance.randrange(self.count)].append(one)
        trials: dict[int, tuple[int, ...]] = {}
        tried: set[int] = set()
        for host in self.chance.sample(range(self.count), self.count):
            left = [one for one, deaths in self.deaths.items() if deaths >= SUSPECT_LOSSES and one not in tried]
            taken = {self.streams[one] for one in tried if one in self.streams}
            left = [one for one in left if self.streams.get(one) not in taken or one not in self.streams]
            plan = choose_trial([FreeSuspect(one, self.deaths[one], 0, self.streams.get(one)) for one in left], 60)
            if plan is not None:
                trials[host] = plan.triggers
                tried.update(plan.triggers)
        for host in range(self.count):
            ran = (*main[host], *trials.get(host, ()))
            if self.culprit in ran:
                self.losses += 1
                for one in ran:
                    self.deaths[one] += 1
                if host in trials:
                    for one in find_alone([LostTrial(host, trials[host])]):
                        self.alone[one] += 1
            else:
                for one in trials.get(host, ()):
                    self.deaths[one], self.alone[one] = SUSPECT_LOSSES - 1, 0


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 4), st.integers(1, 60), st.integers(), st.integers(0, 3), st.data())
def test_it_is_blamed_and_nothing_else(count: int, triggers: int, seed: int, streams: int, data: st.DataObject):
    culprit, chance = data.draw(st.integers(0, triggers - 1)), random.Random(seed)
    keys = {one: chance.choice("abc"[:streams]) for one in range(triggers) if streams and chance.random() < 0.6}
    hosts = Hosts(count, triggers, culprit, chance, keys)
    for _ in range(60):
        hosts.play()
    assert hosts.failed == [culprit]
    assert hosts.losses <= 2 * SUSPECT_LOSSES + 2 * triggers.bit_length() + CULPRIT_LOSSES


def test_without_suspects_there_is_no_trial():
    assert choose_trial([], 9) is None


def test_a_stream_is_tried_as_a_whole_unless_there_is_nothing_else():
    stream = [FreeSuspect(number, 2, 0, "s") for number in (1, 2, 3)]
    assert choose_trial([*stream, FreeSuspect(4, 2, 0)], 9) == TrialPlan((1, 2, 3), 10.0)
    assert choose_trial(stream, 9) == TrialPlan((1, 2), 10.0)
    assert choose_trial(stream, 9, takes_all=True) == TrialPlan((1, 2), 10.0)
    assert choose_trial([*stream, FreeSuspect(4, 3, 0)], 9, takes_all=True) == TrialPlan((1, 2, 3, 4), 10.0)


def test_a_trial_has_no_more_triggers_than_a_process_runs():
    suspects = [FreeSuspect(number, 2, 0) for number in range(8)]
    assert choose_trial(suspects, 3) == TrialPlan((0, 1, 2), 10.0)
    assert choose_trial(suspects, 3, takes_all=True) == TrialPlan((0, 1, 2), 10.0)


def test_a_trial_lasts_for_twice_the_life_of_the_host_and_a_day_at_most():
    for lived_us, seconds in ((0, 10.0), (30_000_000, 60.0), (10**12, 86400.0)):
        assert choose_trial([FreeSuspect(1, 2, lived_us)], 9) == TrialPlan((1,), seconds)
