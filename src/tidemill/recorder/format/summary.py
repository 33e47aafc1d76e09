"""The summary of a sealed segment, in the head of its index file, so that readers can skip segments without reading
rows.

An index file contains `MAGIC`, the length of the head, the checksum of everything that follows, the head as JSON, and
the indexes one after another. It is written before its segment, so a reader that sees a segment can rely on its index.
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
    """The first and last offset of a partition in a segment, and the number of its rows."""

    topic: str
    partition: int
    first: int
    last: int
    rows: int


class SegmentSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contents of a segment.

    Attributes:
        table: The table of its rows.
        rows: The number of rows.
        first_at: The time of the earliest row in UTC microseconds: a message's resolution or a task's end.
        last_at: The time of the latest row.
        longest_us: The longest duration, from a message's consumption to its resolution, or of a task.
        kinds: The number of rows by status (messages) or kind (tasks).
        spans: The offsets by partition.
        indexes: The lengths of the indexes by name, in the order of the file.
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
        """Return whether the segment may have a row of these offsets; None matches all."""
        return any(
            (topic is None or span.topic == topic)
            and (partition is None or span.partition == partition)
            and (first is None or span.last >= first)
            and (last is None or span.first <= last)
            for span in self.spans
        )


def pack_index_file(summary: SegmentSummary, indexes: Mapping[str, bytes]) -> bytes:
    lengths = {name: len(index) for name, index in indexes.items()}
    head = msgspec.json.encode(msgspec.structs.replace(summary, indexes=lengths))
    rest = b"".join((head, *indexes.values()))
    return _HEADER.pack(MAGIC, len(head), zlib.crc32(rest)) + rest


def unpack_index_file(data: ByteView) -> tuple[SegmentSummary, dict[str, HashIndex]]:
    """Return the summary and the indexes of an index file.

    Raises:
        DamagedSegmentError: The file is damaged or incomplete.
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
