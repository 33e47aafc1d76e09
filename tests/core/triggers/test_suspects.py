from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.triggers.suspects import SLOW_SECONDS, SUSPECT_DEATHS, Suspects, Trial


def make_suspects(*triggers: int) -> Suspects:
    suspects = Suspects()
    for _ in range(SUSPECT_DEATHS):
        held = suspects.note_death(triggers, 0.5)
    assert held == triggers
    return suspects


def test_a_trigger_is_suspected_when_it_ran_at_several_deaths_in_a_row():
    suspects = Suspects()
    assert suspects.note_death([1, 2], 1.0) == ()
    assert suspects.note_death([1, 2, 3], 1.0) == ()
    assert suspects.note_death([1, 3], 1.0) == (1,)
    assert suspects.begin_trial() == Trial((1,), 2.0)


def test_one_that_missed_a_death_is_counted_anew():
    suspects = Suspects()
    for running in ([1, 2], [2], [1, 2]):
        held = suspects.note_death(running, 1.0)
    assert held == (2,)


def test_a_process_that_lived_long_makes_nobody_a_suspect():
    suspects = Suspects()
    for lived in (1.0, 1.0, SLOW_SECONDS + 1, 1.0, 1.0):
        assert suspects.note_death([1], lived) == ()
    assert suspects.note_death([1], 1.0) == (1,)


def test_a_trial_takes_twice_as_long_as_the_process_lived():
    suspects = Suspects()
    for _ in range(SUSPECT_DEATHS):
        suspects.note_death([1], 10.0)
    assert suspects.begin_trial() == Trial((1,), 20.0)


def test_one_that_dies_alone_twice_is_blamed_and_one_that_survives_is_cleared():
    suspects = make_suspects(1, 2)
    assert suspects.begin_trial() == Trial((1,), 2.0)
    suspects.note_survived()
    assert suspects.begin_trial() == Trial((2,), 2.0)
    assert suspects.note_fatal([2], []) is None
    assert suspects.begin_trial() == Trial((2,), 2.0, 1)
    assert suspects.note_fatal([2], []) == 2
    assert suspects.begin_trial() is None
    assert suspects.note_fatal([2], []) is None


def test_a_trial_whose_process_had_not_begun_blames_nobody_and_is_repeated():
    suspects = make_suspects(1)
    for _ in range(5):
        assert suspects.begin_trial() == Trial((1,), 2.0)
        assert suspects.note_fatal([], [1]) is None


def test_what_ended_before_the_process_is_no_suspect_any_more():
    suspects = make_suspects(1)
    suspects.begin_trial()
    assert suspects.note_fatal([], []) is None
    assert suspects.begin_trial() is None


def test_suspects_of_another_death_wait_until_the_earlier_ones_are_tried():
    suspects = make_suspects(1, 2)
    for _ in range(SUSPECT_DEATHS):
        suspects.note_death([3], 0.5)
    tried = []
    while (trial := suspects.begin_trial()) is not None:
        tried += trial.triggers
        suspects.note_survived()
    assert tried == [1, 2, 3]


@given(st.integers(1, 200), st.sets(st.integers(0, 199), max_size=5), st.sets(st.integers(0, 199), max_size=5))
def test_every_culprit_is_blamed_and_nobody_else(count: int, culprits: set[int], late: set[int]):
    culprits = {number for number in culprits if number < count}
    suspects = make_suspects(*range(count))
    blamed, cleared, trials = set(), set(), 0
    late = {number for number in late if number < count}
    while (trial := suspects.begin_trial()) is not None:
        trials += 1
        waiting = late & set(trial.triggers) if len(trial.triggers) > 1 else set()
        late -= waiting
        running = set(trial.triggers) - waiting
        if running & culprits:
            culprit = suspects.note_fatal(running, waiting)
            blamed |= set() if culprit is None else {culprit}
        elif waiting:
            assert suspects.note_fatal(set(), waiting | running) is None
        else:
            suspects.note_survived()
            cleared |= running
    assert blamed == culprits
    assert cleared == set(range(count)) - culprits
    assert trials <= 4 + len(culprits) * 20 + 10
