"""Leases of messages that have to be renewed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.triggers.leases import Leases


def test_a_lease_is_due_from_half_of_its_time_on():
    leases = Leases(60.0, 1000.0)
    assert leases.due is None
    leases.hold(1, 100.0)
    assert leases.due == 130.0
    assert leases.list_due(129.9, 10) == []
    assert leases.list_due(130.0, 10) == [1]


def test_leases_that_expire_first_are_renewed_first_and_no_more_than_the_limit():
    leases = Leases(60.0, 1000.0)
    for number in range(5):
        leases.hold(number, float(number))
    assert leases.list_due(100.0, 3) == [0, 1, 2]
    for number in (0, 1, 2):
        leases.note_renewed(number, 40.0)
    assert leases.list_due(40.0, 3) == [3, 4]
    assert leases.due == 33.0


def test_a_released_lease_is_not_due_and_a_late_renewal_does_not_revive_it():
    leases = Leases(60.0, 1000.0)
    leases.hold(1, 0.0)
    leases.release(1)
    leases.release(1)
    leases.note_renewed(1, 5.0)
    assert (len(leases), 1 in leases, leases.due) == (0, False, None)


def test_expired_leases_and_those_that_would_be_refused_are_given_up():
    leases = Leases(60.0, 150.0)
    leases.hold(1, 0.0)
    leases.hold(2, 1.0)
    assert leases.give_up(29.0) == []
    leases.note_renewed(1, 30.0)
    leases.note_renewed(1, 60.0)
    assert leases.give_up(61.0) == [2]
    assert leases.give_up(90.0) == []
    assert leases.give_up(90.1) == [1], "renewed now, it would be held for longer than the queue allows"


@given(
    st.lists(
        st.tuples(st.sampled_from(["hold", "renew", "release", "give up"]), st.integers(0, 5), st.floats(0, 20)),
        max_size=60,
    )
)
def test_whatever_happens_nothing_due_is_forgotten_and_nothing_is_held_too_long(steps):
    leases = Leases(10.0, 45.0)
    made: dict[int, float] = {}
    renewed: dict[int, float] = {}
    now, count = 0.0, 0
    for what, which, passed in steps:
        now += passed
        number = count - 1 - which
        if what == "hold":
            leases.hold(count, now)
            made[count] = renewed[count] = now
            count += 1
        elif what == "renew":
            for number in leases.list_due(now, 3):
                assert now - renewed[number] >= 5.0
                leases.note_renewed(number, now)
                renewed[number] = now
        elif what == "release":
            leases.release(number)
            renewed.pop(number, None)
        else:
            for number in leases.give_up(now):
                assert now - made[number] > 35.0 or now - renewed[number] >= 10.0
                del renewed[number]
        assert len(leases) == len(renewed)
        assert leases.due == (min(renewed.values()) + 5.0 if renewed else None)
        due = sorted(number for number in renewed if now >= renewed[number] + 5.0)
        assert sorted(leases.list_due(now, 100)) == due
