from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.triggers.pausable_clock import PausableClock


def test_it_continues_where_it_was_held():
    clock = PausableClock()
    assert clock.read(5.0) == 5.0
    clock.hold(10.0)
    clock.hold(12.0)
    assert clock.read(13.0) == 10.0
    clock.release(15.0)
    clock.release(16.0)
    assert clock.read(20.0) == 15.0


@given(st.lists(st.tuples(st.sampled_from(["hold", "release", "read"]), st.integers(0, 100))))
def test_it_counts_exactly_the_time_in_which_it_was_not_held(steps):
    clock, now, counted, held = PausableClock(), 0, 0, False
    for what, seconds in steps:
        now += seconds
        counted += 0 if held else seconds
        if what == "read":
            assert clock.read(now) == counted
        else:
            held = what == "hold"
            getattr(clock, what)(now)
    assert clock.read(now) == counted
