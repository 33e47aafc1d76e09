from __future__ import annotations

from collections.abc import Iterable

from tidemill.core.triggers.suspects import (
    ALONE_DEATHS,
    ALONE_KILLS,
    FORGET_SECONDS,
    LONGEST_TRIAL_SECONDS,
    SAME_SECONDS,
    SUSPECT_DEATHS,
    ProcessEnd,
    Suspects,
    Trial,
    Verdict,
    compute_patience,
)


def end(
    running: Iterable[int],
    lived_seconds: float = 0.5,
    at: float = 0.0,
    waiting: Iterable[int] = (),
    *,
    kill: bool = False,
) -> ProcessEnd:
    return ProcessEnd(dict.fromkeys(running), lived_seconds, at, kill, tuple(waiting))


def kill(running: Iterable[int], at: float, lived_seconds: float = 100.0) -> ProcessEnd:
    return end(running, lived_seconds, at, kill=True)


def make_suspects(*triggers: int, lived_seconds: float = 0.5) -> Suspects:
    suspects = Suspects()
    for _ in range(SUSPECT_DEATHS):
        verdict = suspects.note_death(end(triggers, lived_seconds))
    assert verdict == Verdict(triggers)
    return suspects


def begin(suspects: Suspects) -> list[tuple[int, ...]]:
    return [trial.triggers for trial in suspects.begin_trials()]


def begin_one(suspects: Suspects) -> Trial:
    (trial,) = suspects.begin_trials()
    return trial


def test_a_trigger_is_suspected_when_it_ran_at_several_deaths():
    suspects = Suspects()
    assert suspects.note_death(end([1, 2])).held == ()
    assert suspects.note_death(end([3])).held == ()
    assert suspects.note_death(end([1, 4])).held == (1,)
    assert suspects.begin_trials() == (Trial(1, (1,), 2.0),)


def test_it_does_not_matter_how_long_the_process_had_lived():
    suspects = Suspects()
    assert suspects.note_death(end([1], 600.0)).held == ()
    assert suspects.note_death(end([1], 1.0)).held == (1,)
    assert suspects.begin_trials() == (Trial(1, (1,), 1200.0),)


def test_deaths_that_are_far_apart_do_not_add_up():
    suspects, apart = Suspects(), FORGET_SECONDS + 1
    for number in range(10):
        assert suspects.note_death(end([1], 0.5, number * apart)).held == ()
    assert suspects.note_death(end([1], 0.5, 9 * apart + FORGET_SECONDS)).held == (1,)


def test_deaths_on_other_hosts_count_too():
    suspects = Suspects()
    seen = ProcessEnd({1: None, 2: None}, 0.5, 0.0, deaths={1: 1})
    assert suspects.note_death(seen).held == (1,)


def test_suspects_of_lost_hosts_are_tried_beside_one_other_trial():
    suspects = make_suspects(1)
    begin_one(suspects)
    suspects.adopt([5, 4], 30.0, 3)
    assert suspects.tried == {1, 4, 5}
    assert begin_one(suspects) == Trial(2, (4, 5), 30.0, losses=3)
    assert suspects.trials == 2
    assert suspects.note_survived(2, 40.0) == SUSPECT_DEATHS - 1
    assert suspects.note_survived(2, 40.0) == 0, "it has ended"
    assert suspects.note_survived(1, 40.0) == SUSPECT_DEATHS - 1
    suspects.adopt([6], 30.0, 2)
    assert begin(suspects) == [(6,)]


def test_suspects_of_lost_hosts_are_tried_beside_the_halves_of_a_stream():
    suspects = make_streams({1: "s", 2: "s"})
    assert begin_one(suspects).triggers == (1,)
    suspects.adopt([5], 30.0, 2)
    assert begin_one(suspects).triggers == (5,)
    suspects.note_survived(1, 40.0)
    assert begin_one(suspects) == Trial(2, (2,), 2.0, is_split=True, after=1)


def test_suspects_run_in_two_halves_at_a_time_and_the_one_whose_process_dies_is_halved_again():
    suspects = make_suspects(1, 2, 3, 4)
    first, second = suspects.begin_trials()
    assert (first.triggers, second.triggers) == ((1, 3), (2, 4))
    assert suspects.begin_trials() == ()
    assert suspects.note_fatal(second.number, end([2, 4])) == Verdict((2, 4), (first,))
    assert begin(suspects) == [(2,), (4,)]
    assert suspects.note_fatal(first.number, end([1, 3])) == Verdict(), "it was dropped, and died before it had ended"


def test_one_that_dies_alone_twice_is_blamed_and_one_that_survives_is_cleared():
    suspects = make_suspects(1, 2)
    first, second = suspects.begin_trials()
    suspects.note_survived(first.number, 3.0)
    for deaths in range(1, ALONE_DEATHS):
        assert suspects.note_fatal(second.number, end([2])) == Verdict((2,))
        assert begin_one(suspects) == Trial(second.number, (2,), 2.0, deaths)
    assert suspects.note_fatal(second.number, end([2])).culprit == 2
    assert suspects.begin_trials() == ()
    assert suspects.note_fatal(second.number, end([2])) == Verdict()


def test_what_was_cleared_is_suspected_at_the_next_death_and_tried_for_twice_as_long():
    suspects = make_suspects(1, 2)
    for seconds in (2.0, 4.0, 8.0):
        trials = suspects.begin_trials()
        assert {trial.seconds for trial in trials} == {seconds}
        for trial in trials:
            suspects.note_survived(trial.number, 10.0)
        assert suspects.note_death(end([1, 2], 0.5, 20.0)).held == (1, 2)
    suspects.begin_trials()
    for trial in trials:
        suspects.note_survived(trial.number, 20.0)


def test_what_was_cleared_is_forgotten_in_the_end():
    suspects = make_suspects(1)
    suspects.note_survived(begin_one(suspects).number, 10.0)
    for _ in range(SUSPECT_DEATHS - 1):
        assert suspects.note_death(end([1], 0.5, FORGET_SECONDS + 11.0)).held == ()
    assert suspects.note_death(end([1], 0.5, FORGET_SECONDS + 11.0)).held == (1,)
    assert begin_one(suspects).seconds == 2.0


def test_a_trial_is_never_longer_than_a_day():
    suspects = make_suspects(1, lived_seconds=1e6)
    assert begin_one(suspects).seconds == LONGEST_TRIAL_SECONDS


def test_what_is_blamed_explains_the_deaths_at_which_the_others_were():
    suspects = make_suspects(1, 2)
    first, second = suspects.begin_trials()
    for _ in range(ALONE_DEATHS):
        suspects.note_fatal(first.number, end([1]))
    assert suspects.note_survived(second.number, 9.0) == 0, "all of its deaths are explained"
    assert suspects.note_death(end([3])).held == ()


def test_what_outlives_its_trial_after_another_was_blamed_is_not_suspected_for_the_deaths_that_this_explains():
    suspects = make_suspects(1, 2)
    first, second = suspects.begin_trials()
    for _ in range(ALONE_DEATHS):
        suspects.note_fatal(first.number, end([1]))
    suspects.note_survived(second.number, 9.0)
    for _ in range(SUSPECT_DEATHS - 1):
        assert suspects.note_death(end([2, 3])).held == ()
    assert suspects.note_death(end([2, 3])).held == (2, 3)
    assert {trial.seconds for trial in suspects.begin_trials()} == {2.0}


def test_what_is_blamed_does_not_explain_deaths_of_the_triggerer_during_its_trial():
    suspects = make_suspects(1, 2)
    first, second = suspects.begin_trials()
    for _ in range(SUSPECT_DEATHS):
        assert suspects.note_death(end([3, 4])).held == (), "it is tried after those that are tried"
    for _ in range(ALONE_DEATHS):
        suspects.note_fatal(first.number, end([1]))
    suspects.note_survived(second.number, 9.0)
    assert suspects.note_death(end([2, 3, 5])).held == (3,)
    assert begin_one(suspects).triggers == (3,)


def test_deaths_before_a_trial_are_explained_by_what_is_blamed_in_it():
    suspects = Suspects()
    for number in range(SUSPECT_DEATHS):
        verdict = suspects.note_death(end([1, 2] if number else [1]))
    assert verdict.held == (1,)
    (trial,) = suspects.begin_trials()
    suspects.note_death(end([2]))
    for _ in range(ALONE_DEATHS):
        verdict = suspects.note_fatal(trial.number, end([1]))
    assert verdict.explained == (1,), "another one has died meanwhile"
    assert suspects.note_death(end([2])).held == (2,)


def test_another_half_is_halved_on_after_one_was_blamed():
    suspects = make_suspects(1, 2, 3)
    first, second = suspects.begin_trials()
    assert suspects.note_fatal(first.number, end([1, 3])).held == (1, 3)
    suspects = make_suspects(1, 2, 3)
    first, second = suspects.begin_trials()
    for _ in range(ALONE_DEATHS):
        verdict = suspects.note_fatal(second.number, end([2]))
    assert verdict.culprit == 2
    assert suspects.note_fatal(first.number, end([1, 3])).held == (1, 3)


def test_a_trial_whose_process_had_not_begun_blames_nobody_and_is_repeated():
    suspects = make_suspects(1)
    for _ in range(5):
        assert begin_one(suspects) == Trial(1, (1,), 2.0)
        assert suspects.note_fatal(1, end([], waiting=[1])) == Verdict((1,))


def test_what_had_not_begun_when_the_others_died_goes_back():
    suspects = make_suspects(*range(8))
    first, second = suspects.begin_trials()
    assert suspects.note_fatal(first.number, end([0, 2], waiting=[4, 6])) == Verdict((0, 2), (second,))
    assert begin(suspects) == [(0,), (2,)]


def test_what_ended_before_the_process_is_no_suspect_any_more():
    suspects = make_suspects(1)
    begin(suspects)
    assert suspects.note_fatal(1, end([])) == Verdict()
    assert suspects.begin_trials() == ()


def test_the_only_one_that_ran_is_tried_alone():
    suspects = make_suspects(1, 2, 3, 4)
    first, _ = suspects.begin_trials()
    assert suspects.note_fatal(first.number, end([3])).held == (3,)
    assert begin(suspects) == [(3,)]


# -- deaths of the triggerer meanwhile -------------------------------------------------------------------------------


def test_suspects_of_another_death_are_tried_after_the_first_ones():
    suspects = make_suspects(1, 2)
    trials = suspects.begin_trials()
    assert suspects.note_death(end([3])) == Verdict()
    assert suspects.note_death(end([3])) == Verdict(is_death=False), "it goes on"
    for trial in trials:
        suspects.note_survived(trial.number, 1.0)
    assert suspects.note_death(end([3, 4])).held == (3,)


def test_those_of_a_triggerer_that_dies_much_faster_go_first():
    suspects = make_suspects(1, 2, lived_seconds=100.0)
    slow = suspects.begin_trials()
    for _ in range(SUSPECT_DEATHS - 1):
        assert suspects.note_death(end([3])) == Verdict()
    assert suspects.note_death(end([3])) == Verdict((3,), slow)
    assert begin_one(suspects).triggers == (3,)
    assert suspects.note_death(end([1, 2])) == Verdict(is_death=False), "they were dropped, and are tried next"
    for _ in range(ALONE_DEATHS):
        verdict = suspects.note_fatal(3, end([3]))
    assert verdict.culprit == 3


def test_trials_that_took_the_place_of_others_are_ended_by_none():
    suspects = make_suspects(1, lived_seconds=1000.0)
    begin(suspects)
    for lived in (100.0, 100.0):
        verdict = suspects.note_death(end([2], lived))
    assert [trial.triggers for trial in verdict.dropped] == [(1,)]
    for _ in range(10):
        assert suspects.note_death(end([3], 0.1)).held == ()


# -- kills -----------------------------------------------------------------------------------------------------------


def test_one_that_is_killed_alone_is_blamed_later_than_one_that_ends():
    suspects = make_suspects(1)
    for number in range(ALONE_KILLS - 1):
        begin(suspects)
        assert suspects.note_fatal(1, kill([1], number * 100.0)) == Verdict((1,))
    assert suspects.note_fatal(1, kill([1], 1000.0)).culprit == 1


def test_a_kill_and_an_end_are_not_enough_and_one_more_is():
    suspects = make_suspects(1)
    suspects.note_fatal(1, kill([1], 100.0))
    assert suspects.note_fatal(1, end([1], 100.0)) == Verdict((1,))
    assert suspects.note_fatal(1, end([1], 100.0)).culprit == 1


def test_processes_that_are_killed_in_the_same_moment_blame_nobody_in_either_order():
    suspects = make_suspects(1, 2)
    trials = suspects.begin_trials()
    for number in range(10):
        at = 1000.0 * (number + 1)
        ends = [(0, kill([9], at)), *((trial.number, kill(trial.triggers, at + 0.1)) for trial in trials)]
        for trial, one in ends if number % 2 else reversed(ends):
            verdict = suspects.note_fatal(trial, one) if trial else suspects.note_death(one)
            assert verdict.culprit is None
        assert begin(suspects) == [(1,), (2,)]


def test_kills_that_are_further_apart_count():
    suspects = make_suspects(1)
    for number in range(ALONE_KILLS):
        at = 1000.0 * number
        suspects.note_death(kill([9], at))
        verdict = suspects.note_fatal(1, kill([1], at + SAME_SECONDS + 0.1))
    assert verdict.culprit == 1


def test_a_process_that_was_started_after_a_kill_was_not_killed_with_it():
    suspects = make_suspects(1, 2)
    for _ in suspects.begin_trials():
        pass
    suspects.note_death(kill([9], 100.0))
    assert suspects.note_fatal(1, kill([1], 100.1, lived_seconds=50.0)) == Verdict((1,))
    assert begin_one(suspects).deaths == 0
    assert suspects.note_fatal(1, kill([1], 101.0, lived_seconds=0.3)) == Verdict((1,))
    assert suspects.note_death(kill([9], 101.5, lived_seconds=0.2)) == Verdict(is_death=False)
    assert begin_one(suspects).kills == 1


# -- shared streams --------------------------------------------------------------------------------------------------


def make_streams(streams: dict[int, str | None]) -> Suspects:
    suspects = Suspects()
    for _ in range(SUSPECT_DEATHS):
        suspects.note_death(ProcessEnd(streams, 0.5, 0.0))
    return suspects


def test_halves_divide_no_stream():
    suspects = make_streams({1: "a", 2: "b", 3: "a", 4: None, 5: "b"})
    assert begin(suspects) == [(1, 3, 4), (2, 5)]


def test_the_halves_of_a_single_stream_are_tried_one_after_the_other():
    suspects = make_streams({1: "a", 2: "a", 3: "a"})
    first = begin_one(suspects)
    assert first.triggers == (1, 3)
    suspects.note_survived(first.number, 1.0)
    second = begin_one(suspects)
    assert second.triggers == (2,)
    assert suspects.begin_trials() == ()


def test_others_of_the_stream_of_a_suspect_are_tried_with_it():
    suspects = Suspects()
    suspects.note_death(ProcessEnd({1: "a"}, 0.5, 0.0))
    assert suspects.note_death(ProcessEnd({1: "a", 2: "a", 3: "b"}, 0.5, 0.0)) == Verdict((1, 2))


def test_a_stream_is_tried_as_a_whole_until_the_others_would_wait_less_than_they_have_waited_for_deaths():
    suspects = Suspects()
    for _ in range(SUSPECT_DEATHS):
        suspects.note_death(ProcessEnd({1: "a", 2: "a"}, 100.0, 0.0))
    first = begin_one(suspects)
    assert (first.triggers, first.is_split, first.seconds) == ((1, 2), False, 200.0)
    joined = ProcessEnd({1: "a", 2: "a", 3: "a"}, 100.0, 200.0)
    assert suspects.note_fatal(first.number, joined) == Verdict((1, 2, 3))
    second = begin_one(suspects)
    assert (second.triggers, second.is_split, second.losses) == ((1, 3), True, 3)
    assert compute_patience(second.losses) == 240.0


def test_one_that_was_joined_in_its_trial_is_not_blamed_but_both_are_halved():
    suspects = make_suspects(1)
    (trial,) = suspects.begin_trials()
    suspects.note_fatal(trial.number, ProcessEnd({1: None}, 0.5, 1.0))
    (trial,) = suspects.begin_trials()
    assert trial.deaths == 1
    assert suspects.note_fatal(trial.number, ProcessEnd({1: None, 9: None}, 0.5, 2.0)) == Verdict((1, 9))
    assert begin(suspects) == [(1,), (9,)]


def test_the_second_half_of_a_stream_is_free_once_the_first_has_died():
    suspects = make_streams({1: "a", 2: "a"})
    first = begin_one(suspects)
    assert suspects.note_fatal(first.number, ProcessEnd({1: "a"}, 0.5, 1.0)) == Verdict((1,))
    assert begin_one(suspects).triggers == (1,)
    for deaths in range(1, ALONE_DEATHS):
        verdict = suspects.note_fatal(first.number, ProcessEnd({1: "a"}, 0.5, 1.0 + deaths))
    assert verdict.culprit == 1
    assert begin_one(suspects).triggers == (2,)


def test_the_other_half_of_a_stream_goes_back_when_the_first_is_halved():
    suspects = make_streams(dict.fromkeys(range(4), "a"))
    first = begin_one(suspects)
    verdict = suspects.note_fatal(first.number, ProcessEnd({0: "a", 2: "a"}, 0.5, 1.0))
    assert (verdict.held, [trial.triggers for trial in verdict.dropped]) == ((0, 2), [(1, 3)])
    assert begin_one(suspects).triggers == (0,)
