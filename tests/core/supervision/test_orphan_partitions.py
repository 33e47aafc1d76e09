"""A partition without an owner is reported after the patience, not sooner, and not again at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.supervision.orphan_partitions import OwnerWatch

PATIENCE = 10.0
looks = st.lists(
    st.tuples(st.floats(0.0, 8.0), st.booleans(), st.frozensets(st.integers(0, 3))), min_size=1, max_size=40
)


@given(looks)
def test_a_reported_partition_had_no_owner_at_every_check(steps: list[tuple[float, bool, frozenset[int]]]) -> None:
    watch, now = OwnerWatch(PATIENCE), 0.0
    without: dict[int, float] = {}
    for seconds, settled, owned in steps:
        now += seconds
        named = watch.check(now, settled, set(range(4)), owned)
        without = {n: without.get(n, now) for n in range(4) if settled and n not in owned}
        due = [n for n, since in without.items() if now - since >= PATIENCE]
        assert named == sorted(due)
        if named:
            without = dict.fromkeys(without, now)


def test_a_rebalance_starts_the_patience_over() -> None:
    watch = OwnerWatch(PATIENCE)
    assert watch.check(0.0, True, {0, 1}, {1}) == []
    assert watch.check(9.0, False, {0, 1}, set()) == []
    assert watch.check(10.0, True, {0, 1}, {1}) == []
    assert watch.orphans == []
    assert watch.check(20.0, True, {0, 1}, {1}) == [0]
    assert watch.check(21.0, True, {0, 1}, {1}) == []
    assert watch.orphans == [0], "it still has no owner"
    assert watch.check(22.0, True, {0, 1}, {0, 1}) == []
    assert watch.orphans == []


def test_a_partition_that_no_longer_exists_is_not_reported() -> None:
    watch = OwnerWatch(PATIENCE)
    assert watch.check(0.0, True, {0, 1}, {0}) == []
    assert watch.check(20.0, True, {0}, {0}) == []
