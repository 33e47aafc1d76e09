"""What is in a period, without looking at its rows."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from typing import Any

import pyarrow.compute as pc

from tidemill.recorder.event_search import ask_database
from tidemill.recorder.queries import RecordingInfo
from tidemill.recorder.row_filter import COLUMNS
from tidemill.recorder.row_search import READ_ERRORS
from tidemill.recorder.schema import RowTable
from tidemill.recorder.segment_store import DiskStore, SegmentStore


def describe_recording(store: SegmentStore) -> RecordingInfo:
    """Return what is in a period."""
    problems: list[str] = []
    rows = dict.fromkeys(RowTable, 0)
    times: list[int] = []
    for table, count, span in _list_segments(store, problems):
        rows[table] += count
        if table is RowTable.MESSAGES and count:
            times += span
    about: dict[str, Any] = {"group": "", "worker": "", "started_us": 0, "events": 0}

    def read(db: sqlite3.Connection) -> None:
        found = db.execute('select "group", worker, started_at_us from about').fetchone()
        if found is not None:
            about["group"], about["worker"], about["started_us"] = found
        about["events"] = db.execute("select count(*) from events").fetchone()[0]

    ask_database(store, read, problems)
    disk = isinstance(store, DiskStore)
    return RecordingInfo(
        store.recording,
        store.period.name if isinstance(store, DiskStore) else "",
        str(store.period.database) if isinstance(store, DiskStore) else "",
        first_us=min(times, default=None),
        last_us=max(times, default=None),
        messages=rows[RowTable.MESSAGES],
        tasks=rows[RowTable.TASKS],
        size_bytes=_measure(store) if isinstance(store, DiskStore) else 0,
        live=store.period.is_live() if isinstance(store, DiskStore) else not disk,
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
    """Return the table, the rows and the first and last time of each segment."""
    found = []
    for name in store.list_segments():
        try:
            if name.sealed:
                about = store.summarize(name)
                found.append((about.table, about.rows, (about.first_at, about.last_at)))
                continue
            parts, problem = store.list_parts(name)
            if problem:
                problems.append(f"{name.stem} is damaged; the rest of it was skipped: {problem}")
            for part in parts:
                times = pc.min_max(pc.coalesce(part[COLUMNS[name.table].at], 0)).as_py()
                found.append((name.table, len(part), (times["min"], times["max"])))
        except FileNotFoundError:
            continue
        except READ_ERRORS as error:
            problems.append(f"{name.stem} is damaged and was skipped: {error}")
    return found


def _measure(store: DiskStore) -> int:
    size = 0
    for path in store.period.list_files():
        with contextlib.suppress(OSError):
            size += path.lstat().st_size
    return size
