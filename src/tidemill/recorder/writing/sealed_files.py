"""Writes sealed segments to their period, and seals what a process left that was killed.

Invariant: a segment appears whole or not at all: both of its files are written under other names and renamed, the index
first; the open file is removed last, so that its rows are never missing.
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
    """Write a segment's files and remove its open one; returns how the database lists it.

    Args:
        period: The period.
        name: The segment.
        segment: Its rows.
        now: Seconds since the epoch.
        is_damaged: Not all of the open file could be read: it is set aside instead.

    Raises:
        OSError: The disk refuses it; the open file is still there.
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
    """Write a file that appears whole, under its name."""
    unfinished = path.with_name(f"{path.name}.tmp")
    # Only who holds the period's lock writes here: what is there was left by a process that was killed.
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
    """Return the batches of an open file, as many as are whole, and whether the rest is damaged, which is logged.

    Raises:
        OSError: It cannot be read.
    """
    batches: list[tuple[FrameInfo, pa.RecordBatch]] = []
    is_damaged = False
    try:
        for frame in read_frames(FileView(path)):
            batches.append((frame.info, decode_rows(name.table, frame.body)))  # noqa: PERF401 - what precedes damage counts
    except (DamagedSegmentError, ValueError) as error:
        is_damaged = True
        log.warning("a recorded segment is damaged; what comes after this is skipped", path=str(path), error=str(error))
    return batches, is_damaged


def seal_open_file(period: Period, name: SegmentName, worker: str) -> SegmentRow | None:
    """Seal an open file that nobody writes to; one without a whole frame is removed, a damaged one set aside.

    Args:
        period: Its period, whose lock the caller holds.
        name: The segment.
        worker: Whose rows these are.

    Raises:
        OSError: The disk refuses it; the open file is still there.
    """
    batches, is_damaged = read_open(period.path_of(name, "open"), name)
    if not any(len(batch) for _, batch in batches):
        _remove_open(period, name, is_damaged=is_damaged)
        return None
    return write_sealed(period, name, seal(name.table, batches, worker), time.time(), is_damaged=is_damaged)


def seal_leftovers(db_dir: Path) -> int:
    """Seal what processes left that were killed, in all periods that nobody writes to; returns how many segments.

    What cannot be sealed stays as it is, readable, and is logged. The smallest come first, one at a time.
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
            except Exception as error:  # whatever is in one file: the others are sealed
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
    # Its files say the same; a database that was never completed is no reason to leave them open.
    with contextlib.suppress(sqlite3.Error):
        list_in_database(period.database, rows)
