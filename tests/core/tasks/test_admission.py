from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.tasks.admission import Active, ActiveLimits, Candidate, PoolAdmission, admit, order


def test_resumed_tasks_come_first_then_those_with_priority_then_the_oldest():
    waiting = [
        Candidate(1, 1, 1, "a", since_us=5),
        Candidate(2, 1, 1, "a", since_us=4),
        Candidate(3, 1, 1, "a", priority=9, since_us=9),
        Candidate(4, 1, 1, "a", resumed=True, since_us=10),
    ]
    assert admit(waiting, 3, 0, {}, Active()) == PoolAdmission((4, 3, 2), ())


def test_a_task_that_needs_many_slots_is_not_overtaken_in_its_pool():
    waiting = [Candidate(1, 1, 1, "big", slots=3, priority=2), Candidate(2, 1, 1, "small")]
    assert admit(waiting, 4, 2, {}, Active()) == PoolAdmission((), ())
    assert admit(waiting, 4, 1, {}, Active()) == PoolAdmission((1,), ())
    assert admit(waiting, 4, 0, {}, Active()) == PoolAdmission((1, 2), ())


def test_a_task_that_could_never_fit_is_named_and_holds_up_nobody():
    waiting = [Candidate(1, 1, 1, "huge", slots=5, priority=2), Candidate(2, 1, 1, "small")]
    assert admit(waiting, 4, 0, {}, Active()) == PoolAdmission((2,), (1,))


def test_a_pool_that_was_made_smaller_admits_nobody_until_enough_have_ended():
    assert admit([Candidate(1, 1, 1, "a")], 2, 5, {}, Active()) == PoolAdmission((), ())


def test_a_task_that_waits_for_a_limit_of_its_dag_holds_up_no_other_dag():
    waiting = [Candidate(1, 1, 1, "a", priority=2), Candidate(2, 2, 2, "b")]
    limits = {1: ActiveLimits(per_dag=3)}
    assert admit(waiting, 8, 0, limits, Active(per_dag={1: 3})) == PoolAdmission((2,), ())


def test_tasks_that_are_admitted_together_share_the_limits():
    waiting = [Candidate(number, 1, number % 2, "a" if number < 6 else "b") for number in range(8)]
    assert admit(waiting, 99, 0, {1: ActiveLimits(per_dag=3)}, Active()).admitted == (0, 1, 2)
    assert admit(waiting, 99, 0, {1: ActiveLimits(per_task={"a": 2})}, Active()).admitted == (0, 1, 6, 7)
    limits = {1: ActiveLimits(per_task_and_run={"a": 2})}
    assert admit(waiting, 99, 0, limits, Active(per_task_and_run={(1, "a"): 1})).admitted == (0, 1, 2, 6, 7)


def test_a_resumed_task_has_kept_its_place_in_the_limits():
    active = Active(per_dag={1: 1})
    waiting = [Candidate(1, 1, 1, "a", resumed=True), Candidate(2, 1, 1, "a")]
    assert admit(waiting, 8, 0, {1: ActiveLimits(per_dag=1)}, active).admitted == (1,)


def test_a_generator_that_goes_on_comes_first_and_needs_room_within_the_limits():
    waiting = [
        Candidate(1, 1, 1, "e", resumed=True, priority=9),
        Candidate(2, 1, 1, "g", since_us=9, returns=True),
        Candidate(3, 1, 1, "g", slots=2, since_us=8, returns=True),
    ]
    assert admit(waiting, 9, 0, {}, Active()).admitted == (3, 2, 1)
    assert admit(waiting, 9, 8, {}, Active()).admitted == (), "those behind it wait until it fits"
    limits = {1: ActiveLimits(per_task_and_run={"g": 1})}
    assert admit(waiting, 9, 0, limits, Active(per_dag={1: 1}, per_task_and_run={(1, "g"): 1})).admitted == (1,)


def test_a_task_that_starts_in_a_trigger_waits_for_a_slot_but_does_not_keep_it():
    waiting = [Candidate(number, 1, 1, "a", slots=2, passes=True) for number in range(3)]
    assert admit(waiting, 2, 0, {}, Active()).admitted == (0, 1, 2)
    assert admit(waiting, 2, 1, {}, Active()).admitted == ()
    assert admit(waiting, 2, 0, {1: ActiveLimits(per_dag=1)}, Active()).admitted == (0,)
    assert admit([*waiting, Candidate(9, 1, 1, "b", priority=5)], 2, 0, {}, Active()).admitted == (9,)


candidates = st.lists(
    st.builds(
        Candidate,
        number=st.just(0),
        dag=st.integers(1, 2),
        run=st.integers(1, 3),
        task=st.sampled_from("ab"),
        slots=st.integers(1, 4),
        resumed=st.booleans(),
        priority=st.integers(1, 3),
        since_us=st.integers(0, 5),
        returns=st.booleans(),
    ),
    max_size=20,
)
counts = st.none() | st.integers(1, 4)
by_task = st.dictionaries(st.sampled_from("ab"), st.integers(1, 3))


@given(candidates, st.integers(0, 6), st.integers(0, 8), st.builds(ActiveLimits, counts, by_task, by_task))
def test_no_limit_is_exceeded_and_nobody_waits_for_nothing(found, slots, used, limits):
    waiting = [
        Candidate(n, c.dag, c.run, c.task, c.slots, c.resumed and not c.returns, c.priority, c.since_us, c.returns)
        for n, c in enumerate(found)
    ]
    answer = admit(waiting, slots, used, {1: limits}, Active())
    admitted = [waiting[number] for number in answer.admitted]
    assert admitted == sorted(admitted, key=order)
    assert sum(one.slots for one in admitted) <= max(0, slots - used)
    new = [one for one in admitted if one.dag == 1 and not one.resumed]
    assert limits.per_dag is None or len(new) <= limits.per_dag
    for task, count in Counter(one.task for one in new).items():
        assert count <= limits.per_task.get(task, 99)
    for (_run, task), count in Counter((one.run, one.task) for one in new).items():
        assert count <= limits.per_task_and_run.get(task, 99)
    # The first one, without a limit of its DAG, waits only if it does not fit.
    fitting = [one for one in sorted(waiting, key=order) if one.slots <= slots]
    if fitting and fitting[0].number not in answer.admitted:
        assert fitting[0].slots > slots - used
