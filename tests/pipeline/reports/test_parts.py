"""Parts of columns: however rows are divided, joined they are what Arrow makes of all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.pipeline.reports.parts import (
    COUNTS,
    LONGS,
    SPANS,
    Part,
    join_parts,
    pack_bytes,
    pack_lists,
    pack_texts,
    pack_words,
    spread,
    spread_words,
)

WORD = pa.dictionary(pa.int32(), pa.string())
LONG = st.integers(-(2**63), 2**63 - 1)
COUNT = st.integers(-(2**31), 2**31 - 1)


def parts_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[list[Any]]]:
    """Return rows as they come: in parts, many of which have the same value throughout."""
    same = st.builds(lambda value, count: [value] * count, values, st.integers(1, 5))
    return st.lists(same | st.lists(values, min_size=1, max_size=5), min_size=1, max_size=6)


def check(pack: Callable[[Sequence[Any]], Part], parts: list[list[Any]], kind: pa.DataType) -> None:
    joined = join_parts([pack(part) for part in parts], kind)
    joined.validate(full=True)
    assert joined.type == kind
    assert joined.to_pylist() == [value for part in parts for value in part]


@given(parts_of(LONG | st.none()))
def test_offsets_and_times(parts: list[list[Any]]) -> None:
    check(LONGS.pack, parts, pa.int64())


@given(parts_of(COUNT | st.none()))
def test_counts(parts: list[list[Any]]) -> None:
    check(COUNTS.pack, parts, pa.int32())


@given(parts_of(st.floats(allow_nan=False) | st.none()))
def test_spans(parts: list[list[Any]]) -> None:
    check(SPANS.pack, parts, pa.float64())


@given(parts_of(st.text(max_size=5) | st.none()))
def test_words(parts: list[list[Any]]) -> None:
    check(pack_words, parts, WORD)


@given(parts_of(st.binary(max_size=5) | st.none()))
def test_keys_of_which_an_empty_one_is_not_a_missing_one(parts: list[list[Any]]) -> None:
    check(pack_bytes, parts, pa.binary())


@given(parts_of(st.text(max_size=5)))
def test_texts(parts: list[list[Any]]) -> None:
    check(pack_texts, parts, pa.string())


@given(parts_of(st.lists(LONG, max_size=4)))
def test_lists_of_offsets(parts: list[list[Any]]) -> None:
    check(functools.partial(pack_lists, most=4), parts, pa.list_(pa.int64()))


@given(st.lists(st.lists(LONG, max_size=4), min_size=1))
def test_of_lists_that_are_too_long_the_first_offsets_stay(lists: list[list[int]]) -> None:
    packed = pack_lists(lists, 2)
    assert join_parts([packed], pa.list_(pa.int64())).to_pylist() == [each[:2] for each in lists]


@given(st.lists(st.tuples(LONG | st.none(), st.integers(1, 4)), min_size=1))
def test_numbers_that_are_the_same_for_neighbours(runs: list[tuple[int | None, int]]) -> None:
    values, sizes = zip(*runs, strict=True)
    assert join_parts([LONGS.spread(values, sizes)], pa.int64()).to_pylist() == list(spread(values, sizes))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4)), min_size=1))
def test_words_that_are_the_same_for_neighbours(runs: list[tuple[str, int]]) -> None:
    words, sizes = zip(*runs, strict=True)
    assert join_parts([spread_words(words, sizes)], WORD).to_pylist() == list(spread(words, sizes))


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.map_(pa.string(), pa.string())])
def test_empty_lists_and_maps_are_neither_missing_nor_kept_one_by_one(kind: pa.DataType) -> None:
    some = pa.array([[], [("a", "b")]] if pa.types.is_map(kind) else [[], ["a"]], kind)
    joined = join_parts([3, some, 2], kind)
    joined.validate(full=True)
    assert joined.to_pylist() == [[], [], [], *some.to_pylist(), [], []]


@pytest.mark.parametrize("value", [2**63, "1", object()])
@pytest.mark.parametrize("others", [[], [1, 2], [1, None]])
def test_what_is_no_such_number_is_refused_when_its_part_is_made(value: object, others: list[Any]) -> None:
    with pytest.raises((pa.ArrowException, OverflowError, TypeError, ValueError)):
        LONGS.pack([*others, value])
