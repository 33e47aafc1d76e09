"""A reader's view of the segments of a period, on disk or in memory, with bounded caches.

Invariant: a store never writes and never waits for a writer. A missing file was removed by retention; its
`FileNotFoundError` is ignored by readers.
"""

from __future__ import annotations

import collections
import sqlite3
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import structlog

from tidemill.recorder.format.file_layout import Period, SegmentName
from tidemill.recorder.format.file_view import FileView
from tidemill.recorder.format.frames import DamagedSegmentError
from tidemill.recorder.format.hash_index import HashIndex
from tidemill.recorder.format.read_database import check_version, open_database
from tidemill.recorder.format.summary import SegmentSummary, unpack_index_file
from tidemill.recorder.reading.open_rows import OpenPart, OpenRows
from tidemill.recorder.reading.row_filter import WORDS
from tidemill.recorder.writing.memory_recording import MemoryRecording
from tidemill.recorder.writing.sealing import SealedSegment, join_batches, make_index

if TYPE_CHECKING:
    import pyarrow.parquet as pq

log = structlog.get_logger(__name__)

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")

#: The metadata of a Parquet file takes about 300 kB of memory, an index 16 kB; each has a file descriptor.
MAX_FILES = 16
MAX_INDEXES = 128
#: A summary takes a few kB.
MAX_SUMMARIES = 4096


class RecentlyUsed(Generic[KeyT, ValueT]):
    """A cache of the most recently used values; safe for any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[KeyT, ValueT] = collections.OrderedDict()

    def find(self, key: KeyT, make: Callable[[], ValueT]) -> ValueT:
        """Return the cached value, or make and cache it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        value = make()
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return value


class SegmentStore(Protocol):
    """The segments of a period."""

    @property
    def recording(self) -> str:
        """The name of its worker's folder."""

    @property
    def location(self) -> str:
        """A unique name: the worker's folder and the period."""

    def list_segments(self) -> list[SegmentName]:
        """Return the segments, oldest first."""

    def list_missing(self) -> list[SegmentName]:
        """Return the sealed segments that have an index but no rows."""

    def summarize(self, name: SegmentName) -> SegmentSummary:
        """Return the summary of a sealed segment."""

    def find_index(self, name: SegmentName, index: str) -> HashIndex:
        """Return an index of a sealed segment."""

    def open_rows(self, name: SegmentName) -> pq.ParquetFile:
        """Return the rows of a sealed segment."""

    def list_parts(self, name: SegmentName) -> tuple[Sequence[OpenPart], str]:
        """Return the rows of an open segment, and a description of damage, or ''."""

    def connect(self) -> sqlite3.Connection:
        """Return a read-only connection to the database."""


class StoreCache:
    """The caches of a reader of files."""

    def __init__(self) -> None:
        self.summaries: RecentlyUsed[Path, SegmentSummary] = RecentlyUsed(MAX_SUMMARIES)
        self.indexes: RecentlyUsed[Path, dict[str, HashIndex]] = RecentlyUsed(MAX_INDEXES)
        self.files: RecentlyUsed[Path, pq.ParquetFile] = RecentlyUsed(MAX_FILES)
        self.opened: RecentlyUsed[Path, OpenRows] = RecentlyUsed(8)


class DiskStore:
    """The segments of a period on disk.

    Args:
        period: The period.
        cache: The caches.
    """

    def __init__(self, period: Period, cache: StoreCache) -> None:
        self.period = period
        self._cache = cache

    @property
    def recording(self) -> str:
        return self.period.worker_folder.name

    @property
    def location(self) -> str:
        return f"{self.recording}/{self.period.name}"

    def list_segments(self) -> list[SegmentName]:
        return self.period.list_segments()

    def list_missing(self) -> list[SegmentName]:
        return self.period.list_missing()

    def summarize(self, name: SegmentName) -> SegmentSummary:
        path = self.period.path_of(name, "idx")
        return self._cache.summaries.find(path, lambda: self._read_index(name)[0])

    def find_index(self, name: SegmentName, index: str) -> HashIndex:
        path = self.period.path_of(name, "idx")
        return self._cache.indexes.find(path, lambda: self._read_index(name)[1])[index]

    def _read_index(self, name: SegmentName) -> tuple[SegmentSummary, dict[str, HashIndex]]:
        """Return the contents of an index file; a missing or damaged one is rebuilt in memory from its segment."""
        path = self.period.path_of(name, "idx")
        try:
            return unpack_index_file(FileView(path))
        except (FileNotFoundError, DamagedSegmentError) as error:
            problem = error
        file = self.open_rows(name)  # raises FileNotFoundError if retention has removed both
        log.warning(
            "the index of a recorded segment cannot be read; it is rebuilt in memory",
            path=str(path),
            error=str(problem),
        )
        return unpack_index_file(memoryview(make_index(name.table, file.read(use_threads=False).combine_chunks())[1]))

    def open_rows(self, name: SegmentName) -> pq.ParquetFile:
        path = self.period.path_of(name, "parquet")
        return self._cache.files.find(path, lambda: _open_file(name, FileView(path)))

    def list_parts(self, name: SegmentName) -> tuple[Sequence[OpenPart], str]:
        path = self.period.path_of(name, "open")
        view = FileView(path)
        return self._cache.opened.find(path, OpenRows).read_on(name.table, view)

    def connect(self) -> sqlite3.Connection:
        return open_database(self.period)


class MemoryStore:
    """The segments of a recording in memory.

    Args:
        recording: The name that a worker's folder would have.
        memory: The recording.
    """

    def __init__(self, recording: str, memory: MemoryRecording) -> None:
        self._recording = recording
        self._memory = memory
        self._files: RecentlyUsed[SegmentName, pq.ParquetFile] = RecentlyUsed(MAX_FILES)

    @property
    def recording(self) -> str:
        return self._recording

    @property
    def location(self) -> str:
        return f"{self.recording}/"

    def list_segments(self) -> list[SegmentName]:
        return self._memory.list_segments()

    def list_missing(self) -> list[SegmentName]:
        return []

    def _find(self, name: SegmentName) -> SealedSegment:
        segment = self._memory.find_sealed(name)
        if segment is None:
            raise FileNotFoundError(name.stem)
        return segment

    def summarize(self, name: SegmentName) -> SegmentSummary:
        return self._find(name).summary

    def find_index(self, name: SegmentName, index: str) -> HashIndex:
        return unpack_index_file(memoryview(self._find(name).index))[1][index]

    def open_rows(self, name: SegmentName) -> pq.ParquetFile:
        import pyarrow as pa

        return self._files.find(name, lambda: _open_parquet(name, pa.BufferReader(self._find(name).parquet)))

    def list_parts(self, name: SegmentName) -> tuple[Sequence[OpenPart], str]:
        batches = self._memory.list_batches(name)
        return ([OpenPart(name.table, join_batches(name.table, batches))] if batches else []), ""

    def connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._memory.database_uri, uri=True, isolation_level=None, timeout=2.0)
        # A shared cache locks whole tables; with this setting, readers do not wait.
        db.execute("pragma read_uncommitted = on")
        return check_version(db)


def _open_file(name: SegmentName, view: FileView) -> pq.ParquetFile:
    import pyarrow as pa

    return _open_parquet(name, pa.OSFile(view.reopened))


def _open_parquet(name: SegmentName, source: object) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(source, page_checksum_verification=True, read_dictionary=WORDS[name.table])
    except (pa.ArrowException, OSError) as error:
        raise DamagedSegmentError(f"not a Parquet file: {error}") from error
