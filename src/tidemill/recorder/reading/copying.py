"""Copies recordings into another folder, where they are consistent, sealed, and readable like any other.

The copy of a period that is being written is a snapshot: its open segments are sealed in the copy, and SQLite copies
its database. A period that the target already has, by the identity in its database, is updated: new data is added, and
data that the source has removed stays.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TypeVar

from tidemill.recorder.format.file_layout import (
    LOCK,
    Period,
    SegmentName,
    create_file,
    list_periods,
    list_worker_folders,
    make_private_folder,
)
from tidemill.recorder.format.file_view import FileView
from tidemill.recorder.format.frames import DamagedSegmentError
from tidemill.recorder.format.read_database import open_database
from tidemill.recorder.format.summary import unpack_index_file
from tidemill.recorder.writing.sealed_files import read_open, write_sealed
from tidemill.recorder.writing.sealing import seal

ValueT = TypeVar("ValueT")
#: Files are copied in pieces of this size.
_PART_BYTES = 1024 * 1024


def copy_recordings(sources: Iterable[Path], target: Path) -> tuple[list[Period], list[str]]:
    """Copy all periods below some folders.

    Args:
        sources: Folders of recordings, possibly of several hosts.
        target: The folder for all copies; created if it is missing.

    Returns:
        The copies, and descriptions of data that could not be read.

    Raises:
        OSError: The target cannot be written.
    """
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    copies: list[Period] = []
    problems: list[str] = []
    for source in sources:
        for folder in list_worker_folders(source):
            copies += [copy_period(period, target, problems) for period in list_periods(folder)]
    return list({copy.database: copy for copy in copies}.values()), problems


def copy_period(period: Period, target: Path, problems: list[str]) -> Period:
    """Copy a period; unreadable parts are described in `problems`.

    Raises:
        OSError: The target cannot be written.
    """
    steps = copy_in_steps(period, target, problems)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            copy: Period = end.value
            return copy


def copy_in_steps(period: Period, target: Path, problems: list[str]) -> Generator[None, None, Period]:
    """Copy a period like `copy_period`, but yield after each segment, so that the caller can stop.

    Raises:
        OSError: The target cannot be written.
    """
    copy, is_new = _choose_copy(period, target)
    if is_new:
        os.close(create_file(copy.folder / LOCK))
    elif copy.is_live():
        return copy
    for name in period.list_segments():
        try:
            _copy_segment(period, name, copy)
        except FileNotFoundError:
            continue  # retention has removed it
        except (DamagedSegmentError, ValueError) as error:
            problems.append(f"{period.name}: {name.stem} is damaged and was left out: {error}")
        yield
    if is_new:
        os.close(create_file(copy.database))
    try:
        with contextlib.closing(open_database(period)) as db, contextlib.closing(sqlite3.connect(copy.database)) as out:
            if is_new or _count_events(db) >= _count_events(out):
                db.backup(out)
    except (sqlite3.Error, OSError) as error:
        problems.append(f"{period.name}: its events cannot be read and were left out: {error}")
    return copy


def _count_events(db: sqlite3.Connection) -> int:
    """Return how many events a database has ever had, including those that retention has removed."""
    return int(db.execute("select coalesce(max(id), 0) from events").fetchone()[0])


def _choose_copy(period: Period, target: Path) -> tuple[Period, bool]:
    """Return the copy's period, and whether it is new and its folder empty; two hosts may have recordings of the same
    name.
    """
    worker = target / period.worker_folder.name
    make_private_folder(worker)
    identity = _identify(period)
    number = 1
    while True:
        copy = Period(worker, period.name if number == 1 else f"{period.name}-{number}")
        try:
            copy.folder.mkdir(mode=0o700)
        except FileExistsError:
            if identity is not None and identity == _identify(copy):
                return copy, False
            number += 1
            continue
        return copy, True


def _identify(period: Period) -> tuple[str, str, int] | None:
    """Return group, worker and start of a period, which all its copies share; None if they cannot be read."""
    with contextlib.suppress(OSError, sqlite3.Error), contextlib.closing(open_database(period)) as db:
        found: tuple[str, str, int] | None = db.execute('select "group", worker, started_at_us from about').fetchone()
        return found
    return None


def _make_room(copy: Period, name: SegmentName, rows: int) -> bool:
    """Return whether a segment must be copied, and remove an existing copy that has fewer rows."""
    if _count_rows(copy, name) >= rows:
        return False
    for ending in ("parquet", "idx"):
        copy.path_of(name, ending).unlink(missing_ok=True)
    return True


def _count_rows(period: Period, name: SegmentName) -> int:
    """Return the number of rows of a sealed segment; -1 if it is missing or damaged."""
    with contextlib.suppress(OSError, DamagedSegmentError):
        if period.path_of(name, "parquet").exists():
            return unpack_index_file(FileView(period.path_of(name, "idx")))[0].rows
    return -1


def _copy_segment(period: Period, name: SegmentName, copy: Period) -> None:
    if not name.sealed:
        # A segment that was just sealed has lost its open file; the sealed one is copied.
        with contextlib.suppress(FileNotFoundError):
            batches, _ = _read(lambda: read_open(period.path_of(name, "open"), name))
            worker = period.name.removesuffix(f"-{period.started}")
            rows = sum(len(batch) for _, batch in batches)
            if rows and _make_room(copy, name, rows):
                write_sealed(copy, name, seal(name.table, batches, worker), time.time())
            return
    if not _make_room(copy, name, max(0, _count_rows(period, name))):
        return
    # The index is written first, as always.
    for path, ending in [(period.path_of(name, ending), ending) for ending in ("idx", "parquet")]:
        try:
            view = _read(functools.partial(FileView, path))
        except FileNotFoundError:
            if ending == "idx":  # readers of the copy rebuild it
                continue
            raise
        fd = create_file(copy.path_of(name, ending))
        try:
            at = 0
            while at < len(view):
                at += os.write(fd, _read(functools.partial(view.__getitem__, slice(at, at + _PART_BYTES))))
        finally:
            os.close(fd)


def _read(read: Callable[[], ValueT]) -> ValueT:
    """Read from the source, and report its read errors as damage, to distinguish them from errors of the target.

    Raises:
        FileNotFoundError: The file does not exist.
        DamagedSegmentError: The file cannot be read.
    """
    try:
        return read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedSegmentError(str(error)) from error
