"""Which sessions are alive, judged by their beats alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.triggers.session_watch import SessionLife, SessionWatch

LEASE, LOOK = 30.0, 1.0


def watched(*steps: tuple[float, dict[int, int] | None]) -> SessionWatch:
    """Return a watch after reads at these times; None: the read failed."""
    watch = SessionWatch(LEASE, LOOK)
    for now, beats in steps:
        if beats is None:
            watch.note_failure()
        else:
            watch.note_beats(beats, now)
    return watch


def test_a_session_that_was_never_seen_is_unknown():
    assert watched().judge(1) is SessionLife.UNKNOWN
    assert watched((0.0, {2: 1})).judge(1) is SessionLife.UNKNOWN


def test_a_beat_that_changes_proves_that_the_session_is_live():
    assert watched((0.0, {1: 4})).judge(1) is SessionLife.UNKNOWN
    assert watched((0.0, {1: 4}), (1.0, {1: 4})).judge(1) is SessionLife.UNKNOWN
    assert watched((0.0, {1: 4}), (1.0, {1: 5})).judge(1) is SessionLife.LIVE


@pytest.mark.parametrize("moves", [False, True])
def test_a_session_is_dead_once_its_beat_was_unchanged_for_the_lease_and_not_before(moves):
    watch = watched((0.0, {1: 4 if moves else 5}))
    watch.note_beats({1: 5}, 0.0)
    for second in range(1, 30):
        watch.note_beats({1: 5}, float(second))
        assert watch.judge(1) is (SessionLife.LIVE if moves else SessionLife.UNKNOWN)
    watch.note_beats({1: 5}, 30.0)
    assert watch.judge(1) is SessionLife.DEAD


def test_a_pause_of_the_observer_counts_for_at_most_two_intervals():
    watch = watched((0.0, {1: 5}), (1_000_000.0, {1: 5}))
    assert watch.judge(1) is SessionLife.UNKNOWN
    for second in range(1, 28):
        watch.note_beats({1: 5}, 1_000_000.0 + second)
    assert watch.judge(1) is SessionLife.UNKNOWN
    watch.note_beats({1: 5}, 1_000_028.0)
    assert watch.judge(1) is SessionLife.DEAD


def test_the_time_around_a_failed_read_does_not_count():
    steps: list[tuple[float, dict[int, int] | None]] = [(0.0, {1: 5})]
    for second in range(1, 200):
        steps.append((float(second), None if second % 2 else {1: 5}))
    assert watched(*steps).judge(1) is SessionLife.UNKNOWN


def test_a_beat_that_changes_again_revives_a_dead_session():
    steps = [(float(second), {1: 5}) for second in range(31)]
    assert watched(*steps).judge(1) is SessionLife.DEAD
    assert watched(*steps, (31.0, {1: 6})).judge(1) is SessionLife.LIVE


def test_a_session_that_has_ended_is_forgotten_and_the_others_are_not():
    steps = [(float(second), {1: 5, 2: 5}) for second in range(31)]
    watch = watched(*steps, (31.0, {2: 5}))
    assert (watch.judge(1), watch.judge(2)) == (SessionLife.UNKNOWN, SessionLife.DEAD)
    watch.note_beats({1: 5, 2: 5}, 32.0)
    assert (watch.judge(1), watch.judge(2)) == (SessionLife.UNKNOWN, SessionLife.DEAD)


def test_a_clock_that_stands_still_or_runs_backwards_counts_nothing():
    watch = watched(*[(-float(second), {1: 5}) for second in range(100)])
    assert watch.judge(1) is SessionLife.UNKNOWN


def test_each_session_has_a_lease_of_its_own():
    watch = SessionWatch(LEASE, LOOK)
    for second in range(31):
        watch.note_beats({1: 5, 2: second // 5, **({3: 1} if second >= 10 else {})}, float(second))
    assert [watch.judge(number) for number in (1, 2, 3)] == [SessionLife.DEAD, SessionLife.LIVE, SessionLife.UNKNOWN]


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
def test_a_session_is_judged_by_its_own_beats_alone(steps):
    """Compared with a naive count over the whole history."""
    watch = SessionWatch(10.0, LOOK)
    now = 0.0
    history: list[tuple[float, dict[int, int]] | None] = []
    for step in steps:
        if step is None:
            watch.note_failure()
            history.append(None)
        else:
            now += step[0]
            watch.note_beats(step[1], now)
            history.append((now, step[1]))
        for session in (1, 2, 3):
            assert watch.judge(session) is plainly(history, session)


def plainly(history: list[tuple[float, dict[int, int]] | None], session: int) -> SessionLife:
    life, silent, beat = SessionLife.UNKNOWN, 0.0, None
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
        life = SessionLife.DEAD
    elif moved:
        life = SessionLife.LIVE
    return life


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=200), st.floats(0.1, 4.9))
def test_a_session_that_beats_in_time_is_never_dead_however_late_the_observer_is(pauses, every):
    watch = SessionWatch(LEASE, LOOK)
    now = 0.0
    for pause in pauses:
        now += pause
        watch.note_beats({1: int(now / every)}, now)
        assert watch.judge(1) is not SessionLife.DEAD


@given(st.lists(st.tuples(st.floats(0.0, 1000.0), st.booleans()), max_size=29))
def test_a_lease_takes_several_reads_whatever_the_clock_says(steps):
    """At least fifteen intervals of twice `look_seconds`: no jump of the clock ends a lease by itself."""
    watch = SessionWatch(LEASE, LOOK)
    now, counted = 0.0, 0
    answered = False
    for pause, fails in steps:
        now += pause
        if fails:
            watch.note_failure()
        else:
            counted += answered
            watch.note_beats({1: 5}, now)
        answered = not fails
        if counted < 15:
            assert watch.judge(1) is SessionLife.UNKNOWN
