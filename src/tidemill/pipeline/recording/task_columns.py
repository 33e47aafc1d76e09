"""Packs rows of tasks into Arrow's columns; most of these have the same value in all rows, or numbers only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.pipeline.reports.columns import encode_words, is_constant, pack_longs
from tidemill.recorder.schema import tasks_schema
from tidemill.recorder.texts import clean_name

if TYPE_CHECKING:
    import pyarrow as pa

#: One value for each column of `tasks_schema`.
TaskRow = tuple[Any, ...]
#: The columns of `tasks_schema`, by name.
Columns = dict[str, "pa.Array"]

_STREAMS = frozenset({"stdout", "stderr", "stdin"})
_LONGS = frozenset({"queued_at", "started_at", "ended_at", "input_bytes", "output_bytes"})


def pack_tasks(rows: Sequence[TaskRow], mask: Callable[[bytes], bytes | None] | None = None) -> Columns:
    """Return rows as columns.

    Args:
        rows: At least one.
        mask: Applied to what tasks read and wrote; None: there is nothing of that.
    """
    schema = tasks_schema()
    columns: Columns = {}
    for field, values in zip(schema, zip(*rows, strict=True), strict=True):
        columns[field.name] = _pack(field, values, mask)
    return columns


def _pack(field: pa.Field, values: Sequence[Any], mask: Callable[[bytes], bytes | None] | None) -> pa.Array:
    import pyarrow as pa

    name, kind = field.name, field.type
    if name == "kind":
        return encode_words(values)
    if name == "topic":
        names = {topic: clean_name(topic) for topic in set(values)}
        return encode_words([names[topic] for topic in values])
    if name == "offsets":
        lengths = [0, *itertools.accumulate(map(len, values))]
        flat = list(itertools.chain.from_iterable(values))
        return pa.ListArray.from_arrays(pa.array(lengths, pa.int32()), pack_longs(flat))
    if name in _STREAMS and mask is not None and values.count(None) < len(values):
        return pa.array([None if data is None else mask(data) for data in values], kind)
    if is_constant(values):
        return pa.nulls(len(values), kind) if values[0] is None else pa.repeat(pa.scalar(values[0], kind), len(values))
    return pack_longs(values) if name in _LONGS else pa.array(values, kind)
