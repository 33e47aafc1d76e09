"""Lanes that stand still are named once, and only those."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.pipeline.standstill import StandstillWatch

STALL = 10.0
checks = st.lists(
    st.tuples(st.floats(0.0, 8.0), st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), max_size=3)), max_size=40
)


@given(checks)
def test_a_lane_stands_still_if_its_head_was_the_same_for_the_whole_time(
    steps: list[tuple[float, dict[str, int]]],
) -> None:
    watch: StandstillWatch[str] = StandstillWatch(STALL)
    now, seen, before = 0.0, [], set[str]()
    for seconds, heads in steps:
        now += seconds
        seen.append((now, heads))
        expected = {}
        for lane, head in heads.items():
            since = now
            for at, then in reversed(seen):
                if then.get(lane) != head:
                    break
                since = at
            if now - since >= STALL:
                expected[lane] = since

        found = watch.check(now, heads)

        assert found.since == expected
        assert found.heads.keys() == heads.keys()
        assert {lane: at for lane, at in found.heads.items() if now - at >= STALL} == expected
        assert set(found.begun) == expected.keys() - before, "each is named once"
        assert set(found.over) == before - expected.keys()
        before = set(expected)


def test_a_lane_whose_commit_moves_slowly_does_not_stand_still() -> None:
    watch: StandstillWatch[str] = StandstillWatch(STALL)
    assert not any(watch.check(9.0 * step, {"a": step}).since for step in range(10))


def test_a_lane_that_stands_still_again_is_named_again() -> None:
    watch: StandstillWatch[str] = StandstillWatch(STALL)
    watch.check(0.0, {"a": 1})
    assert watch.check(10.0, {"a": 1}).begun == ("a",)
    assert watch.check(11.0, {"a": 2}).over == ("a",)
    assert watch.check(20.0, {"a": 2}).begun == ()
    assert watch.check(21.0, {"a": 2}).begun == ("a",)
