"""Writes sealed segments to their period, and seals the open segments of killed processes.

Invariant: a segment appears complete or not at all. Both of its files are written under temporary names and renamed,
the index first; the open file is removed last, so that its rows are never missing.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.recorder.format.events_database import SegmentRow, list_in_database
from tidemill.recorder.format.file_layout import Period, SegmentName, create_file, list_periods, list_worker_folders
from tidemill.recorder.format.file_view import FileView
from tidemill.recorder.format.frames import DamagedSegmentError, FrameInfo, read_frames
from tidemill.recorder.format.schema import decode_rows
from tidemill.recorder.kept_memory import release_memory
from tidemill.recorder.writing.sealing import SealedSegment, seal
from tidemill.runtime.files.lock import HeldError

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger(__name__)


def write_sealed(
    period: Period, name: SegmentName, segment: SealedSegment, now: float, *, is_damaged: bool = False
) -> SegmentRow:
    """Write a segment's files and remove its open file; returns the segment's row for the database.

    Args:
        period: The period.
        name: The segment.
        segment: The sealed rows.
        now: Seconds since the epoch.
        is_damaged: Whether the open file could be read only in part; it is then renamed instead of removed.

    Raises:
        OSError: The write fails; the open file still exists.
    """
    index = period.path_of(name, "idx")
    try:
        _write_file(index, segment.index)
        _write_file(period.path_of(name, "parquet"), segment.parquet)
    except OSError:
        with contextlib.suppress(OSError):
            index.unlink()
        raise
    with contextlib.suppress(OSError):
        _remove_open(period, name, is_damaged=is_damaged)
    size = len(segment.index) + segment.parquet.size
    return SegmentRow(name.stem, segment.summary, size, int(now * 1_000_000))


def _remove_open(period: Period, name: SegmentName, *, is_damaged: bool) -> None:
    path = period.path_of(name, "open")
    if is_damaged:
        aside = period.path_of(name, "damaged")
        path.rename(aside)
        log.warning("the file of a damaged segment is kept until its recording is removed", path=str(aside))
    else:
        path.unlink(missing_ok=True)


def _write_file(path: Path, data: Any) -> None:
    """Write a file so that it appears complete under its name."""
    unfinished = path.with_name(f"{path.name}.tmp")
    # Only the holder of the period's lock writes here, so an existing file was left by a killed process.
    unfinished.unlink(missing_ok=True)
    fd = create_file(unfinished)
    try:
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
        unfinished.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    finally:
        os.close(fd)


def read_open(path: Path, name: SegmentName) -> tuple[list[tuple[FrameInfo, pa.RecordBatch]], bool]:
    """Return the complete batches of an open file, and whether the rest is damaged, which is logged.

    Raises:
        OSError: The file cannot be read.
    """
    batches: list[tuple[FrameInfo, pa.RecordBatch]] = []
    is_damaged = False
    try:
        for frame in read_frames(FileView(path)):
            batches.append((frame.info, decode_rows(name.table, frame.body)))  # noqa: PERF401 - damage may follow
    except (DamagedSegmentError, ValueError) as error:
        is_damaged = True
        log.warning("a recorded segment is damaged; the rest of it is skipped", path=str(path), error=str(error))
    return batches, is_damaged


def seal_open_file(period: Period, name: SegmentName, worker: str) -> SegmentRow | None:
    """Seal an open file that no process writes to; a file without a complete frame is removed, a damaged one is
    renamed.

    Args:
        period: The period, whose lock the caller holds.
        name: The segment.
        worker: The worker that recorded the rows.

    Raises:
        OSError: The write fails; the open file still exists.
    """
    batches, is_damaged = read_open(period.path_of(name, "open"), name)
    if not any(len(batch) for _, batch in batches):
        _remove_open(period, name, is_damaged=is_damaged)
        return None
    return write_sealed(period, name, seal(name.table, batches, worker), time.time(), is_damaged=is_damaged)


def seal_leftovers(db_dir: Path) -> int:
    """Seal segments of killed processes in all periods that no process writes to; returns the number of segments.

    Segments that cannot be sealed are logged, and stay readable. The smallest are sealed first, one after another.
    """
    left = []
    for folder in list_worker_folders(db_dir):
        for period in list_periods(folder):
            size = sum(_measure(period, name) for name in period.list_segments() if not name.sealed)
            if size:
                left.append((size, period))
    return sum(_seal_period(period) for _, period in sorted(left, key=lambda each: each[0]))


def _measure(period: Period, name: SegmentName) -> int:
    """Return the size of an open segment, at least 1."""
    with contextlib.suppress(OSError):
        return period.path_of(name, "open").lstat().st_size + 1
    return 1


def _seal_period(period: Period) -> int:
    try:
        lock = period.lock()
    except (HeldError, OSError):
        return 0
    try:
        worker = period.name.removesuffix(f"-{period.started}")
        names = [name for name in period.list_segments() if not name.sealed]
        names.sort(key=lambda name: _measure(period, name))
        rows: list[SegmentRow] = []
        for name in names:
            try:
                row = seal_open_file(period, name, worker)
            except Exception as error:  # one bad file must not hold back the others
                path = str(period.path_of(name, "open"))
                log.warning("a recorded segment cannot be sealed", path=path, error=str(error))
                continue
            finally:
                release_memory()
            if row is not None:
                rows.append(row)
        _list_rows(period, rows)
    finally:
        os.close(lock)
    return len(rows)


def _list_rows(period: Period, rows: Sequence[SegmentRow]) -> None:
    # The files have the same information; seal them even if the database was never completed.
    with contextlib.suppress(sqlite3.Error):
        list_in_database(period.database, rows)
