"""Parts of columns: a compact form of some hundred rows, until thousands of rows become Arrow columns at once.

An Arrow call takes as long as packing a hundred integers, so a part is plain bytes, or a value and its number of
repetitions, wherever possible. Invariant: a value that does not fit its column raises when its part is made, so that
only the rows of that part are lost.
"""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

from tidemill.pipeline.reports.columns import encode_words, is_constant, repeat_word

if TYPE_CHECKING:
    import pyarrow as pa

ValueT = TypeVar("ValueT")

#: The format of 64-bit integers: `struct` handles the native type three times as fast.
_LONG = "l" if struct.calcsize("l") == 8 else "q"

#: Packers for up to this many numbers are cached.
_MAX_KEPT = 1_000

#: Packed numbers of one type; an Arrow array if some are missing.
Numbers: TypeAlias = "bytes | pa.Array"
#: A word, or None, and its number of repetitions; a dictionary array if there are several words.
Words: TypeAlias = "tuple[str | None, int] | pa.DictionaryArray"
#: The number of rows without content (null, or an empty list or map); an Arrow array if some have content.
Values: TypeAlias = "int | pa.Array"


class Packed(NamedTuple):
    """Texts, bytes or lists of offsets, one per row: the length of each, and the concatenated contents."""

    lengths: bytes
    data: bytes


#: A part of any column.
Part: TypeAlias = "bytes | tuple[str | None, int] | int | Packed | pa.Array"


class NumberFormat:
    """Packs numbers of one type.

    Args:
        code: The `struct` code of the type.
        name: The Arrow name of the type.
    """

    __slots__ = ("_code", "_name", "_pack", "_packs")

    def __init__(self, code: str, name: str) -> None:
        self._code = code
        self._name = name
        self._pack = struct.Struct(code).pack
        #: By count, because `struct` clears its own cache after a hundred formats.
        self._packs: dict[int, Callable[..., bytes]] = {}

    def pack_present(self, values: Sequence[float]) -> bytes:
        """Return packed numbers, one per row; there must be a row.

        Raises:
            struct.error: A value is not a number of this type.
        """
        count = len(values)
        if is_constant(values):
            return self._pack(values[0]) * count
        if count > _MAX_KEPT:
            return struct.pack(f"{count}{self._code}", *values)
        pack = self._packs.get(count)
        if pack is None:
            pack = self._packs[count] = struct.Struct(f"{count}{self._code}").pack
        return pack(*values)

    def repeat(self, value: float, count: int) -> bytes:
        """Return `value` packed `count` times."""
        return self._pack(value) * count

    def pack(self, values: Sequence[float | None]) -> Numbers:
        """Return packed numbers, one per row; there must be a row."""
        try:
            return self.pack_present(cast("Sequence[float]", values))
        except struct.error:  # some are None, or invalid; Arrow handles the former and reports the latter
            import pyarrow as pa

            return pa.array(values, pa.type_for_alias(self._name))

    def spread(self, values: Sequence[float | None], sizes: Sequence[int]) -> Numbers:
        """Return each value packed as many times as its size says."""
        try:
            return b"".join([self._pack(value) * size for value, size in zip(values, sizes, strict=True)])
        except struct.error:
            return self.pack(list(spread(values, sizes)))


#: Offsets and times.
LONGS = NumberFormat(_LONG, "int64")
#: Partition numbers and counts.
COUNTS = NumberFormat("i", "int32")
#: Durations.
SPANS = NumberFormat("d", "float64")


def spread(values: Iterable[ValueT], sizes: Iterable[int]) -> Iterator[ValueT]:
    """Yield each value as many times as its size says."""
    return itertools.chain.from_iterable(map(itertools.repeat, values, sizes))


def pack_words(words: Sequence[str | None]) -> Words:
    """Return packed words, one per row; there must be at least one row."""
    return (words[0], len(words)) if is_constant(words) else encode_words(words)


def spread_words(words: Sequence[str], sizes: Sequence[int]) -> Words:
    """Return each word packed as many times as its size says."""
    return (words[0], sum(sizes)) if is_constant(words) else encode_words(list(spread(words, sizes)))


def are_nothing(values: Sequence[Any]) -> bool:
    """Return whether all values (at least one) are None or empty lists."""
    return (values[0] is None or values[0] == []) and is_constant(values)


def pack_bytes(values: Sequence[bytes | None]) -> Packed | Values:
    """Return packed bytes or None, one per row; there must be at least one row."""
    if are_nothing(values):
        return len(values)
    if set(map(type, values)) == {bytes}:
        present = cast("Sequence[bytes]", values)
        return Packed(_pack_lengths(present), b"".join(present))
    import pyarrow as pa

    return pa.array(values, pa.binary())


def pack_texts(texts: Sequence[str]) -> Packed | pa.Array:
    """Return packed texts, one per row; there must be at least one row."""
    joined = "".join(texts)
    if joined.isascii():
        return Packed(_pack_lengths(texts), joined.encode())
    import pyarrow as pa

    return pa.array(texts, pa.string())


def pack_lists(lists: Sequence[Sequence[int]], most: int) -> Packed:
    """Return packed lists of 64-bit integers, one per row; there must be at least one row.

    Args:
        lists: The lists.
        most: The maximum length; longer lists are cut.
    """
    lengths = list(map(len, lists))
    if is_constant(lengths) and lengths[0] == 1:  # nearly always
        flat = [number for (number,) in lists]
    else:
        if max(lengths) > most:
            lists = [each[:most] for each in lists]
            lengths = list(map(len, lists))
        flat = list(itertools.chain.from_iterable(lists))
    return Packed(struct.pack(f"{len(lengths)}i", *lengths), struct.pack(f"{len(flat)}{_LONG}", *flat))


def _pack_lengths(values: Sequence[Sized]) -> bytes:
    return struct.pack(f"{len(values)}i", *map(len, values))


def join_parts(parts: Iterable[Part], kind: pa.DataType) -> pa.Array:
    """Join parts of a column of this type to one Arrow array; at least one part."""
    import pyarrow as pa

    arrays: list[pa.Array] = []
    for part_type, group in itertools.groupby(parts, type):
        if part_type is bytes:
            arrays.append(_read_numbers(b"".join(cast("Iterable[bytes]", group)), kind))
        elif part_type is tuple:
            runs = itertools.groupby(cast("Iterable[tuple[str | None, int]]", group), operator.itemgetter(0))
            arrays += [repeat_word(word, sum(count for _, count in run)) for word, run in runs]
        elif part_type is int:
            arrays.append(_repeat_nothing(sum(cast("Iterable[int]", group)), kind))
        elif part_type is Packed:
            arrays.append(_read_packed(list(cast("Iterable[Packed]", group)), kind))
        else:
            arrays += group
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _read_numbers(data: bytes, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    return pa.Array.from_buffers(kind, len(data) * 8 // kind.bit_width, [None, pa.py_buffer(data)])


def _read_packed(parts: Sequence[Packed], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = _read_numbers(b"".join([part.lengths for part in parts]), pa.int32())
    ends = pc.cumulative_sum_checked(pa.concat_arrays([pa.array([0], pa.int32()), lengths]))
    data = b"".join([part.data for part in parts])
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(ends, _read_numbers(data, kind.value_type))
    return pa.Array.from_buffers(kind, len(lengths), [None, ends.buffers()[1], pa.py_buffer(data)])


def _repeat_nothing(count: int, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if not pa.types.is_nested(kind):
        return pa.nulls(count, kind)
    # `repeat` takes longer for nested types than for all other columns together.
    ends, none = pa.repeat(pa.scalar(0, pa.int32()), count + 1), pa.array([], pa.string())
    is_map = pa.types.is_map(kind)
    return pa.MapArray.from_arrays(ends, none, none) if is_map else pa.ListArray.from_arrays(ends, none)
