"""A reader's cache of an open segment: compressed parts of its rows, each with a summary like a sealed segment's.

Decoded rows would take ten times the memory for as long as the segment is open, in addition to the writer's. A search
decodes only the columns it needs, of the parts that may match.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.recorder.format.file_view import ByteView
from tidemill.recorder.format.frames import MAGIC, DamagedSegmentError, FrameInfo, read_frames
from tidemill.recorder.format.schema import RowTable, decode_rows
from tidemill.recorder.format.summary import SegmentSummary
from tidemill.recorder.writing.sealing import join_batches, summarize_rows

if TYPE_CHECKING:
    import pyarrow as pa

#: The approximate number of rows of a full part.
PART_ROWS = 20_000
#: More non-full parts than this are joined into one.
MAX_SMALL_PARTS = 16


class OpenPart:
    """A part of the rows of an open segment.

    Args:
        table: The table of the rows.
        rows: The rows, at least one.

    Attributes:
        summary: The summary of the rows.
    """

    __slots__ = ("_body", "_names", "summary")

    def __init__(self, table: RowTable, rows: pa.Table) -> None:
        import pyarrow as pa

        self.summary: SegmentSummary = summarize_rows(table, rows)
        self._names = rows.column_names
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        with pa.ipc.new_stream(sink, rows.schema, options=options) as stream:
            stream.write_table(rows)
        self._body = sink.getvalue().to_pybytes()

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the named columns in this order; None: all."""
        import pyarrow as pa

        wanted = None if columns is None else [self._names.index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=wanted)
        with pa.ipc.open_stream(pa.py_buffer(self._body), options=options) as stream:
            rows = stream.read_all().combine_chunks()
        return rows if columns is None else rows.select(list(columns))


class OpenRows:
    """The rows read so far from an open segment; safe for any thread."""

    def __init__(self) -> None:
        self._position = len(MAGIC)
        self._parts: list[OpenPart] = []
        self._lock = threading.Lock()

    def read_on(self, table: RowTable, data: ByteView) -> tuple[list[OpenPart], str]:
        """Read the data written since the last call; returns all parts, and a description of damage, or ''.

        Args:
            table: The table of the rows.
            data: The contents of the file.
        """
        problem = ""
        with self._lock:
            batches: list[tuple[FrameInfo, pa.RecordBatch]] = []
            count = 0
            try:
                for frame in read_frames(data, self._position):
                    batch = decode_rows(table, frame.body)
                    self._position = frame.end
                    if len(batch):
                        batches.append((frame.info, batch))
                        count += len(batch)
                    if count >= PART_ROWS:
                        self._add(table, batches)
                        batches, count = [], 0
            except (DamagedSegmentError, ValueError) as error:
                problem = str(error)  # batches before the damage are kept
            if batches:
                self._add(table, batches)
            return list(self._parts), problem

    def _add(self, table: RowTable, batches: Sequence[tuple[FrameInfo, pa.RecordBatch]]) -> None:
        self._parts.append(OpenPart(table, join_batches(table, batches)))
        small = [part for part in self._parts if part.summary.rows < PART_ROWS]
        if len(small) > MAX_SMALL_PARTS:
            full = [part for part in self._parts if part.summary.rows >= PART_ROWS]
            self._parts = [*full, OpenPart(table, _join([part.read() for part in small]))]


def _join(parts: Sequence[pa.Table]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(parts).unify_dictionaries().combine_chunks()
