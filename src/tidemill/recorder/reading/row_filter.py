"""Filters and orders rows of messages and tasks, in the same way for open and sealed segments."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.core.recorder.cursor import Key
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.format.summary import SegmentSummary

if TYPE_CHECKING:
    import pyarrow as pa

#: Dictionary columns; Arrow cannot compare them.
WORDS = {
    RowTable.MESSAGES: ["topic", "status", "error", "engine_id"],
    RowTable.TASKS: ["topic", "kind", "engine_id"],
}


class Columns(msgspec.Struct, frozen=True):
    """The roles of a table's columns; rows are ordered by `at` descending, then by recording and `ties`."""

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
#: The types of a sort key: negated time, recording, ties.
KEY_KINDS: dict[RowTable, tuple[type[int] | type[str], ...]] = {
    RowTable.MESSAGES: (int, str, str, int, int, str),
    RowTable.TASKS: (int, str, str, int, str),
}


class RowCriteria(msgspec.Struct, frozen=True, kw_only=True):
    """Selects rows; None or empty fields match all. Times and durations are in microseconds.

    Attributes:
        positions: Topics, partitions and offsets of several messages; a task matches by any of its messages.
        after: The sort key after which rows begin.
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
    positions: frozenset[tuple[str, int, int]] = frozenset()
    after: Key | None = None

    def may_be_in(self, summary: SegmentSummary) -> bool:
        """Return whether a segment may have matching rows."""
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
        if self.positions:
            grouped = group_positions(self.positions)
            return any(
                has_between(grouped.get((span.topic, span.partition), []), span.first, span.last)
                for span in summary.spans
            )
        return summary.has_offset(self.topic, self.partition, self.offset, self.offset)


@functools.lru_cache(maxsize=16)
def group_positions(positions: frozenset[tuple[str, int, int]]) -> dict[tuple[str, int], list[int]]:
    """Return the offsets by topic and partition, in order."""
    grouped: dict[tuple[str, int], list[int]] = {}
    for topic, partition, offset in sorted(positions):
        grouped.setdefault((topic, partition), []).append(offset)
    return grouped


def has_between(offsets: Sequence[int], first: int, last: int) -> bool:
    """Return whether any of the sorted offsets is in a range."""
    index = bisect.bisect_left(offsets, first)
    return index < len(offsets) and offsets[index] <= last


def list_columns(criteria: RowCriteria) -> list[str]:
    """Return the columns that the criteria depend on."""
    columns = COLUMNS[criteria.table]
    names = [columns.at]
    names += [columns.start] if criteria.min_us is not None or criteria.max_us is not None else []
    names += [columns.kind] if criteria.kinds else []
    names += ["topic"] if criteria.topic is not None else []
    names += ["partition"] if criteria.partition is not None else []
    names += ["task_id"] if criteria.task_id is not None else []
    if criteria.positions:
        names += ["topic", "partition", "offset" if criteria.table is RowTable.MESSAGES else "offsets"]
    names += [columns.first, columns.last] if criteria.offset is not None else []
    names += ["key"] if criteria.key is not None else []
    names += ["labels"] if criteria.label is not None else []
    if criteria.offset is not None and criteria.table is RowTable.TASKS:
        names.append("offsets")
    return list(dict.fromkeys(names))


def match_rows(table: pa.Table, criteria: RowCriteria) -> pa.ChunkedArray | None:
    """Return a mask of the matching rows; None if all match."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = COLUMNS[criteria.table]
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
        masks.append(_has_entry(table["labels"], *criteria.label))
    if criteria.positions:
        masks.append(_match_positions(table, criteria))
    if criteria.offset is not None:
        masks.append(pc.less_equal(table[columns.first], criteria.offset))
        masks.append(pc.greater_equal(table[columns.last], criteria.offset))
        if criteria.table is RowTable.TASKS:
            masks.append(_has_any(table["offsets"], pa.array([criteria.offset], pa.int64())))
    return pc.fill_null(functools.reduce(pc.and_kleene, masks), False) if masks else None


def _match_positions(table: pa.Table, criteria: RowCriteria) -> Any:
    """Return a mask of the rows of some messages, which are few and in few partitions."""
    import pyarrow as pa
    import pyarrow.compute as pc

    masks = []
    for (topic, partition), offsets in group_positions(criteria.positions).items():
        here = pc.and_(pc.equal(table["topic"], topic), pc.equal(table["partition"], partition))
        wanted = pa.array(offsets, pa.int64())
        if criteria.table is RowTable.MESSAGES:
            masks.append(pc.and_(here, pc.is_in(table["offset"], wanted)))
        else:
            masks.append(pc.and_(here, _has_any(table["offsets"], wanted)))
    return functools.reduce(pc.or_, masks)


def _has_any(lists: pa.ChunkedArray, wanted: pa.Array) -> Any:
    """Return a mask of the lists that contain any of some numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = pa.concat_arrays(lists.chunks) if lists.num_chunks else pa.array([], lists.type)
    rows = pc.list_parent_indices(whole).filter(pc.is_in(pc.list_flatten(whole), wanted))
    return _mark(rows, len(whole))


def _has_entry(maps: pa.ChunkedArray, name: str, value: str) -> Any:
    """Return a mask of the maps that have an entry. Comparing all entries at once is faster than map by map."""
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = pa.concat_arrays(maps.chunks) if maps.num_chunks else pa.array([], maps.type)
    found = pc.indices_nonzero(pc.and_(pc.equal(whole.keys, name), pc.equal(whole.items, value)))
    # An entry belongs to the last map that begins at or before it; other maps with the same start are empty.
    starts = whole.offsets.cast(pa.uint64())
    rows = pc.subtract(pc.search_sorted(starts, found, side="right").cast(pa.int64()), 1)
    return _mark(rows, len(whole))


def _mark(rows: pa.Array, count: int) -> pa.Array:
    """Return a mask of `count` rows in which the listed ones are true."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(pa.arange(0, count), rows) if len(rows) else pa.repeat(pa.scalar(False), count)


def is_after(table: pa.Table, after: Key, recording: str, columns: Columns) -> Any:
    """Return a mask of the rows that follow a sort key."""
    import pyarrow.compute as pc

    at, where, *ties = after
    if recording != where:
        return (pc.less_equal if recording > str(where) else pc.less)(table[columns.at], -int(at))
    later: Any = None
    for name, value in reversed(list(zip(columns.ties, ties, strict=True))):
        greater = pc.greater(table[name], value)
        later = greater if later is None else pc.or_(greater, pc.and_(pc.equal(table[name], value), later))
    return pc.or_(pc.less(table[columns.at], -int(at)), pc.and_(pc.equal(table[columns.at], -int(at)), later))
