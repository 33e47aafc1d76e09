"""Intervals against a plain set."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.intervals import Intervals

numbers = st.integers(0, 40)
steps = st.lists(st.tuples(st.sampled_from(["add", "absorb"]), numbers, st.integers(-2, 9)), max_size=40)


@given(steps)
def test_intervals_hold_what_a_set_holds_and_never_overlap_or_touch(script: list[tuple[str, int, int]]) -> None:
    intervals, model = Intervals(), set[int]()
    for kind, number, length in script:
        if kind == "add":
            intervals.add(number, number + length)
            model |= set(range(number, number + length))
        else:
            expected = number
            while expected in model:
                expected += 1
            assert intervals.absorb(number) == expected
            model -= set(range(expected))
        pairs = intervals.list_pairs()
        assert {n for start, end in pairs for n in range(start, end)} == model
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(pairs))
        assert all(start < end for start, end in pairs)
        assert len(intervals) == len(pairs)
        assert [n for n in range(60) if n in intervals] == sorted(model)
