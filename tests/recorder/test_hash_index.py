"""Which row groups a value is in."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.recorder.format.hash_index import MAX_GROUPS, HashIndex, build_index, hash_value, hash_values

VALUES = st.one_of(st.none(), st.binary(max_size=3), st.sampled_from([b"", b"a", b"order-1"]))


def build(groups: Sequence[Sequence[bytes | None]]) -> bytes:
    return build_index([hash_values(pa.array(values, pa.binary())) for values in groups])


def read(index: bytes) -> HashIndex:
    return HashIndex(memoryview(index), 0, len(index))


@given(st.lists(st.lists(VALUES, max_size=20), max_size=4))
def test_each_value_is_found_in_the_groups_that_have_it(groups: list[list[bytes | None]]) -> None:
    index = build(groups)
    for value in {value for values in groups for value in values if value is not None}:
        assert read(index).find_groups(value) == [n for n, values in enumerate(groups) if value in values]
    entries = {(hash_value(value) >> 4, n) for n, values in enumerate(groups) for value in values if value is not None}
    assert len(index) == len(build([])) + 3 * len(entries)


def test_many_values_are_found_and_others_hardly_ever() -> None:
    rng = random.Random(1)
    groups = [[rng.randbytes(8) for _ in range(8_192)] for _ in range(5)]
    index = read(build(groups))
    for n, values in enumerate(groups):
        assert all(n in index.find_groups(value) for value in values)
    assert sum(bool(index.find_groups(rng.randbytes(8))) for _ in range(10_000)) < 20


def test_more_groups_than_an_entry_can_name_are_refused() -> None:
    assert read(build([[b"x"]] * MAX_GROUPS)).find_groups(b"x") == list(range(MAX_GROUPS))
    with pytest.raises(ValueError, match="at most 256 row groups, not 257"):
        build([[b"x"]] * (MAX_GROUPS + 1))
