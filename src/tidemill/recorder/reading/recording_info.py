"""Describes periods from summaries, without reading rows."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tidemill.core.wording import to_one_line
from tidemill.recorder.format.file_layout import Period
from tidemill.recorder.format.file_view import FileView
from tidemill.recorder.format.frames import DamagedSegmentError
from tidemill.recorder.format.read_database import read_about
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.reading.event_search import ask_database
from tidemill.recorder.reading.queries import RecordingInfo
from tidemill.recorder.reading.row_search import READ_ERRORS, describe_missing
from tidemill.recorder.reading.segment_store import DiskStore, SegmentStore

#: The last bytes of a Parquet file.
_PARQUET_END = b"PAR1"


def describe_recording(store: SegmentStore) -> RecordingInfo:
    """Return a description of a period."""
    problems: list[str] = []
    rows = dict.fromkeys(RowTable, 0)
    times: list[int] = []
    for table, count, span in _list_segments(store, problems):
        rows[table] += count
        if table is RowTable.MESSAGES and count:
            times += span
    kept: list[int] = []
    about: dict[str, Any] = {"group": "", "worker": "", "started_us": 0, "bounded": False, "events": 0}

    def read(db: sqlite3.Connection) -> None:
        found = read_about(db)
        if found is not None:
            about.update(group=found.group, worker=found.worker, started_us=found.started_us, bounded=found.bounded)
            kept.append(found.keep_seconds)
        about["events"] = db.execute("select count(*) from events").fetchone()[0]

    ask_database(store, read, problems)
    period = store.period if isinstance(store, DiskStore) else None
    if period is not None and not period.database.exists():
        problems.append("the database is missing; messages and tasks can be read, events are lost")
    live = period is None or period.is_live()
    ended_at = None if period is None or live else find_end(period)
    return RecordingInfo(
        store.recording,
        "" if period is None else period.name,
        "" if period is None else str(period.database),
        first_us=min(times, default=None),
        last_us=max(times, default=None),
        messages=rows[RowTable.MESSAGES],
        tasks=rows[RowTable.TASKS],
        size_bytes=0 if period is None else _measure(period),
        live=live,
        kept_until_us=None if ended_at is None or not kept else int((ended_at + kept[0]) * 1_000_000),
        problems=problems,
        **about,
    )


def find_span(stores: Iterable[SegmentStore]) -> tuple[int | None, int | None]:
    """Return the times of the oldest and the newest message."""
    times = [
        time
        for store in stores
        for table, count, span in _list_segments(store, [])
        if table is RowTable.MESSAGES and count
        for time in span
    ]
    return min(times, default=None), max(times, default=None)


def _list_segments(store: SegmentStore, problems: list[str]) -> list[tuple[RowTable, int, tuple[int, int]]]:
    """Return table, number of rows, and first and last time of each segment."""
    found = []
    for name in store.list_segments():
        try:
            if name.sealed:
                about = store.summarize(name)
                if isinstance(store, DiskStore):
                    _check_end(store.period.path_of(name, "parquet"))
                found.append((about.table, about.rows, (about.first_at, about.last_at)))
                continue
            parts, problem = store.list_parts(name)
            if problem:
                problems.append(f"{name.stem} is damaged; the rest of it was skipped: {to_one_line(problem)}")
            for part in parts:
                about = part.summary
                found.append((name.table, about.rows, (about.first_at, about.last_at)))
        except FileNotFoundError:
            continue
        except READ_ERRORS as error:
            problems.append(f"{name.stem} is damaged and was skipped: {to_one_line(str(error))}")
    problems += [describe_missing(store, name) for name in store.list_missing()]
    return found


def _check_end(path: Path) -> None:
    """Detect a truncated Parquet file by its last bytes.

    Raises:
        OSError: The file cannot be read.
        DamagedSegmentError: The file is truncated.
    """
    view = FileView(path)
    if view[len(view) - len(_PARQUET_END) :] != _PARQUET_END:
        raise DamagedSegmentError("the Parquet file is truncated")


def find_end(period: Period) -> float:
    """Return the time of the last write to a period, in seconds since the epoch, as retention computes it."""
    ended_at = 0.0
    for path in period.list_files():
        if not path.name.endswith(("-wal", "-shm")):  # readers write to these, too
            with contextlib.suppress(OSError):
                ended_at = max(ended_at, path.lstat().st_mtime)
    return ended_at


def _measure(period: Period) -> int:
    size = 0
    for path in period.list_files():
        with contextlib.suppress(OSError):
            size += path.lstat().st_size
    return size
