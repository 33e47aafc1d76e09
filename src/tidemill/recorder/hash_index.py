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

from tidemill.recorder.file_view import ByteView

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
    parts = []
    for group, some in enumerate(hashes):
        short = pc.shift_right(pc.cast(some.drop_null(), pa.uint64()), _u64(_UNUSED_BITS))
        parts.append(pc.bit_wise_or(pc.shift_left(short, _u64(8)), _u64(group)))
    entries = pa.concat_arrays(parts) if parts else pa.array([], pa.uint64())
    entries = entries.take(pc.array_sort_indices(entries))
    if len(entries) > 1:
        is_new = pc.not_equal(entries[1:], entries[:-1])
        entries = pa.concat_arrays([entries[:1], entries[1:].filter(is_new)])
    low = pc.cast(pc.bit_wise_and(pc.shift_right(entries, _u64(8)), _u64((1 << _LOW_BITS) - 1)), pa.uint16())
    groups = pc.cast(pc.bit_wise_and(entries, _u64(0xFF)), pa.uint8())
    starts = _find_starts(pc.shift_right(entries, _u64(8 + _LOW_BITS)))
    return b"".join((starts, _bytes_of(low), _bytes_of(groups)))


def _find_starts(buckets: pa.Array) -> bytes:
    """Return where each bucket begins, and the end of the last one, as uint32."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return _bytes_of(pc.cast(pc.search_sorted(buckets, pa.array(range(_BUCKETS + 1), pa.uint64())), pa.uint32()))


def _u64(number: int) -> Any:
    import pyarrow as pa

    return pa.scalar(number, pa.uint64())


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
