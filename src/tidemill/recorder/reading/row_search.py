"""Searches rows of messages and tasks in many segments and returns a page of the newest.

Invariant: the order is total, and the same in open and in sealed segments, so that a cursor (the sort key of the last
row) leads to exactly the rows after it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.core.wording import format_count, to_one_line
from tidemill.recorder.format.file_layout import SegmentName
from tidemill.recorder.format.frames import DamagedSegmentError
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.format.summary import SegmentSummary
from tidemill.recorder.reading.row_filter import (
    COLUMNS,
    WORDS,
    RowCriteria,
    group_positions,
    has_between,
    is_after,
    list_columns,
    match_rows,
)
from tidemill.recorder.reading.segment_store import SegmentStore
from tidemill.recorder.writing.sealing import pack_label

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


class FoundRow(msgspec.Struct, frozen=True):
    """A row with its sort key."""

    key: tuple[Any, ...]
    row: dict[str, Any]


class Segment(msgspec.Struct, frozen=True):
    """A segment of a store; `summary` is None while it is open."""

    store: SegmentStore
    name: SegmentName
    summary: SegmentSummary | None

    @property
    def location(self) -> str:
        """The name of the segment in descriptions of problems."""
        return f"{self.store.recording}: {self.name.stem}"


#: Errors of reading a segment; the segment is then skipped and the problem reported.
READ_ERRORS = (OSError, DamagedSegmentError, ValueError, KeyError, IndexError, ArithmeticError)


def list_segments(stores: Iterable[SegmentStore], table: RowTable, problems: list[str]) -> list[Segment]:
    """Return the segments of a table: open ones, then sealed ones, newest first."""
    opened, sealed = [], []
    for store in stores:
        for name in store.list_segments():
            if name.table is not table:
                continue
            if not name.sealed:
                opened.append(Segment(store, name, None))
                continue
            try:
                sealed.append(Segment(store, name, store.summarize(name)))
            except FileNotFoundError:
                continue  # retention has removed it
            except READ_ERRORS as error:
                problems.append(f"{store.recording}: {name.stem} is damaged and was skipped: {to_one_line(str(error))}")
        missing = [name for name in store.list_missing() if name.table is table]
        problems += [f"{store.recording}: {describe_missing(store, name)}" for name in missing]
    sealed.sort(key=lambda segment: segment.summary.last_at if segment.summary else 0, reverse=True)
    return opened + sealed


def describe_missing(store: SegmentStore, name: SegmentName) -> str:
    """Return a description of lost rows, with their number and times if the index has them."""
    try:
        about = store.summarize(name)
    except READ_ERRORS:
        return f"{name.stem}.parquet is missing; its rows are lost"
    times = " to ".join(_show_time(at) for at in (about.first_at, about.last_at))
    return f"{name.stem}.parquet is missing; its {format_count(about.rows, 'row')} from {times} (UTC) are lost"


def _show_time(at_us: int) -> str:
    try:
        return datetime.datetime.fromtimestamp(at_us / 1_000_000, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return f"{at_us} us"


def search(
    segments: Sequence[Segment],
    criteria: RowCriteria,
    limit: int,
    problems: list[str],
    names: Sequence[str] | None = None,
) -> list[FoundRow]:
    """Return the newest rows that match, at most `limit`.

    Args:
        segments: The result of `list_segments`.
        criteria: Selects the rows.
        limit: The maximum number of rows.
        problems: Receives descriptions of data that cannot be read.
        names: The columns to return, in addition to the columns of the sort key; None: all.
    """
    if names is not None:
        columns = COLUMNS[criteria.table]
        names = list(dict.fromkeys([columns.at, *columns.ties, *names]))
    found: list[FoundRow] = []
    for segment in segments:
        summary = segment.summary
        if summary is not None:
            if len(found) == limit and summary.last_at < -found[-1].key[0]:
                break  # all further segments are older
            if not criteria.may_be_in(summary):
                continue
        try:
            found += _search_segment(segment, criteria, limit, problems, names)
            found = sorted(found, key=lambda each: each.key)[:limit]
        except FileNotFoundError:
            continue
        except READ_ERRORS as error:
            problems.append(f"{segment.location} is damaged and was skipped: {to_one_line(str(error))}")
    return found


def _search_segment(
    segment: Segment, criteria: RowCriteria, limit: int, problems: list[str], names: Sequence[str] | None
) -> list[FoundRow]:
    if segment.summary is not None:
        return _search_sealed(segment.store, segment.name, criteria, limit, names)
    try:
        parts, problem = segment.store.list_parts(segment.name)
    except FileNotFoundError:  # sealed a moment ago, or removed
        name = SegmentName(segment.name.number, segment.name.table, sealed=True)
        return _search_sealed(segment.store, name, criteria, limit, names)
    if problem:
        problems.append(f"{segment.location} is damaged; the rest of it was skipped: {to_one_line(problem)}")
    found: list[FoundRow] = []
    for part in parts:
        if criteria.may_be_in(part.summary):
            rows = _choose(part.read(list_columns(criteria)), criteria, limit)
            if len(rows):
                found += _finish(part.read(names).take(rows), criteria, segment.store.recording, limit)
    return found


def _search_sealed(
    store: SegmentStore, name: SegmentName, criteria: RowCriteria, limit: int, names: Sequence[str] | None
) -> list[FoundRow]:
    groups = _find_groups(store, name, criteria)
    if groups is not None and not groups:
        return []
    file = store.open_rows(name)
    groups = [group for group in groups or range(file.num_row_groups) if _may_have_offset(file, group, criteria)]
    if not groups:
        return []
    # Read the columns of the criteria first, and all others only from the row groups with matches.
    rows = _choose(_read(file, groups, list_columns(criteria)), criteria, limit)
    if not len(rows):
        return []
    needed, positions = _locate(file, groups, rows.to_pylist())
    return _finish(_read(file, needed, names).take(positions), criteria, store.recording, limit)


def _read(file: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str] | None) -> pa.Table:
    import pyarrow as pa

    try:
        return file.read_row_groups(list(groups), columns=columns, use_threads=False)
    except pa.ArrowException as error:
        raise DamagedSegmentError(str(error)) from error


def _find_groups(store: SegmentStore, name: SegmentName, criteria: RowCriteria) -> list[int] | None:
    """Return the row groups that may match according to the indexes; None if no index applies."""
    groups: set[int] | None = None
    values = {
        "key": criteria.key,
        "task_id": None if criteria.task_id is None else criteria.task_id.encode("utf-8", "surrogatepass"),
        "label": None if criteria.label is None else pack_label(*criteria.label),
    }
    for index, value in values.items():
        if value is not None:
            some = set(store.find_index(name, index).find_groups(value))
            groups = some if groups is None else groups & some
    return None if groups is None else sorted(groups)


def _may_have_offset(file: pq.ParquetFile, group: int, criteria: RowCriteria) -> bool:
    """Return whether a row group may have the offsets according to its statistics; rows are sorted by offset."""
    columns, names = COLUMNS[criteria.table], _number_columns(file)
    about = file.metadata.row_group(group)
    partitions = _find_range(about, names["partition"], names["partition"])
    offsets = _find_range(about, names[columns.first], names[columns.last])
    if criteria.positions:
        return any(
            partitions[0] <= partition <= partitions[1] and has_between(wanted, *offsets)
            for (_, partition), wanted in group_positions(criteria.positions).items()
        )
    return all(
        wanted is None or low <= wanted <= high
        for wanted, (low, high) in ((criteria.partition, partitions), (criteria.offset, offsets))
    )


def _find_range(about: Any, first: int, last: int) -> tuple[int, int]:
    """Return the minimum of one column and the maximum of another in a row group; the widest range if unknown."""
    low, high = about.column(first).statistics, about.column(last).statistics
    if low is None or not low.has_min_max or high is None or not high.has_min_max:
        return -(2**63), 2**63
    return low.min, high.max


def _number_columns(file: pq.ParquetFile) -> dict[str, int]:
    about = file.metadata.row_group(0)
    return {about.column(number).path_in_schema: number for number in range(about.num_columns)}


def _choose(table: pa.Table, criteria: RowCriteria, limit: int) -> pa.Array:
    """Return the indexes of rows that may be among the newest matches, by time alone, which is fast.

    These are more than `limit` if several rows share the time of the last one or of the cursor.
    """
    import pyarrow.compute as pc

    for name in WORDS[criteria.table]:
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, table[name].cast("string"))
    mask = match_rows(table, criteria)
    at = pc.coalesce(table[COLUMNS[criteria.table].at].combine_chunks(), 0)
    rows = pc.indices_nonzero(pc.is_valid(at) if mask is None else mask)
    at = at.take(rows)
    if criteria.after is None:
        return rows.filter(pc.greater_equal(at, _find_threshold(at, limit)))
    start = -int(criteria.after[0])
    earlier = pc.less(at, start)
    threshold = _find_threshold(at.filter(earlier), limit)
    return rows.filter(pc.or_(pc.equal(at, start), pc.and_(earlier, pc.greater_equal(at, threshold))))


def _find_threshold(times: pa.Array, limit: int) -> int:
    """Return the lowest of the newest `limit` times."""
    import pyarrow.compute as pc

    if len(times) <= limit:
        return -(2**63)
    newest = times.take(pc.select_k_unstable(times, limit, sort_keys=[("", "descending")]))
    return int(pc.min(newest).as_py())


def _finish(table: pa.Table, criteria: RowCriteria, recording: str, limit: int) -> list[FoundRow]:
    """Return the first rows in order."""
    import pyarrow.compute as pc

    columns = COLUMNS[criteria.table]
    keys = table.select([columns.at, *columns.ties])
    for number, name in enumerate(keys.column_names):
        keys = keys.set_column(number, name, keys[name].cast("string") if name in WORDS[criteria.table] else keys[name])
    keys = keys.set_column(0, columns.at, pc.coalesce(keys[columns.at], 0))
    if criteria.after is not None:
        later = is_after(keys, criteria.after, recording, columns)
        keys, table = keys.filter(later), table.filter(later)
    order = [(columns.at, "descending"), *((name, "ascending") for name in columns.ties)]
    first = pc.select_k_unstable(keys, min(limit, len(keys)), sort_keys=order)
    found = []
    for row in table.take(first).to_pylist():
        row["recording"] = recording
        key = (-(row[columns.at] or 0), recording, *(row[name] for name in columns.ties))
        found.append(FoundRow(key, row))
    return found


def _locate(file: pq.ParquetFile, groups: Sequence[int], rows: Sequence[int]) -> tuple[list[int], pa.Array]:
    """Return the row groups that contain the given rows, and the rows' indexes when only those groups are read."""
    import pyarrow as pa

    starts, start = {}, 0
    for group in groups:
        size = file.metadata.row_group(group).num_rows
        starts[group] = range(start, start + size)
        start += size
    needed = [group for group in groups if any(row in starts[group] for row in rows)]
    positions, start = {}, 0
    for group in needed:
        for row in rows:
            if row in starts[group]:
                positions[row] = start + row - starts[group].start
        start += len(starts[group])
    return needed, pa.array([positions[row] for row in rows], pa.int64())
