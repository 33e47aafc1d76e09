"""A trigger that kills its whole host, among others, on several hosts that are started again."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.core.examples import examples
from tests.core.triggers.lost_host_world import RESTART_SECONDS, Hosts

from tidemill.core.triggers.lost_hosts import (
    CULPRIT_LOSSES,
    MOST_TRIALS,
    REST_SECONDS,
    SHORTEST_TRIAL_SECONDS,
    SUSPECT_LOSSES,
    FreeSuspect,
    TrialPlan,
    choose_kills,
    choose_trial,
)
from tidemill.core.triggers.suspects import compute_patience


@settings(max_examples=examples(1000), deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 60),
    st.integers(),
    st.integers(0, 3),
    st.floats(math.log(5.0), math.log(2_000.0)),
    st.data(),
)
def test_each_killer_fails_after_a_bounded_number_of_losses_and_nothing_else_waits_for_long(
    count: int, triggers: int, seed: int, streams: int, life: float, data: st.DataObject
):
    chance = random.Random(seed)
    names = "abc"[:streams]
    keys = {one: chance.choice(names) if streams and chance.random() < 0.6 else None for one in range(triggers)}
    if data.draw(st.booleans(), "all in one stream"):
        keys = dict.fromkeys(keys, "a")
    killers = data.draw(st.lists(st.integers(0, triggers - 1), min_size=1, max_size=2, unique=True))
    lives = {one: math.exp(life) * chance.uniform(0.5, 1.0) for one in killers}
    hosts = Hosts(
        count,
        keys,
        {one: lambda one=one: lives[one] * chance.uniform(1.0, 1.9) for one in killers},  # type: ignore[misc]
        chance,
    )
    halvings = triggers.bit_length()
    # Until the others wait longer than a trial lasts, a loss may narrow nothing down.
    in_vain = sum(compute_patience(deaths) < 2 * math.exp(life) * 1.9 for deaths in range(2, 12))
    each = SUSPECT_LOSSES + in_vain + 2 * halvings + CULPRIT_LOSSES
    hosts.run(2 * len(killers) * count * each)

    assert sorted(hosts.failed) == sorted(killers)
    event(f"losses {hosts.losses / len(killers) / each:.1f} of the bound")
    trial = 2 * hosts.longest_life + RESTART_SECONDS + SHORTEST_TRIAL_SECONDS
    most = REST_SECONDS + 2 * (halvings + 1) * trial
    event(f"wait {hosts.longest_wait / most:.1f} of the bound")
    assert hosts.longest_wait <= most


def test_without_suspects_there_is_no_trial():
    assert choose_trial([], 9) is None


def test_a_single_stream_is_split_only_if_the_others_do_not_wait_long_for_its_trial():
    stream = [FreeSuspect(number, 2, 0, "s") for number in (1, 2, 3)]
    others = [FreeSuspect(7, 0, 0, "s"), FreeSuspect(8, 1, 0, "s")]
    assert choose_trial([*stream, *others, FreeSuspect(4, 2, 0)], 9) == TrialPlan((1, 2, 3, 7, 8), 10.0)
    assert choose_trial([*stream, *others], 9) == TrialPlan((1, 2), 10.0, is_split=True)
    assert choose_trial(stream, 1) == TrialPlan((1,), 10.0, is_split=True)
    late = FreeSuspect(1, 2, 31_000_000, "s")
    assert choose_trial([late, *others], 9) == TrialPlan((1, 7, 8), 62.0)
    assert choose_trial([replace(late, deaths=3), *others], 9) == TrialPlan((1,), 62.0, 3, is_split=True)


def test_beside_other_trials_everything_is_tried_once_a_suspect_has_waited_for_long():
    suspects = [
        FreeSuspect(1, 2, 0),
        FreeSuspect(2, 3, 0),
        FreeSuspect(3, 3, 0),
        FreeSuspect(4, 2, 0, "s"),
        FreeSuspect(5, 1, 0, "s"),
    ]
    for beside in range(MOST_TRIALS):
        assert choose_trial(suspects, 9, beside=beside) == TrialPlan((2,), 10.0, 3)
    assert choose_trial(suspects, 9, beside=MOST_TRIALS) is None
    suspects[0] = FreeSuspect(1, 2, 0, waited_us=600_000_000)
    assert choose_trial(suspects, 9) == TrialPlan((2,), 10.0, 3), "one more death must not make it one of the worst"
    for beside in (1, MOST_TRIALS, 9):
        assert choose_trial(suspects, 9, beside=beside) == TrialPlan((1, 2, 3, 4, 5), 10.0, 3)


def test_what_has_waited_for_longer_than_the_worst_is_tried_before_them():
    late = [FreeSuspect(1, 2, 0, waited_us=700_000_000), FreeSuspect(2, 4, 0, waited_us=600_000_000)]
    assert choose_trial(late, 9) == TrialPlan((1,), 10.0)
    assert choose_trial([late[0], replace(late[1], waited_us=800_000_000)], 9) == TrialPlan((2,), 10.0, 4)
    stream = [replace(one, stream="s") for one in late]
    assert choose_trial(stream, 9) == TrialPlan((1,), 10.0, 4), (
        "it is no suspect of this death, but it must live as long"
    )
    assert choose_trial([replace(stream[0], waited_us=0), stream[1]], 9) == TrialPlan((2,), 10.0, 4, is_split=True)


def test_a_trial_has_no_more_triggers_than_a_process_runs():
    suspects = [FreeSuspect(number, 2, 0, waited_us=600_000_000) for number in range(8)]
    assert choose_trial(suspects, 3) == TrialPlan((0, 1, 2), 10.0)
    assert choose_trial(suspects, 3, beside=1) == TrialPlan((0, 1, 2), 10.0)
    stream = [FreeSuspect(number, 2, 0, "s") for number in range(5)]
    assert choose_trial([*stream, *suspects[5:]], 3) == TrialPlan((0, 1, 2, 3, 4), 10.0), "a stream stays together"


def test_calls_of_on_kill_are_made_together_after_one_loss_and_alone_after_another():
    assert choose_kills({}) == ()
    assert choose_kills({1: 2, 2: 1, 3: 1}) == (2, 3)
    assert choose_kills({2: 2, 1: 2}) == (1,)


def test_a_trial_lasts_for_twice_the_life_of_the_host_and_a_day_at_most():
    for lived_us, seconds in ((0, 10.0), (30_000_000, 60.0), (10**12, 86400.0)):
        assert choose_trial([FreeSuspect(1, 2, lived_us)], 9) == TrialPlan((1,), seconds)
