"""An index from hashes to the row groups of a segment that have them: about three bytes per different value.

The upper bits of a hash are a place in `starts`, the next 16 are searched for in the sorted entries of that place. What
is found may belong to another value with the same hash: the rows say. Written little-endian.
"""

from __future__ import annotations

import array
import bisect
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidemill.recorder.format.file_view import ByteView

if TYPE_CHECKING:
    import pyarrow as pa

_BUCKET_BITS = 12
_BUCKETS = 1 << _BUCKET_BITS
_LOW_BITS = 16
_UNUSED_BITS = 32 - _BUCKET_BITS - _LOW_BITS
#: So many values are hashed at a time.
_HASHED = 10_000
#: A row group's number is one byte.
MAX_GROUPS = 256


def hash_value(value: bytes) -> int:
    """Return the hash under which a value is found."""
    return zlib.crc32(value)


def hash_values(values: pa.Array) -> pa.Array:
    """Return the hashes of a column of bytes; null where there is no value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = array.array("I")
    for at in range(0, len(values), _HASHED):  # as Python's objects, all of them would take ten times as much memory
        numbers.extend(map(zlib.crc32, pc.fill_null(values[at : at + _HASHED], b"").to_pylist()))
    hashes = pa.Array.from_buffers(pa.uint32(), len(values), [None, pa.py_buffer(numbers)])
    return pc.if_else(values.is_valid(), hashes, pa.scalar(None, pa.uint32())) if values.null_count else hashes


def build_index(hashes: Sequence[pa.Array]) -> bytes:
    """Return the index of hashes, an array (uint32) for each row group; nulls have no entry."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if len(hashes) > MAX_GROUPS:
        raise ValueError(f"a segment has at most {MAX_GROUPS} row groups, not {len(hashes)}")
    if not hashes:
        return _find_starts(pa.array([], pa.uint16()))
    counts = [len(some) - some.null_count for some in hashes]
    groups = pa.concat_arrays([pa.repeat(pa.scalar(group, pa.uint8()), count) for group, count in enumerate(counts)])
    short = pc.shift_right(pa.concat_arrays([some.drop_null() for some in hashes]), _u32(_UNUSED_BITS))
    order = _sort_short(short)
    short, groups = short.take(order), groups.take(order)
    if len(short) > 1:
        is_new = pc.or_(pc.not_equal(short[1:], short[:-1]), pc.not_equal(groups[1:], groups[:-1]))
        if not pc.all(is_new).as_py():
            is_new = pa.concat_arrays([pa.array([True]), is_new])
            short, groups = short.filter(is_new), groups.filter(is_new)
    low = pc.cast(_cut_bits(short, 0, _LOW_BITS), pa.uint16())
    starts = _find_starts(pc.cast(_cut_bits(short, _LOW_BITS, _BUCKET_BITS), pa.uint16()))
    return b"".join((starts, _bytes_of(low), _bytes_of(groups)))


def _sort_short(short: pa.Array) -> pa.Array:
    """Return the order of shortened hashes; equal ones stay as they are.

    It goes by a few bits after the other, the lowest first: Arrow counts numbers below 4,096, and compares larger ones,
    which takes ten times as long.
    """
    import pyarrow.compute as pc

    order = None
    for start, bits in ((0, _LOW_BITS // 2), (_LOW_BITS // 2, _LOW_BITS // 2), (_LOW_BITS, _BUCKET_BITS)):
        digits = _cut_bits(short, start, bits)
        later = pc.array_sort_indices(digits if order is None else digits.take(order))
        order = later if order is None else order.take(later)
    return order


def _cut_bits(numbers: pa.Array, start: int, count: int) -> pa.Array:
    """Return some of the bits of each number."""
    import pyarrow.compute as pc

    return pc.bit_wise_and(pc.shift_right(numbers, _u32(start)), _u32((1 << count) - 1))


def _find_starts(buckets: pa.Array) -> bytes:
    """Return where each bucket begins, and the end of the last one, as uint32."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return _bytes_of(pc.cast(pc.search_sorted(buckets, pa.array(range(_BUCKETS + 1), pa.uint16())), pa.uint32()))


def _u32(number: int) -> Any:
    import pyarrow as pa

    return pa.scalar(number, pa.uint32())


def _bytes_of(values: pa.Array) -> bytes:
    width = values.type.bit_width // 8
    return bytes(values.buffers()[1])[values.offset * width : (values.offset + len(values)) * width]


class HashIndex:
    """An index as it was written.

    Args:
        data: A file with it; only small parts of it are read.
        at: Where it begins.
        size: Its size.

    Raises:
        ValueError: That is not an index.
    """

    def __init__(self, data: ByteView, at: int, size: int) -> None:
        """Read where its parts are."""
        head = 4 * (_BUCKETS + 1)
        if size < head or (size - head) % 3 or len(data) < at + size:
            raise ValueError("not an index")
        count = (size - head) // 3
        self._data = data
        self._starts = data[at : at + head].cast("I")
        self._low_at = at + head
        self._groups_at = at + head + 2 * count
        if self._starts[_BUCKETS] != count:
            raise ValueError("not a whole index")

    def find_groups(self, value: bytes) -> list[int]:
        """Return the row groups that may have a value, in order; wrong ones are rare."""
        short = hash_value(value) >> _UNUSED_BITS
        bucket, low = short >> _LOW_BITS, short & ((1 << _LOW_BITS) - 1)
        start, end = self._starts[bucket], self._starts[bucket + 1]
        if not 0 <= start <= end:
            raise ValueError("not a whole index")
        entries = self._data[self._low_at + 2 * start : self._low_at + 2 * end].cast("H")
        first, last = bisect.bisect_left(entries, low), bisect.bisect_right(entries, low)
        return sorted(set(self._data[self._groups_at + start + first : self._groups_at + start + last]))
