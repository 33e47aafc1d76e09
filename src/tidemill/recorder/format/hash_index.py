"""An index from hashes to the row groups that contain them; it takes about three bytes per distinct value.

The upper bits of a hash select an entry of `starts`; the next 16 bits are searched in that bucket's sorted entries. A
match may belong to another value with the same hash, so readers must check the rows. All numbers are little-endian.
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
#: Values are hashed in chunks of this size.
_HASHED = 10_000
#: A row group's number is stored in one byte.
MAX_GROUPS = 256


def hash_value(value: bytes) -> int:
    """Return the hash by which a value is indexed."""
    return zlib.crc32(value)


def hash_values(values: pa.Array) -> pa.Array:
    """Return the hashes of a column of bytes; null where the value is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = array.array("I")
    for at in range(0, len(values), _HASHED):  # chunks, because Python objects take ten times the memory of the column
        numbers.extend(map(zlib.crc32, pc.fill_null(values[at : at + _HASHED], b"").to_pylist()))
    hashes = pa.Array.from_buffers(pa.uint32(), len(values), [None, pa.py_buffer(numbers)])
    return pc.if_else(values.is_valid(), hashes, pa.scalar(None, pa.uint32())) if values.null_count else hashes


def build_index(hashes: Sequence[pa.Array]) -> bytes:
    """Return the index of hashes, given as one array (uint32) per row group; nulls are not indexed."""
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
    """Return the stable sort order of shortened hashes.

    This is a radix sort from the lowest bits up: Arrow sorts numbers below 4,096 by counting, and larger ones by
    comparison, which takes ten times as long.
    """
    import pyarrow.compute as pc

    order = None
    for start, bits in ((0, _LOW_BITS // 2), (_LOW_BITS // 2, _LOW_BITS // 2), (_LOW_BITS, _BUCKET_BITS)):
        digits = _cut_bits(short, start, bits)
        later = pc.array_sort_indices(digits if order is None else digits.take(order))
        order = later if order is None else order.take(later)
    return order


def _cut_bits(numbers: pa.Array, start: int, count: int) -> pa.Array:
    import pyarrow.compute as pc

    return pc.bit_wise_and(pc.shift_right(numbers, _u32(start)), _u32((1 << count) - 1))


def _find_starts(buckets: pa.Array) -> bytes:
    """Return the start of each bucket and the end of the last one, as uint32."""
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
    """Reads an index.

    Args:
        data: The file that contains it; only small parts of it are read.
        at: The position of the index in the file.
        size: The length of the index.

    Raises:
        ValueError: The data is not an index.
    """

    def __init__(self, data: ByteView, at: int, size: int) -> None:
        head = 4 * (_BUCKETS + 1)
        if size < head or (size - head) % 3 or len(data) < at + size:
            raise ValueError("not an index")
        count = (size - head) // 3
        self._data = data
        self._starts = data[at : at + head].cast("I")
        self._low_at = at + head
        self._groups_at = at + head + 2 * count
        if self._starts[_BUCKETS] != count:
            raise ValueError("the index is truncated")

    def find_groups(self, value: bytes) -> list[int]:
        """Return the row groups that may contain a value, in order; false matches are rare."""
        short = hash_value(value) >> _UNUSED_BITS
        bucket, low = short >> _LOW_BITS, short & ((1 << _LOW_BITS) - 1)
        start, end = self._starts[bucket], self._starts[bucket + 1]
        if not 0 <= start <= end:
            raise ValueError("the index is damaged")
        entries = self._data[self._low_at + 2 * start : self._low_at + 2 * end].cast("H")
        first, last = bisect.bisect_left(entries, low), bisect.bisect_right(entries, low)
        return sorted(set(self._data[self._groups_at + start + first : self._groups_at + start + last]))
