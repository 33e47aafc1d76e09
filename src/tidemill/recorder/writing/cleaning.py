"""Removes recordings: those of this worker beyond its limits, those of workers that are gone beyond their own age."""

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

#: For how long a recording is kept whose database does not say it.
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
    """Remove what a worker has beyond its limits.

    Args:
        folder: The folder of the worker.
        limits: How much is kept.
        current: The period that is written to.
        current_bytes: Its size.
        current_events: How many events it has.
        segments: Its sealed segments, the oldest first.
        now: Seconds since the epoch.

    Returns:
        What had to go; segments are removed, the current period's events are left to the caller.
    """
    periods = {period.name: period for period in list_periods(folder) if period != current}
    past = [_measure(period) for period in periods.values()]
    size = PeriodSize(current.name, now, current_bytes, current_events)
    removal = choose_removal(now, limits, past, size, segments)
    for name in removal.periods:
        remove_period(periods[name])
    for stem in removal.segments:
        for ending in ("idx", "parquet"):  # an index without its rows would be told as a loss
            with contextlib.suppress(FileNotFoundError):
                (current.folder / f"{stem}.{ending}").unlink()
    return removal


def _measure(period: Period) -> PeriodSize:
    size, ended_at = 0, 0.0
    for path in period.list_files():
        with contextlib.suppress(OSError):
            status = path.lstat()
            size += status.st_size
            if not path.name.endswith(("-wal", "-shm")):  # readers write these, too
                ended_at = max(ended_at, status.st_mtime)
    return PeriodSize(period.name, ended_at, size, _ask(period, "select count(*) from events", 0))


def _ask(period: Period, question: str, default: int) -> int:
    """Return a number from a database; the default if it cannot be read."""
    with contextlib.suppress(OSError, sqlite3.Error), contextlib.closing(open_database(period)) as db:
        found = db.execute(question).fetchone()
        return int(found[0]) if found else default
    return default


def remove_period(period: Period) -> bool:
    """Remove a period, unless somebody writes to it; returns whether it is gone."""
    try:
        lock = period.lock()
    except HeldError:
        return False
    except (FileNotFoundError, NotADirectoryError):
        lock = -1  # without a folder there is nobody who writes to it
    except OSError as error:  # nobody knows whether somebody writes to it
        log.warning("an old recording cannot be removed", path=str(period.database), error=str(error))
        return False
    try:
        if lock >= 0:
            shutil.rmtree(period.folder)
        # Last: what is not listed would never be removed.
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
    """Return periods that nobody writes to and that are too old.

    Args:
        db_dir: The folder of all recordings.
        now: Seconds since the epoch.
        before: Those that ended before this time; None: those that are older than their own pipelines keep them.
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
    """Remove periods and then empty folders of their workers; returns which are gone."""
    gone = [period for period in periods if remove_period(period)]
    for folder in {period.worker_folder for period in gone}:
        with contextlib.suppress(OSError):
            folder.rmdir()  # fails unless it is empty
    return gone


def remove_expired(db_dir: Path, now: float) -> None:
    """Remove periods that are older than their own pipelines keep them.

    Workers come and go, for example with the names of containers, and nobody else would remove what they left.
    """
    remove_recordings(find_expired(db_dir, now))
