from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.tasks.run_starts import StartCandidate, Starts, find_yielding, plan_starts


def test_the_oldest_runs_begin_while_there_is_room():
    waiting = [StartCandidate(3, 30), StartCandidate(4, 40), StartCandidate(5, None)]
    assert plan_starts(waiting, [StartCandidate(1, 10)], [], 3) == Starts((3, 4))
    assert plan_starts(waiting, [StartCandidate(1, 10), StartCandidate(2, 20)], [2], 1) == Starts((5,), (2,))


def test_a_run_that_can_do_nothing_gives_its_place_to_an_earlier_run_or_to_one_that_waits_for_none():
    assert plan_starts([StartCandidate(1, 10)], [StartCandidate(2, 20)], [2], 1) == Starts((1,), (2,))
    assert plan_starts([StartCandidate(3, None)], [StartCandidate(2, 20)], [2], 1) == Starts((3,), (2,))
    assert plan_starts([StartCandidate(1, 10)], [StartCandidate(2, 20)], [], 1) == Starts(()), "it has something to do"
    assert plan_starts([StartCandidate(3, 30)], [StartCandidate(2, 20)], [2], 1) == Starts(()), (
        "that one would wait for it"
    )
    assert plan_starts([StartCandidate(3, 30)], [StartCandidate(2, None)], [2], 1) == Starts(())


def test_the_latest_run_gives_its_place_first():
    active = [StartCandidate(2, 20), StartCandidate(4, 40), StartCandidate(3, 30)]
    assert plan_starts([StartCandidate(1, 10)], active, [2, 3, 4], 3) == Starts((1,), (4,))
    assert find_yielding([StartCandidate(1, 25)], active) == [StartCandidate(4, 40), StartCandidate(3, 30)]


places = st.lists(st.none() | st.integers(0, 9), max_size=8)


@given(places, places, st.sets(st.integers(100, 107)), st.integers(1, 5))
def test_no_more_runs_are_active_than_may_be_and_only_those_give_their_place_that_can_do_nothing(
    waiting_us, active_us, idle, limit
):
    waiting = [StartCandidate(number, logical_us) for number, logical_us in enumerate(waiting_us)]
    active = [StartCandidate(100 + number, logical_us) for number, logical_us in enumerate(active_us)]
    plan = plan_starts(waiting, active, idle, limit)
    assert len(active) - len(plan.wait) + len(plan.begin) <= max(limit, len(active))
    assert set(plan.wait) <= idle & {one.number for one in find_yielding(waiting, active)}


@given(places, places, st.integers(1, 5))
def test_runs_that_can_do_nothing_do_not_take_turns_for_ever(waiting_us, active_us, limit):
    waiting = [StartCandidate(number, logical_us) for number, logical_us in enumerate(waiting_us)]
    active = [StartCandidate(100 + number, logical_us) for number, logical_us in enumerate(active_us)]
    everything = waiting + active
    for _ in range(len(everything) ** 2 + 1):
        plan = plan_starts(waiting, active, [one.number for one in active], limit)
        if not plan.begin:
            return
        now_active = ({one.number for one in active} - {*plan.wait}) | {*plan.begin}
        waiting = [one for one in everything if one.number not in now_active]
        active = [one for one in everything if one.number in now_active]
    raise AssertionError("they still give each other their places")
