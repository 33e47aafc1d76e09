"""Makes Arrow columns of repeated words, and of times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

#: Producers can set any timestamp; larger ones do not fit into microseconds and are ignored.
MAX_TIMESTAMP = 2**63 // 1000

if TYPE_CHECKING:
    import pyarrow as pa


def convert_timestamps(column: pa.Array) -> pa.Array:
    """Convert milliseconds to microseconds; null if a timestamp is missing or out of range."""
    import pyarrow as pa
    import pyarrow.compute as pc

    bounds = pc.min_max(column).as_py()
    converted = pc.multiply(column, 1000)
    if bounds["min"] >= 0 and bounds["max"] < MAX_TIMESTAMP:
        return converted
    is_real = pc.and_(pc.greater_equal(column, 0), pc.less(column, MAX_TIMESTAMP))
    return pc.if_else(is_real, converted, pa.scalar(None, pa.int64()))


def is_constant(values: Sequence[object]) -> bool:
    """Return whether the values are all the same; False if there are none."""
    # Compare the last value first: ascending numbers are then not compared one by one.
    return bool(values) and values[0] == values[-1] and values.count(values[0]) == len(values)


def encode_words(words: Sequence[str | None]) -> pa.DictionaryArray:
    """Dictionary-encode a column of repeated words."""
    import pyarrow as pa

    if is_constant(words):
        return repeat_word(words[0], len(words))
    known: dict[str, int] = {}
    codes: list[int | None] = [None if word is None else known.setdefault(word, len(known)) for word in words]
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(list(known), pa.string()))


def repeat_word(word: str | None, count: int) -> pa.DictionaryArray:
    """Return a column with one word (None: null) in every row."""
    import pyarrow as pa

    codes = pa.repeat(pa.scalar(None if word is None else 0, pa.int32()), count)
    return pa.DictionaryArray.from_arrays(codes, pa.array([] if word is None else [word], pa.string()))
