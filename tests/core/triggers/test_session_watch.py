"""Whether others live, told by their beats alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.triggers.session_watch import Life, SessionWatch

LEASE, LOOK = 30.0, 1.0


def watched(*steps: tuple[float, dict[int, int] | None]) -> SessionWatch:
    """A watch after looks at these times; None: the look failed."""
    watch = SessionWatch(LEASE, LOOK)
    for now, beats in steps:
        if beats is None:
            watch.missed()
        else:
            watch.look(beats, now)
    return watch


def test_a_session_that_nobody_has_seen_is_unknown():
    assert watched().life(1) is Life.UNKNOWN
    assert watched((0.0, {2: 1})).life(1) is Life.UNKNOWN


def test_a_beat_that_moves_proves_life():
    assert watched((0.0, {1: 4})).life(1) is Life.UNKNOWN
    assert watched((0.0, {1: 4}), (1.0, {1: 4})).life(1) is Life.UNKNOWN
    assert watched((0.0, {1: 4}), (1.0, {1: 5})).life(1) is Life.LIVE


@pytest.mark.parametrize("moves", [False, True])
def test_a_beat_that_stands_still_for_the_lease_is_a_death_and_not_before(moves):
    watch = watched((0.0, {1: 4 if moves else 5}))
    watch.look({1: 5}, 0.0)
    for second in range(1, 30):
        watch.look({1: 5}, float(second))
        assert watch.life(1) is (Life.LIVE if moves else Life.UNKNOWN)
    watch.look({1: 5}, 30.0)
    assert watch.life(1) is Life.DEAD


def test_a_pause_of_the_observer_counts_for_two_looks_at_most():
    watch = watched((0.0, {1: 5}), (1_000_000.0, {1: 5}))
    assert watch.life(1) is Life.UNKNOWN
    for second in range(1, 28):
        watch.look({1: 5}, 1_000_000.0 + second)
    assert watch.life(1) is Life.UNKNOWN
    watch.look({1: 5}, 1_000_028.0)
    assert watch.life(1) is Life.DEAD


def test_a_look_that_failed_takes_the_time_around_it_out_of_the_count():
    steps: list[tuple[float, dict[int, int] | None]] = [(0.0, {1: 5})]
    for second in range(1, 200):
        steps.append((float(second), None if second % 2 else {1: 5}))
    assert watched(*steps).life(1) is Life.UNKNOWN


def test_a_beat_that_moves_again_brings_a_dead_session_back():
    steps = [(float(second), {1: 5}) for second in range(31)]
    assert watched(*steps).life(1) is Life.DEAD
    assert watched(*steps, (31.0, {1: 6})).life(1) is Life.LIVE


def test_a_session_that_has_ended_is_forgotten_and_the_others_are_not():
    steps = [(float(second), {1: 5, 2: 5}) for second in range(31)]
    watch = watched(*steps, (31.0, {2: 5}))
    assert (watch.life(1), watch.life(2)) == (Life.UNKNOWN, Life.DEAD)
    watch.look({1: 5, 2: 5}, 32.0)
    assert (watch.life(1), watch.life(2)) == (Life.UNKNOWN, Life.DEAD)


def test_a_clock_that_stands_still_or_runs_backwards_counts_nothing():
    watch = watched(*[(-float(second), {1: 5}) for second in range(100)])
    assert watch.life(1) is Life.UNKNOWN


def test_each_session_has_a_lease_of_its_own():
    watch = SessionWatch(LEASE, LOOK)
    for second in range(31):
        watch.look({1: 5, 2: second // 5, **({3: 1} if second >= 10 else {})}, float(second))
    assert [watch.life(number) for number in (1, 2, 3)] == [Life.DEAD, Life.LIVE, Life.UNKNOWN]


LOOKS = st.lists(
    st.one_of(
        st.none(),
        st.tuples(
            st.floats(0.0, 20.0),
            st.dictionaries(st.integers(1, 3), st.integers(0, 2), max_size=3),
        ),
    ),
    max_size=80,
)


@given(LOOKS)
def test_whatever_is_seen_a_session_is_what_its_own_looks_say(steps):
    """Compared with a count over the whole history, done in the plainest way."""
    watch = SessionWatch(10.0, LOOK)
    now = 0.0
    history: list[tuple[float, dict[int, int]] | None] = []
    for step in steps:
        if step is None:
            watch.missed()
            history.append(None)
        else:
            now += step[0]
            watch.look(step[1], now)
            history.append((now, step[1]))
        for session in (1, 2, 3):
            assert watch.life(session) is plainly(history, session)


def plainly(history: list[tuple[float, dict[int, int]] | None], session: int) -> Life:
    life, silent, beat = Life.UNKNOWN, 0.0, None
    moved = False
    before: float | None = None
    for look in history:
        if look is None:
            before = None
            continue
        now, beats = look
        if session not in beats:
            silent, beat, moved = 0.0, None, False
        elif beat is None:
            beat, silent = beats[session], 0.0
        elif beats[session] != beat:
            beat, silent, moved = beats[session], 0.0, True
        elif before is not None:
            silent += min(now - before, 2 * LOOK)
        before = now
    if silent >= 10.0:
        life = Life.DEAD
    elif moved:
        life = Life.LIVE
    return life


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=200), st.floats(0.1, 4.9))
def test_who_beats_in_time_is_never_dead_however_late_the_observer_looks(pauses, every):
    watch = SessionWatch(LEASE, LOOK)
    now = 0.0
    for pause in pauses:
        now += pause
        watch.look({1: int(now / every)}, now)
        assert watch.life(1) is not Life.DEAD


@given(st.lists(st.tuples(st.floats(0.0, 1000.0), st.booleans()), max_size=29))
def test_a_lease_takes_a_number_of_looks_whatever_the_clock_says(steps):
    """Fifteen intervals of twice the look at least: no jump of the clock ends a lease by itself."""
    watch = SessionWatch(LEASE, LOOK)
    now, counted = 0.0, 0
    answered = False
    for pause, fails in steps:
        now += pause
        if fails:
            watch.missed()
        else:
            counted += answered
            watch.look({1: 5}, now)
        answered = not fails
        if counted < 15:
            assert watch.life(1) is Life.UNKNOWN
