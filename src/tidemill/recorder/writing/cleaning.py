"""Removes recordings of this worker beyond its limits, and of other, ended workers beyond their own retention."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import structlog

from tidemill.core.recorder.retention import PeriodSize, RetentionLimits, RetentionRemoval, SegmentSize, choose_removal
from tidemill.recorder.format.file_layout import Period, list_periods, list_worker_folders
from tidemill.recorder.format.read_database import open_database
from tidemill.runtime.files.lock import HeldError

#: The retention of a recording whose database does not give one.
KEEP_SECONDS = 7 * 24 * 3600

log = structlog.get_logger(__name__)


def clean_worker(
    folder: Path,
    limits: RetentionLimits,
    current: Period,
    current_bytes: int,
    current_events: int,
    segments: Sequence[SegmentSize],
    now: float,
) -> RetentionRemoval:
    """Remove a worker's recordings beyond its limits.

    Args:
        folder: The folder of the worker.
        limits: The limits of retention.
        current: The period being written.
        current_bytes: Its size.
        current_events: The number of its events.
        segments: Its sealed segments, oldest first.
        now: Seconds since the epoch.

    Returns:
        What exceeded the limits. Periods and segments have been removed; the caller must remove the current period's
            events.
    """
    periods = {period.name: period for period in list_periods(folder) if period != current}
    past = [_measure(period) for period in periods.values()]
    size = PeriodSize(current.name, now, current_bytes, current_events)
    removal = choose_removal(now, limits, past, size, segments)
    for name in removal.periods:
        remove_period(periods[name])
    for stem in removal.segments:
        for ending in ("idx", "parquet"):  # an index without rows would be reported as a loss
            with contextlib.suppress(FileNotFoundError):
                (current.folder / f"{stem}.{ending}").unlink()
    return removal


def _measure(period: Period) -> PeriodSize:
    size, ended_at = 0, 0.0
    for path in period.list_files():
        with contextlib.suppress(OSError):
            status = path.lstat()
            size += status.st_size
            if not path.name.endswith(("-wal", "-shm")):  # readers write to these, too
                ended_at = max(ended_at, status.st_mtime)
    return PeriodSize(period.name, ended_at, size, _ask(period, "select count(*) from events", 0))


def _ask(period: Period, question: str, default: int) -> int:
    """Return a number from a period's database, or the default if the database cannot be read."""
    with contextlib.suppress(OSError, sqlite3.Error), contextlib.closing(open_database(period)) as db:
        found = db.execute(question).fetchone()
        return int(found[0]) if found else default
    return default


def remove_period(period: Period) -> bool:
    """Remove a period unless a process writes to it; returns whether the period was removed."""
    try:
        lock = period.lock()
    except HeldError:
        return False
    except (FileNotFoundError, NotADirectoryError):
        lock = -1  # without a folder, no process can be writing to it
    except OSError as error:  # a process may be writing to it
        log.warning("an old recording cannot be removed", path=str(period.database), error=str(error))
        return False
    try:
        if lock >= 0:
            shutil.rmtree(period.folder)
        # The database goes last: without it the period would not be listed, and the rest would never be removed.
        for ending in ("-wal", "-shm", ""):
            period.database.with_name(f"{period.database.name}{ending}").unlink(missing_ok=True)
    except OSError as error:
        log.warning("an old recording cannot be removed", path=str(period.database), error=str(error))
        return False
    finally:
        if lock >= 0:
            os.close(lock)
    return True


def find_expired(db_dir: Path, now: float, before: float | None = None) -> list[Period]:
    """Return expired periods that no process writes to.

    Args:
        db_dir: The folder of all recordings.
        now: Seconds since the epoch.
        before: Periods that ended before this time are expired; None: each period's own retention applies.
    """
    found = []
    for folder in list_worker_folders(db_dir):
        for period in list_periods(folder):
            keep_seconds = _ask(period, "select keep_seconds from about", KEEP_SECONDS)
            limit = now - keep_seconds if before is None else before
            if _measure(period).ended_at < limit and not period.is_live():
                found.append(period)
    return found


def remove_recordings(periods: Sequence[Period]) -> list[Period]:
    """Remove periods and then the empty folders of their workers; returns the periods that were removed."""
    gone = [period for period in periods if remove_period(period)]
    for folder in {period.worker_folder for period in gone}:
        with contextlib.suppress(OSError):
            folder.rmdir()  # fails unless the folder is empty
    return gone


def remove_expired(db_dir: Path, now: float) -> None:
    """Remove periods that exceed their own retention.

    Workers come and go, for example with containers' names, and no other process removes their recordings.
    """
    remove_recordings(find_expired(db_dir, now))
