"""Searches rows of messages and tasks over many segments: the newest first, as many as a page has.

Invariant: the order is total and the same whether a row is in an open or in a sealed segment, so that a cursor (the
sort key of the last row) leads to exactly the rows after it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.core.recorder.cursor import Key
from tidemill.recorder.frames import DamagedSegmentError
from tidemill.recorder.periods import SegmentName
from tidemill.recorder.schema import RowTable
from tidemill.recorder.sealing import pack_label
from tidemill.recorder.segment_store import SegmentStore
from tidemill.recorder.summary import SegmentSummary

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

#: Columns that are dictionaries in open segments.
_WORDS = ("topic", "status", "kind", "engine_id")


class Columns(msgspec.Struct, frozen=True):
    """What the columns of a table are for; rows are ordered by `at` backwards, then by recording and `ties`."""

    at: str
    start: str
    kind: str
    first: str
    last: str
    ties: tuple[str, ...]


COLUMNS = {
    RowTable.MESSAGES: Columns(
        "resolved_at", "consumed_at", "status", "offset", "offset", ("topic", "partition", "offset", "engine_id")
    ),
    RowTable.TASKS: Columns(
        "ended_at", "started_at", "kind", "first_offset", "last_offset", ("task_id", "attempt", "engine_id")
    ),
}
#: The types of a sort key: the time, the recording, the ties.
KEY_KINDS: dict[RowTable, tuple[type[int] | type[str], ...]] = {
    RowTable.MESSAGES: (int, str, str, int, int, str),
    RowTable.TASKS: (int, str, str, int, str),
}


class Criteria(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows; what is None or empty matches all. Times and durations are microseconds.

    Attributes:
        places: Topics, partitions and offsets of messages, instead of one.
        after: The sort key of the row before the first one.
    """

    table: RowTable
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    key: bytes | None = None
    task_id: str | None = None
    label: tuple[str, str] | None = None
    kinds: tuple[str, ...] = ()
    min_us: int | None = None
    max_us: int | None = None
    since_us: int | None = None
    until_us: int | None = None
    places: frozenset[tuple[str, int, int]] = frozenset()
    after: Key | None = None

    def may_be_in(self, summary: SegmentSummary) -> bool:
        """Tell whether a segment may have such rows."""
        if self.since_us is not None and summary.last_at < self.since_us:
            return False
        if self.until_us is not None and summary.first_at >= self.until_us:
            return False
        if self.after is not None and summary.first_at > -int(self.after[0]):
            return False
        if self.min_us is not None and summary.longest_us < self.min_us:
            return False
        if self.kinds and not any(kind in summary.kinds for kind in self.kinds):
            return False
        if self.places:
            return any(summary.has_offset(topic, partition, offset, offset) for topic, partition, offset in self.places)
        return summary.has_offset(self.topic, self.partition, self.offset, self.offset)


class Found(msgspec.Struct, frozen=True):
    """A row, and its sort key."""

    key: tuple[Any, ...]
    row: dict[str, Any]


class Segment(msgspec.Struct, frozen=True):
    """A segment of a store; `summary` is None while it is open."""

    store: SegmentStore
    name: SegmentName
    summary: SegmentSummary | None

    @property
    def place(self) -> str:
        """What it is called in problems."""
        return f"{self.store.recording}: {self.name.stem}"


#: What reading a segment may raise; the segment is passed over, and the problem is said.
READ_ERRORS = (OSError, DamagedSegmentError, ValueError, KeyError, IndexError, ArithmeticError)


def list_segments(stores: Iterable[SegmentStore], table: RowTable, problems: list[str]) -> list[Segment]:
    """Return the segments of a table: open ones, then sealed ones, the newest first."""
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
                continue  # retention was faster
            except READ_ERRORS as error:
                problems.append(f"{store.recording}: {name.stem} is damaged and was skipped: {error}")
    sealed.sort(key=lambda segment: segment.summary.last_at if segment.summary else 0, reverse=True)
    return opened + sealed


def search(segments: Sequence[Segment], criteria: Criteria, limit: int, problems: list[str]) -> list[Found]:
    """Return the newest rows that match, at most `limit`.

    Args:
        segments: From `list_segments`.
        criteria: Which rows.
        limit: How many.
        problems: What cannot be read is added here.
    """
    found: list[Found] = []
    for segment in segments:
        summary = segment.summary
        if summary is not None:
            if len(found) == limit and summary.last_at < -found[-1].key[0]:
                break  # the segments after it are older still
            if not criteria.may_be_in(summary):
                continue
        try:
            found += _search_segment(segment, criteria, limit, problems)
            found = sorted(found, key=lambda each: each.key)[:limit]
        except FileNotFoundError:
            continue
        except READ_ERRORS as error:
            problems.append(f"{segment.place} is damaged and was skipped: {error}")
    return found


def _search_segment(segment: Segment, criteria: Criteria, limit: int, problems: list[str]) -> list[Found]:
    recording = segment.store.recording
    if segment.summary is None:
        try:
            parts, problem = segment.store.list_parts(segment.name)
        except FileNotFoundError:
            # Sealed a moment ago, or removed.
            return _search_just_sealed(segment, criteria, limit)
        if problem:
            problems.append(f"{segment.place} is damaged; the rest of it was skipped: {problem}")
        found: list[Found] = []
        for part in parts:
            rows = _select(part, criteria, recording, limit)
            found += _to_found(part.take(rows["row"]), criteria.table, recording)
        return found
    return _search_sealed(segment.store, segment.name, criteria, limit)


def _search_just_sealed(segment: Segment, criteria: Criteria, limit: int) -> list[Found]:
    name = SegmentName(segment.name.number, segment.name.table, sealed=True)
    return _search_sealed(segment.store, name, criteria, limit)


def _search_sealed(store: SegmentStore, name: SegmentName, criteria: Criteria, limit: int) -> list[Found]:
    file = None
    groups = _find_groups(store, name, criteria)
    if groups is None:
        file = store.open_rows(name)
        groups = list(range(file.num_row_groups))
    if not groups:
        return []
    file = file or store.open_rows(name)
    groups = [group for group in groups if _may_have_offset(file, group, criteria)]
    if not groups:
        return []
    table = _read(file, groups, _list_columns(criteria))
    chosen = _select(table, criteria, store.recording, limit)
    if not len(chosen):
        return []
    needed, rows = _locate(file, groups, chosen["row"].to_pylist())
    return _to_found(_read(file, needed, None).take(rows), criteria.table, store.recording)


def _read(file: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str] | None) -> pa.Table:
    import pyarrow as pa

    try:
        return file.read_row_groups(list(groups), columns=columns, use_threads=False)
    except pa.ArrowException as error:
        raise DamagedSegmentError(str(error)) from error


def _find_groups(store: SegmentStore, name: SegmentName, criteria: Criteria) -> list[int] | None:
    """Return the row groups that may match by an index; None: no index says."""
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


def _may_have_offset(file: pq.ParquetFile, group: int, criteria: Criteria) -> bool:
    """Tell by its statistics whether a row group may have the offset; rows are sorted by it."""
    columns, names = COLUMNS[criteria.table], _column_places(file)
    about = file.metadata.row_group(group)
    for first, last, wanted in (
        ("partition", "partition", criteria.partition),
        (columns.first, columns.last, criteria.offset),
    ):
        low, high = about.column(names[first]).statistics, about.column(names[last]).statistics
        known = low is not None and low.has_min_max and high is not None and high.has_min_max
        if wanted is not None and known and not low.min <= wanted <= high.max:
            return False
    return True


def _column_places(file: pq.ParquetFile) -> dict[str, int]:
    about = file.metadata.row_group(0)
    return {about.column(place).path_in_schema: place for place in range(about.num_columns)}


def _list_columns(criteria: Criteria) -> list[str]:
    """Return the columns that decide whether and where a row is in the answer."""
    columns = COLUMNS[criteria.table]
    names = [columns.at, *columns.ties]
    names += [columns.start] if criteria.min_us is not None or criteria.max_us is not None else []
    names += [columns.kind] if criteria.kinds else []
    names += ["topic"] if criteria.topic is not None else []
    names += ["partition"] if criteria.partition is not None else []
    names += [columns.first, columns.last] if criteria.offset is not None else []
    names += ["key"] if criteria.key is not None else []
    names += ["labels"] if criteria.label is not None else []
    if criteria.offset is not None and criteria.table is RowTable.TASKS:
        names.append("offsets")
    return list(dict.fromkeys(names))


def _select(table: pa.Table, criteria: Criteria, recording: str, limit: int) -> pa.Table:
    """Return the numbers of the newest rows of a table that match, as a column `row`, in order."""
    import pyarrow.compute as pc

    columns = COLUMNS[criteria.table]
    for name in _WORDS:
        if name in table.column_names:
            place = table.column_names.index(name)
            table = table.set_column(place, name, table[name].cast("string"))
    mask = _match(table, criteria, columns)
    rows = pc.indices_nonzero(mask) if mask is not None else _count_up(len(table))
    picked = (
        table.select([columns.at, *columns.ties]).take(rows)
        if mask is not None
        else table.select([columns.at, *columns.ties])
    )
    picked = picked.set_column(0, columns.at, pc.coalesce(picked[columns.at], 0)).append_column("row", rows)
    if criteria.after is not None:
        picked = picked.filter(_is_after(picked, criteria.after, recording, columns))
    keys = [(columns.at, "descending"), *((name, "ascending") for name in columns.ties)]
    return picked.take(pc.select_k_unstable(picked, min(limit, len(picked)), sort_keys=keys))


def _count_up(number: int) -> pa.Array:
    import pyarrow as pa

    return pa.array(range(number), pa.uint64())


def _match(table: pa.Table, criteria: Criteria, columns: Columns) -> pa.ChunkedArray | None:
    """Return which rows match; None: all."""
    import pyarrow as pa
    import pyarrow.compute as pc

    masks = []
    for name, wanted in (
        ("topic", criteria.topic),
        ("partition", criteria.partition),
        ("task_id", criteria.task_id),
        ("key", criteria.key),
    ):
        if wanted is not None:
            masks.append(pc.equal(table[name], wanted))
    if criteria.kinds:
        masks.append(pc.is_in(table[columns.kind], pa.array(criteria.kinds)))
    if criteria.since_us is not None:
        masks.append(pc.greater_equal(table[columns.at], criteria.since_us))
    if criteria.until_us is not None:
        masks.append(pc.less(table[columns.at], criteria.until_us))
    if criteria.min_us is not None or criteria.max_us is not None:
        took = pc.subtract(table[columns.at], table[columns.start])
        if criteria.min_us is not None:
            masks.append(pc.greater_equal(took, criteria.min_us))
        if criteria.max_us is not None:
            masks.append(pc.less_equal(took, criteria.max_us))
    if criteria.label is not None:
        name, value = criteria.label
        masks.append(pc.equal(pc.map_lookup(table["labels"], pa.scalar(name), "first"), value))
    if criteria.places:
        masks.append(_match_places(table, criteria.places))
    if criteria.offset is not None:
        masks.append(pc.less_equal(table[columns.first], criteria.offset))
        masks.append(pc.greater_equal(table[columns.last], criteria.offset))
        if criteria.table is RowTable.TASKS:
            within = functools.reduce(pc.and_, masks)
            has = (
                maybe and criteria.offset in (offsets or ())
                for maybe, offsets in zip(within.to_pylist(), table["offsets"].to_pylist(), strict=True)
            )
            masks.append(pa.chunked_array([pa.array(list(has), pa.bool_())]))
    return pc.fill_null(functools.reduce(pc.and_kleene, masks), False) if masks else None


def _match_places(table: pa.Table, places: Iterable[tuple[str, int, int]]) -> Any:
    """Return which messages are among some; these are few, and in few partitions."""
    import pyarrow as pa
    import pyarrow.compute as pc

    partitions: dict[tuple[str, int], list[int]] = {}
    for topic, partition, offset in places:
        partitions.setdefault((topic, partition), []).append(offset)
    masks = []
    for (topic, partition), offsets in partitions.items():
        here = pc.and_(pc.equal(table["topic"], topic), pc.equal(table["partition"], partition))
        masks.append(pc.and_(here, pc.is_in(table["offset"], pa.array(offsets, pa.int64()))))
    return functools.reduce(pc.or_, masks)


def _is_after(table: pa.Table, after: Key, recording: str, columns: Columns) -> Any:
    """Return which rows come after a sort key."""
    import pyarrow.compute as pc

    at, where, *ties = after
    if recording != where:
        return (pc.less_equal if recording > str(where) else pc.less)(table[columns.at], -int(at))
    later: Any = None
    for name, value in reversed(list(zip(columns.ties, ties, strict=True))):
        greater = pc.greater(table[name], value)
        later = greater if later is None else pc.or_(greater, pc.and_(pc.equal(table[name], value), later))
    return pc.or_(pc.less(table[columns.at], -int(at)), pc.and_(pc.equal(table[columns.at], -int(at)), later))


def _locate(file: pq.ParquetFile, groups: Sequence[int], rows: Sequence[int]) -> tuple[list[int], pa.Array]:
    """Return the row groups that have some rows of these groups, and where the rows are in those alone."""
    import pyarrow as pa

    starts, start = {}, 0
    for group in groups:
        size = file.metadata.row_group(group).num_rows
        starts[group] = range(start, start + size)
        start += size
    needed = [group for group in groups if any(row in starts[group] for row in rows)]
    places, start = {}, 0
    for group in needed:
        for row in rows:
            if row in starts[group]:
                places[row] = start + row - starts[group].start
        start += len(starts[group])
    return needed, pa.array([places[row] for row in rows], pa.int64())


def _to_found(table: pa.Table, kind: RowTable, recording: str) -> list[Found]:
    columns = COLUMNS[kind]
    found = []
    for row in table.to_pylist():
        row["recording"] = recording
        key = (-(row[columns.at] or 0), recording, *(row[name] for name in columns.ties))
        found.append(Found(key, row))
    return found
