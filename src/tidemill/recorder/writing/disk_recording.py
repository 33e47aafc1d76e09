"""A worker's recording on disk: the current period with its open segments and its database.

Invariants:
- One thread calls it; leftovers of other processes are handled on another thread.
- A failed write raises an error and changes nothing, so that the next call may succeed.
- Files that were removed from outside are not written to any more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.recorder.retention import RetentionLimits, SegmentSize
from tidemill.core.recorder.sealing import SealPolicy, is_period_over
from tidemill.recorder.format.events import RecordedEvent
from tidemill.recorder.format.events_database import EventsDatabase
from tidemill.recorder.format.file_layout import (
    LOCK,
    Period,
    SegmentName,
    create_period,
    make_private_folder,
    name_worker_folder,
)
from tidemill.recorder.format.frames import FrameInfo
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.kept_memory import KeptMemory
from tidemill.recorder.writing.cleaning import clean_worker, remove_expired, remove_recordings
from tidemill.recorder.writing.open_segment import OpenSegment
from tidemill.recorder.writing.sealed_files import seal_leftovers, seal_open_file, write_sealed
from tidemill.recorder.writing.sealing import seal

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger(__name__)

#: Sealing is retried after this time.
RETRY_SECONDS = 60.0
#: Retention is checked this often.
CLEAN_SECONDS = 60.0
#: Other workers' leftovers are checked this often.
HOUSEKEEPING_SECONDS = 600.0
#: At shutdown, leftovers are sealed for this long at most; the next process seals the rest.
END_SECONDS = 0.8


class DiskRecording:
    """Writes a worker's recording to disk.

    Args:
        db_dir: The folder of all recordings; created if it is missing.
        group: The consumer group.
        worker: The worker's name.
        settings: Retention and intervals.
        policy: The limits at which segments are sealed.
        folder: The name of the worker's folder; '': derived from the group and the worker.
        bounded: Whether this is a bounded run.

    Raises:
        OSError: The folder cannot be written.
        sqlite3.Error: Likewise.
    """

    def __init__(
        self,
        db_dir: Path,
        group: str,
        worker: str,
        settings: DebugSettings,
        policy: SealPolicy | None = None,
        folder: str = "",
        *,
        bounded: bool = False,
    ) -> None:
        self._bounded = bounded
        self._group = group
        self._worker = worker
        self._settings = settings
        self._policy = policy or SealPolicy()
        self._db_dir = db_dir
        self._folder = db_dir / (folder or name_worker_folder(group, worker))
        self._open: dict[RowTable, OpenSegment] = {}
        self._names: dict[RowTable, SegmentName] = {}
        self._numbers = 0
        self._sealed: list[SegmentSize] = []
        self._unsealed: list[SegmentName] = []
        self._retry_at = self._rotate_at = 0.0
        self._flushed = time.monotonic()
        self._cleaned = self._flushed - CLEAN_SECONDS  # earlier processes may have left too much
        self._housekeeping: threading.Thread | None = None
        self._housekeeping_at = 0.0
        self._is_missing = False
        self._memory = KeptMemory()
        self._begin_period()

    def _begin_period(self) -> None:
        now = time.time()
        self._db_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private_folder(self._folder)  # another process may have removed the folder while it was empty
        period, lock = create_period(self._folder, self._worker, now)
        try:
            database = EventsDatabase(
                period.database,
                self._group,
                self._worker,
                int(now * 1_000_000),
                keep_hours=self._settings.retention_hours,
                bounded=self._bounded,
            )
        except BaseException:
            os.close(lock)
            shutil.rmtree(period.folder, ignore_errors=True)
            for path in period.list_files():
                path.unlink(missing_ok=True)
            raise
        self._period, self._lock, self.database = period, lock, database
        self._began = time.monotonic()
        self._sealed, self._unsealed, self._numbers = [], [], 0
        self._link()

    def _link(self) -> None:
        """Point the worker's link at the current database."""
        link = self._folder / f"{self._link_name}.tmp"
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(self._period.database.name)
            link.rename(self._folder / self._link_name)
        except OSError as error:  # the link is a convenience for operators; no code follows it
            log.warning("the link to the current recording cannot be made", path=str(link), error=str(error))

    @property
    def _link_name(self) -> str:
        return f"{self._period.name.removesuffix(f'-{self._period.started}')}-live.db"

    @property
    def location(self) -> str:
        """The folder, as shown to users."""
        return str(self._folder)

    def seal_leftovers(self) -> None:
        """Start to seal segments of killed processes, and to remove expired recordings of other workers.

        A thread of its own does this while recording continues, because it may take long. It touches only periods that
        no process writes to, and holds the lock of the one it changes.
        """
        self._housekeeping_at = time.monotonic() + HOUSEKEEPING_SECONDS
        if self._housekeeping is None or not self._housekeeping.is_alive():
            self._housekeeping = threading.Thread(target=self._keep_house, name="tidemill-leftovers", daemon=True)
            self._housekeeping.start()

    def _keep_house(self) -> None:
        try:
            seal_leftovers(self._db_dir)
            remove_expired(self._db_dir, time.time())
        except Exception as error:  # the next round tries again
            log.warning("old recordings cannot be sealed or removed", path=str(self._db_dir), error=str(error))

    def append(self, table: RowTable, frames: Sequence[tuple[FrameInfo, bytes, pa.RecordBatch]]) -> None:
        """Write rows.

        Raises:
            OSError: The write fails, or the folder was removed and cannot be created again.
        """
        if self._is_missing:
            raise FileNotFoundError(2, f"{self._folder} was removed and cannot be created again")
        segment = self._open.get(table) or self._open_segment(table)
        try:
            segment.append(frames)
        except OSError:
            if not segment.rows:  # an empty file is useless, and may not be writable later either
                self._forget(table)
            raise

    def _open_segment(self, table: RowTable) -> OpenSegment:
        name = SegmentName(self._numbers + 1, table, sealed=False)
        segment = OpenSegment(self._period.path_of(name, "open"))
        self._numbers += 1
        self._open[table], self._names[table] = segment, name
        return segment

    def _forget(self, table: RowTable) -> None:
        segment = self._open.pop(table)
        segment.close()
        with contextlib.suppress(OSError):
            segment.path.unlink()

    def add_events(self, events: Sequence[RecordedEvent]) -> None:
        """Store events.

        Raises:
            sqlite3.Error: The write fails.
        """
        self.database.add_events(events)

    def seal_full(self) -> None:
        """Seal segments that are full or old enough.

        Raises:
            OSError: The write fails; it is retried later.
            sqlite3.Error: Likewise.
        """
        for table, segment in list(self._open.items()):
            if self._policy.is_full(segment.rows, segment.rows_bytes, segment.age_seconds):
                self._seal(table)

    def tick(self) -> None:
        """Seal, flush, clean and rotate whatever is due; must be called at least once a second.

        Raises:
            OSError: A write fails; the next call continues.
            sqlite3.Error: Likewise.
        """
        now = time.monotonic()
        self._memory.tick()
        self._replace_missing()
        self.seal_full()
        if self._unsealed and now >= self._retry_at:
            self._seal_again()
        if now - self._flushed >= self._settings.flush_interval_seconds:
            self._flushed = now
            for segment in self._open.values():
                segment.flush()
            self.database.flush()
        if now - self._cleaned >= CLEAN_SECONDS:
            self._clean()
        if now >= self._housekeeping_at:
            self.seal_leftovers()
        if is_period_over(now - self._began, self._settings.rotation_interval_minutes * 60) and now >= self._rotate_at:
            self._rotate_at = now + RETRY_SECONDS  # in case the rotation fails
            self._rotate()

    def _replace_missing(self) -> None:
        """Begin a new period if the files of this one were removed from outside, and seal the open segments into it.

        The open files have lost their names, but their descriptors are still readable.

        Raises:
            OSError: The write fails; the next call retries it.
            sqlite3.Error: Likewise.
        """
        before, lock, database = self._period, self._lock, self.database
        if before.database.exists() and (before.folder / LOCK).exists():
            return
        if not self._is_missing:
            self._is_missing = True
            log.error(
                "the recording was removed while it was written; a new one begins, and sealed rows are lost",
                path=str(before.database),
                advice="exclude debug.db_dir from cleanup jobs; use `tidemill record clean` to remove recordings",
            )
        self._begin_period()
        self._is_missing = False
        _close_period(before, lock, database)
        for table in list(self._open):
            # Numbers begin again in the new period.
            self._numbers += 1
            self._names[table] = SegmentName(self._numbers, table, sealed=False)
            self._seal(table)

    def _seal(self, table: RowTable) -> None:
        if not self._period.folder.is_dir():
            # Removed from outside: this seals the open segments into a new period.
            self._replace_missing()
            return
        segment, name = self._open.pop(table), self._names[table]
        try:
            row = write_sealed(self._period, name, seal(table, segment.read_batches(table), self._worker), time.time())
        except BaseException:
            self._unsealed.append(name)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            raise
        finally:
            segment.close()
        self._memory.note_use()
        self._sealed.append(SegmentSize(name.stem, row.size_bytes))
        self.database.add_segment(row)
        limit = self._settings.retention_max_bytes
        if limit and self.size_bytes > limit:
            self._clean()

    def _seal_again(self) -> None:
        self._retry_at = time.monotonic() + RETRY_SECONDS
        refused: list[SegmentName] = []
        names, self._unsealed = self._unsealed, refused
        problem: Exception | None = None
        for name in names:
            try:
                row = seal_open_file(self._period, name, self._worker)
            except Exception as error:  # one bad segment must not hold back the others
                refused.append(name)
                problem = error
                continue
            if row is not None:
                self._sealed.append(SegmentSize(name.stem, row.size_bytes))
                self.database.add_segment(row)
        if problem is not None:
            raise problem

    def _clean(self) -> None:
        self._cleaned = time.monotonic()
        settings = self._settings
        limits = RetentionLimits(
            settings.retention_hours * 3600, settings.retention_max_bytes, settings.retention_max_events
        )
        removal = clean_worker(
            self._folder, limits, self._period, self.size_bytes, self.database.events, self._sealed, time.time()
        )
        for name in removal.segments:
            self.database.remove_segment(name)
        self._sealed = [segment for segment in self._sealed if segment.name not in removal.segments]
        if removal.events:
            self.database.remove_oldest(removal.events)

    @property
    def size_bytes(self) -> int:
        """The size of the current period."""
        size = sum(segment.size_bytes for segment in self._sealed)
        size += sum(segment.size_bytes for segment in self._open.values())
        database = self._period.database
        for path in (
            *(database.with_name(f"{database.name}{ending}") for ending in ("", "-wal", "-shm")),
            *(self._period.path_of(name, "open") for name in self._unsealed),
        ):
            with contextlib.suppress(OSError):
                size += path.stat().st_size
        return size

    def _rotate(self) -> None:
        before, lock, database = self._period, self._lock, self.database
        for table in list(self._open):
            self._seal(table)
        self._begin_period()
        self._rotate_at = 0.0
        _close_period(before, lock, database)

    def close(self) -> None:
        """Seal the open segments and close the period; segments that cannot be sealed are left to the next process.

        A period without any rows, events or counts, as after an aborted start, is removed.
        """
        is_empty = False
        try:
            for table in list(self._open):
                self._seal(table)
            if self._housekeeping is not None:
                self._housekeeping.join(END_SECONDS)
            is_empty = not self._numbers and self.database.is_empty
        finally:
            link = self._folder / self._link_name
            with contextlib.suppress(OSError):
                if str(link.readlink()) == self._period.database.name:
                    link.unlink()
            _close_period(self._period, self._lock, self.database)
        if is_empty:
            remove_recordings([self._period])


def _close_period(period: Period, lock: int, database: EventsDatabase) -> None:
    try:
        with contextlib.suppress(sqlite3.Error):
            database.flush()
        database.close()
    except sqlite3.Error as error:
        log.warning("a recorded database cannot be closed", path=str(period.database), error=str(error))
    finally:
        os.close(lock)
