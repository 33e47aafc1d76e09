"""The recording of a worker in memory, where there is no folder for it: the newest 64 MiB.

It has what a period on disk has, under the same names: sealed segments with their indexes, frames of open ones, and a
database. One thread writes; readers of this process may look at it meanwhile.
"""

from __future__ import annotations

import collections
import sqlite3
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.config.debug_settings import DebugSettings
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
#: Of the 64 MiB, what events may take: a few hundred bytes each.
MAX_EVENTS = 50_000
#: Counts of single seconds are kept this long; those of minutes stay.
COUNT_SECONDS = 3600.0
#: What is too old is looked for this often.
TRIM_SECONDS = 60.0


class MemoryRecording:
    """Keeps what is recorded in memory.

    Args:
        group: The consumer group.
        worker: The worker's name.
        settings: How much is kept and for how long.
        policy: When segments are sealed.
        max_bytes: How much is kept.
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
        """Begin with nothing."""
        self._worker = worker
        self._policy = policy or SealPolicy()
        self._max_bytes = max_bytes
        self._max_events = min(settings.retention_max_events or MAX_EVENTS, MAX_EVENTS)
        #: What connections of this process open it by.
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
        """Return the segments, the oldest first."""
        with self._lock:
            return sorted([*self._sealed, *(self._names[table] for table in self._open)])

    def find_sealed(self, name: SegmentName) -> SealedSegment | None:
        """Return a sealed segment; None: it is gone."""
        return self._sealed.get(name)

    def list_batches(self, name: SegmentName) -> list[tuple[FrameInfo, pa.RecordBatch]]:
        """Return the batches of an open segment."""
        with self._lock:
            return list(self._open.get(name.table, ())) if self._names.get(name.table) == name else []

    def seal_leftovers(self) -> None:
        """Do nothing: memory has none."""

    def append(self, table: RowTable, frames: Sequence[tuple[FrameInfo, bytes, pa.RecordBatch]]) -> None:
        """Keep rows."""
        with self._lock:
            if table not in self._open:
                self._numbers += 1
                self._open[table], self._began[table] = [], time.monotonic()
                self._names[table] = SegmentName(self._numbers, table, sealed=False)
            self._open[table] += [(info, batch) for info, _, batch in frames]

    def add_events(self, events: Sequence[RecordedEvent]) -> None:
        """Keep events.

        Raises:
            sqlite3.Error: There is no memory for them.
        """
        self.database.add_events(events)
        if self.database.events > self._max_events:
            self.database.remove_oldest(self.database.events - self._max_events)

    def seal_full(self) -> None:
        """Seal what is full or old enough.

        Raises:
            sqlite3.Error: There is no memory for it.
        """
        for table, batches in list(self._open.items()):
            rows = sum(len(batch) for _, batch in batches)
            size = sum(batch.nbytes for _, batch in batches)
            if self._policy.is_full(rows, size, time.monotonic() - self._began[table]):
                self._seal(table, batches)

    def tick(self) -> None:
        """Seal and remove what is due.

        Raises:
            sqlite3.Error: There is no memory for it.
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
        """The size of what is kept, without events."""
        sealed: int = sum(len(segment.index) + segment.parquet.size for segment in self._sealed.values())
        opened: int = sum(batch.nbytes for batches in self._open.values() for _, batch in batches)
        return sealed + opened

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._sealed.clear()
            self._open.clear()
        try:
            self.database.close()
        except sqlite3.Error:
            return
