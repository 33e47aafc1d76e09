"""Turns the batches of an open segment into a sealed one: a Parquet file, and an index file next to it.

Rows are sorted by partition and offset, so that differences are small and the statistics of row groups narrow down
offsets. This module touches no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.recorder.format.frames import FrameInfo
from tidemill.recorder.format.hash_index import build_index, hash_value, hash_values
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.format.summary import OffsetSpan, SegmentSummary, pack_index_file

if TYPE_CHECKING:
    import pyarrow as pa

#: Small enough that a group is read quickly, large enough that its statistics cost little.
GROUP_ROWS = 8_192
#: Columns with few distinct values.
_WORDS = ("topic", "status", "error", "kind", "engine_id")
#: Columns whose statistics narrow down the row groups for an offset; statistics of other columns have no reader.
_SEARCHED = ("partition", "offset", "first_offset", "last_offset")
#: The number of values that are checked for repetition.
_SAMPLE = 1_024
#: Batches are joined until there are this many of them, or this many rows.
_BUNDLE = 64
_BUNDLE_ROWS = 1_000
#: The key of the worker's name in the metadata of the Parquet file.
WORKER = b"tidemill.worker"


class SealedSegment(msgspec.Struct, frozen=True):
    """A sealed segment before it is written."""

    summary: SegmentSummary
    parquet: Any
    index: bytes


def seal(table: RowTable, batches: Iterable[tuple[FrameInfo, pa.RecordBatch]], worker: str) -> SealedSegment:
    """Return batches as a sealed segment.

    Args:
        table: The table of the rows.
        batches: The batches, with at least one row, and their origins.
        worker: The worker's name.
    """
    rows = _sort_batches(table, batches)
    summary, index = make_index(table, rows)
    return SealedSegment(summary, _write_parquet(rows, worker), index)


def make_index(table: RowTable, rows: pa.Table) -> tuple[SegmentSummary, bytes]:
    """Return the summary of a sealed segment and its index file.

    Args:
        table: The table of the rows.
        rows: All rows, at least one, in one chunk and in the order of the file.
    """
    indexes = _index_messages(rows) if table is RowTable.MESSAGES else _index_tasks(rows)
    summary = summarize_rows(table, rows)
    return summary, pack_index_file(summary, indexes)


def join_batches(table: RowTable, batches: Iterable[tuple[FrameInfo, pa.RecordBatch]]) -> pa.Table:
    """Return batches as one table, with columns for the engine of each row."""
    import pyarrow as pa

    parts = [_complete(table, info, batch) for info, batch in batches]
    return pa.Table.from_batches(parts).unify_dictionaries().combine_chunks()


def _complete(table: RowTable, info: FrameInfo, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add the columns for the engine of the rows."""
    import pyarrow as pa

    zeros = pa.repeat(pa.scalar(0, pa.int32()), len(batch))
    engine_ids = pa.DictionaryArray.from_arrays(zeros, pa.array([info.engine_id]))
    engines = pa.repeat(pa.scalar(info.engine, pa.int32()), len(batch))
    complete = batch.append_column("engine_id", engine_ids).append_column("engine", engines)
    return _add_bounds(complete) if table is RowTable.TASKS else complete


def _add_bounds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add the first and last offset of each task; their statistics narrow down the row groups for an offset."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = batch["offsets"]
    # the usual case: one message per task
    if not lists.null_count and pc.all(pc.equal(pc.list_value_length(lists), 1)).as_py():
        only = lists.flatten()
        return batch.append_column("first_offset", only).append_column("last_offset", only)
    pairs = [(min(offsets), max(offsets)) if offsets else (-1, -1) for offsets in batch["offsets"].to_pylist()]
    for name, index in (("first_offset", 0), ("last_offset", 1)):
        batch = batch.append_column(name, pa.array([pair[index] for pair in pairs], pa.int64()))
    return batch


def _sort_batches(table: RowTable, batches: Iterable[tuple[FrameInfo, pa.RecordBatch]]) -> pa.Table:
    """Return all rows in the order of the file.

    Columns are sorted one at a time, and the batches' part of a column is released before the next, so that memory
    holds the rows only once.
    """
    import pyarrow as pa

    columns: dict[str, list[pa.Array]] = {}
    schema = None
    for some in _bundle(batches):
        joined = join_batches(table, some)
        schema = joined.schema
        for name, column in zip(schema.names, joined.columns, strict=True):
            columns.setdefault(name, []).append(column.chunk(0))
        del joined, some
    first = "offset" if table is RowTable.MESSAGES else "first_offset"
    keys = {name: _combine(columns[name]) for name in ("topic", "partition", first)}
    order = _sort(*keys.values())
    rows = {}
    for name in list(columns):
        chunks = columns.pop(name)
        whole = keys.pop(name) if name in keys else _combine(chunks)
        del chunks
        rows[name] = _reorder(whole, order)
    return pa.table(rows, schema=schema)


def _bundle(
    batches: Iterable[tuple[FrameInfo, pa.RecordBatch]],
) -> Iterator[list[tuple[FrameInfo, pa.RecordBatch]]]:
    """Yield batches in bundles: Arrow's overhead for each of many small batches exceeds the size of their rows."""
    some: list[tuple[FrameInfo, pa.RecordBatch]] = []
    for each in batches:
        some.append(each)
        if len(some) == _BUNDLE or sum(len(batch) for _, batch in some) >= _BUNDLE_ROWS:
            yield some
            some = []
    if some:
        yield some


def _combine(chunks: list[pa.Array]) -> pa.Array:
    import pyarrow as pa

    whole = pa.chunked_array(chunks).unify_dictionaries().combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def _sort(topic: pa.DictionaryArray, partition: pa.Array, offset: pa.Array) -> pa.Array:
    """Return the sort order of rows by these columns."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # Dictionary indices reflect the order of arrival, so topics are ranked by name; most pipelines read one topic.
    names = topic.dictionary
    ranks = pc.rank(names, sort_keys="ascending") if len(names) > 1 else pa.array([1] * len(names), pa.uint64())
    keys = pa.table([ranks.take(topic.indices), partition, offset], names=["topic", "partition", "offset"])
    return pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])


def _reorder(column: pa.Array, order: pa.Array) -> pa.Array:
    """Return a column in another order; a column without any values, as many of tasks, is returned as it is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.null_count == len(column):
        return column
    if pa.types.is_nested(column.type) and not column.null_count and column.offsets[0] == column.offsets[-1]:
        return column
    return pc.take(column, order, boundscheck=False)


def summarize_rows(table: RowTable, rows: pa.Table) -> SegmentSummary:
    """Return the summary of one or more rows."""
    import pyarrow.compute as pc

    messages = table is RowTable.MESSAGES
    first, last = ("offset", "offset") if messages else ("first_offset", "last_offset")
    start, end = ("consumed_at", "resolved_at") if messages else ("started_at", "ended_at")
    times = pc.min_max(pc.coalesce(rows[end], 0)).as_py()
    longest = pc.max(pc.subtract(rows[end], rows[start])).as_py()
    groups = rows.select(["topic", "partition"]).append_column("first", rows[first]).append_column("last", rows[last])
    grouped = groups.group_by(["topic", "partition"], use_threads=False)
    spans = grouped.aggregate([("first", "min"), ("last", "max"), ("first", "count")])
    kinds = pc.value_counts(rows["status" if messages else "kind"]).to_pylist()
    return SegmentSummary(
        table,
        len(rows),
        times["min"],
        times["max"],
        longest or 0,
        {kind["values"]: kind["counts"] for kind in kinds},
        [
            OffsetSpan(row["topic"], row["partition"], row["first_min"], row["last_max"], row["first_count"])
            for row in spans.to_pylist()
        ],
    )


def _index_messages(rows: pa.Table) -> dict[str, bytes]:
    return {"key": build_index(_split(_hash_column(rows["key"].chunk(0))))}


def _index_tasks(rows: pa.Table) -> dict[str, bytes]:
    import pyarrow as pa

    labels: list[pa.Array] = []
    has_labels = len(rows["labels"].chunk(0).keys) > 0
    for at in range(0, len(rows), GROUP_ROWS):
        if not has_labels:
            labels.append(pa.array([], pa.uint32()))
            continue
        named = {pair for pairs in rows["labels"][at : at + GROUP_ROWS].to_pylist() for pair in pairs or ()}
        labels.append(pa.array([hash_value(pack_label(*pair)) for pair in named], pa.uint32()))
    return {"task_id": build_index(_split(_hash_column(rows["task_id"].chunk(0)))), "label": build_index(labels)}


def pack_label(name: str, value: str) -> bytes:
    """Return the value under which a label is indexed."""
    return f"{name}={value}".encode()


def _hash_column(values: pa.Array) -> pa.Array:
    """Return the hashes of a column; if values repeat, each distinct value is hashed once."""
    import pyarrow as pa

    values = values.cast(pa.binary())
    if len(values[:_SAMPLE].unique()) > len(values[:_SAMPLE]) // 2:
        return hash_values(values)
    coded = values.dictionary_encode()
    return hash_values(coded.dictionary).take(coded.indices)


def _split(hashes: pa.Array) -> list[pa.Array]:
    return [hashes[at : at + GROUP_ROWS] for at in range(0, len(hashes), GROUP_ROWS)]


def _write_parquet(rows: pa.Table, worker: str) -> pa.Buffer:
    import pyarrow as pa
    import pyarrow.parquet as pq

    words = [name for name in _WORDS if name in rows.column_names]
    encodings = {field.name: "DELTA_BINARY_PACKED" for field in rows.schema if pa.types.is_integer(field.type)}
    # The offsets of a task's messages are a list, mostly with one item.
    encodings |= {
        f"{field.name}.list.element": "DELTA_BINARY_PACKED"
        for field in rows.schema
        if pa.types.is_list(field.type) and pa.types.is_integer(field.type.value_type)
    }
    encodings |= {name: "DELTA_BYTE_ARRAY" for name in ("key", "task_id", "parent") if name in rows.column_names}
    sink = pa.BufferOutputStream()
    pq.write_table(
        rows.replace_schema_metadata({WORKER: worker.encode()}),
        sink,
        compression="lz4",
        row_group_size=GROUP_ROWS,
        use_dictionary=words,
        write_statistics=[name for name in _SEARCHED if name in rows.column_names],
        column_encoding=encodings,
        write_page_checksum=True,
        store_schema=False,
    )
    return sink.getvalue()
