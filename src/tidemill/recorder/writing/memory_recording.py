"""A worker's recording in memory, used if it cannot be written to disk: the newest 64 MiB.

It has the contents of a period on disk, under the same names: sealed segments with their indexes, batches of open ones,
and a database. One thread writes; other threads of this process may read at the same time.
"""

from __future__ import annotations

import collections
import sqlite3
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.recorder.sealing import SealPolicy
from tidemill.recorder.format.events import RecordedEvent
from tidemill.recorder.format.events_database import EventsDatabase, SegmentRow
from tidemill.recorder.format.file_layout import SegmentName
from tidemill.recorder.format.frames import FrameInfo
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.kept_memory import KeptMemory
from tidemill.recorder.writing.sealing import SealedSegment, seal

if TYPE_CHECKING:
    import pyarrow as pa

MAX_BYTES = 64 * 1024 * 1024
#: The maximum number of events, of a few hundred bytes each, within the 64 MiB.
MAX_EVENTS = 50_000
#: Counts per second are kept this long; counts per minute stay.
COUNT_SECONDS = 3600.0
#: Retention is checked this often.
TRIM_SECONDS = 60.0


class MemoryRecording:
    """Records to memory.

    Args:
        group: The consumer group.
        worker: The worker's name.
        settings: Retention and intervals.
        policy: The limits at which segments are sealed.
        max_bytes: The maximum size; the oldest segments are removed beyond it.
    """

    location = "memory"

    def __init__(
        self,
        group: str,
        worker: str,
        settings: DebugSettings,
        policy: SealPolicy | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._worker = worker
        self._policy = policy or SealPolicy()
        self._max_bytes = max_bytes
        self._max_events = min(settings.retention_max_events or MAX_EVENTS, MAX_EVENTS)
        #: The URI by which connections of this process open the database.
        self.database_uri = f"file:tidemill-{id(self):x}-{time.monotonic_ns():x}?mode=memory&cache=shared"
        self.database = EventsDatabase(
            self.database_uri, group, worker, time.time_ns() // 1000, keep_hours=settings.retention_hours
        )
        self._keep_seconds = settings.retention_hours * 3600
        self._trim_at = 0.0
        self._lock = threading.Lock()
        self._numbers = 0
        self._open: dict[RowTable, list[tuple[FrameInfo, pa.RecordBatch]]] = {}
        self._names: dict[RowTable, SegmentName] = {}
        self._began: dict[RowTable, float] = {}
        self._sealed: collections.OrderedDict[SegmentName, SealedSegment] = collections.OrderedDict()
        self._memory = KeptMemory()

    def list_segments(self) -> list[SegmentName]:
        """Return the segments, oldest first."""
        with self._lock:
            return sorted([*self._sealed, *(self._names[table] for table in self._open)])

    def find_sealed(self, name: SegmentName) -> SealedSegment | None:
        """Return a sealed segment; None if it was removed."""
        return self._sealed.get(name)

    def list_batches(self, name: SegmentName) -> list[tuple[FrameInfo, pa.RecordBatch]]:
        with self._lock:
            return list(self._open.get(name.table, ())) if self._names.get(name.table) == name else []

    def seal_leftovers(self) -> None:
        """Do nothing: in memory, there are no leftovers."""

    def append(self, table: RowTable, frames: Sequence[tuple[FrameInfo, bytes, pa.RecordBatch]]) -> None:
        """Store rows."""
        with self._lock:
            if table not in self._open:
                self._numbers += 1
                self._open[table], self._began[table] = [], time.monotonic()
                self._names[table] = SegmentName(self._numbers, table, sealed=False)
            self._open[table] += [(info, batch) for info, _, batch in frames]

    def add_events(self, events: Sequence[RecordedEvent]) -> None:
        """Store events.

        Raises:
            sqlite3.Error: Out of memory.
        """
        self.database.add_events(events)
        if self.database.events > self._max_events:
            self.database.remove_oldest(self.database.events - self._max_events)

    def seal_full(self) -> None:
        """Seal segments that are full or old enough.

        Raises:
            sqlite3.Error: Out of memory.
        """
        for table, batches in list(self._open.items()):
            rows = sum(len(batch) for _, batch in batches)
            size = sum(batch.nbytes for _, batch in batches)
            if self._policy.is_full(rows, size, time.monotonic() - self._began[table]):
                self._seal(table, batches)

    def tick(self) -> None:
        """Seal and remove whatever is due.

        Raises:
            sqlite3.Error: Out of memory.
        """
        self._memory.tick()
        self.seal_full()
        if time.monotonic() >= self._trim_at:
            self._trim_at = time.monotonic() + TRIM_SECONDS
            self.database.trim(time.time(), self._keep_seconds, COUNT_SECONDS)

    def _seal(self, table: RowTable, batches: list[tuple[FrameInfo, pa.RecordBatch]]) -> None:
        segment, name = seal(table, batches, self._worker), self._names[table]
        with self._lock:
            self._sealed[SegmentName(name.number, table, sealed=True)] = segment
            del self._open[table], self._names[table]
        self._memory.note_use()
        size = len(segment.index) + segment.parquet.size
        self.database.add_segment(SegmentRow(name.stem, segment.summary, size, time.time_ns() // 1000))
        while self.size_bytes > self._max_bytes and self._sealed:
            with self._lock:
                gone, _ = self._sealed.popitem(last=False)
            self.database.remove_segment(gone.stem)

    @property
    def size_bytes(self) -> int:
        """The size of the recording without its events."""
        sealed: int = sum(len(segment.index) + segment.parquet.size for segment in self._sealed.values())
        opened: int = sum(batch.nbytes for batches in self._open.values() for _, batch in batches)
        return sealed + opened

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._sealed.clear()
            self._open.clear()
        try:
            self.database.close()
        except sqlite3.Error:
            return
