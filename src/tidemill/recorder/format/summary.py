"""What a sealed segment has, without looking at its rows: the head of its index file.

An index file is `MAGIC`, the length of the head and the checksum of everything after it, the head as JSON, and the
indexes one after the other. It is there before its segment is, so a reader that sees a segment can rely on it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import msgspec

from tidemill.recorder.format.file_view import ByteView
from tidemill.recorder.format.frames import DamagedSegmentError
from tidemill.recorder.format.hash_index import HashIndex
from tidemill.recorder.format.schema import RowTable

MAGIC = b"TIDEIDX1"
_HEADER = struct.Struct("<8sII")


class OffsetSpan(msgspec.Struct, frozen=True, array_like=True):
    """The offsets of a partition from the first to the last, and how many rows they have."""

    topic: str
    partition: int
    first: int
    last: int
    rows: int


class SegmentSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is in a segment.

    Attributes:
        table: What its rows are about.
        rows: How many there are.
        first_at: The time of the earliest row in UTC microseconds: when a message was resolved, a task ended.
        last_at: That of the latest.
        longest_us: The longest time from consumed to resolved, or from the start to the end of a task.
        kinds: Rows by status (of messages) or kind (of tasks).
        spans: The offsets.
        indexes: The lengths of the indexes, by name and in the order in which they are in the file.
    """

    table: RowTable
    rows: int
    first_at: int
    last_at: int
    longest_us: int
    kinds: dict[str, int]
    spans: list[OffsetSpan]
    indexes: dict[str, int] = {}

    def has_offset(self, topic: str | None, partition: int | None, first: int | None, last: int | None) -> bool:
        """Tell whether a row of these offsets may be in it; None: any."""
        return any(
            (topic is None or span.topic == topic)
            and (partition is None or span.partition == partition)
            and (first is None or span.last >= first)
            and (last is None or span.first <= last)
            for span in self.spans
        )


def pack_index_file(summary: SegmentSummary, indexes: Mapping[str, bytes]) -> bytes:
    """Return the bytes of an index file."""
    lengths = {name: len(index) for name, index in indexes.items()}
    head = msgspec.json.encode(msgspec.structs.replace(summary, indexes=lengths))
    rest = b"".join((head, *indexes.values()))
    return _HEADER.pack(MAGIC, len(head), zlib.crc32(rest)) + rest


def unpack_index_file(data: ByteView) -> tuple[SegmentSummary, dict[str, HashIndex]]:
    """Return what is in an index file.

    Raises:
        DamagedSegmentError: It is not what was written.
    """
    if len(data) < _HEADER.size:
        raise DamagedSegmentError("the index is empty")
    magic, length, checksum = _HEADER.unpack(data[: _HEADER.size])
    rest = data[_HEADER.size :]
    if magic != MAGIC or zlib.crc32(rest) != checksum:
        raise DamagedSegmentError("wrong checksum of the index")
    try:
        summary = msgspec.json.decode(rest[:length], type=SegmentSummary)
        indexes, at = {}, _HEADER.size + length
        for name, size in summary.indexes.items():
            indexes[name] = HashIndex(data, at, size)
            at += size
    except (msgspec.MsgspecError, ValueError) as error:
        raise DamagedSegmentError(f"unknown index: {error}") from error
    return summary, indexes
