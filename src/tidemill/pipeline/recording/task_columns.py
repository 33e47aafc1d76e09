"""Packs rows of tasks into Arrow's columns, most of which have the same value in all rows, or numbers only."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.pipeline.reports.columns import encode_words, is_constant, pack_longs
from tidemill.recorder.schema import tasks_schema
from tidemill.recorder.texts import clean_name
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

#: A task has up to this many offsets in its row.
MAX_OFFSETS = 1_000

#: What is kept of standard output, standard error and input.
Streams = tuple[bytes | None, bytes | None, bytes | None]
#: Id, partition, offsets, clean arguments and labels, slot, pid, when it ended (UTC, in microseconds), how long before
#: that it was queued, and started if it was (in seconds), exit code, kind, attempt, bytes of input and of output,
#: the id of the task that it replaced, streams, and error.
TaskRow = tuple[
    str,
    TopicPartition,
    Sequence[int],
    Sequence[str],
    Sequence[tuple[str, str]],
    int | None,
    int | None,
    int,
    float,
    float | None,
    int | None,
    str,
    int,
    int,
    int,
    str | None,
    Streams,
    str | None,
]
#: The columns of `tasks_schema`, by name.
Columns = dict[str, "pa.Array"]


def pack_tasks(rows: Sequence[TaskRow], mask: Callable[[bytes], bytes | None] = bytes) -> Columns:
    """Return rows as columns.

    Args:
        rows: At least one.
        mask: Applied to what tasks read and wrote.
    """
    ids, places, offsets, args, labels, slots, pids, ended, waited, seconds, *more = zip(*rows, strict=True)
    codes, kinds, attempts, input_bytes, output_bytes, parents, streams, errors = more
    stdout, stderr, stdin = zip(*streams, strict=True)
    ended_at = pack_longs(ended)
    names = {place: clean_name(place[0]) for place in set(places)}
    return {
        "task_id": _pack("task_id", [clean_name(each) for each in ids]),
        "topic": encode_words([names[place] for place in places]),
        "partition": _pack("partition", [place[1] for place in places]),
        "offsets": _pack_offsets(offsets),
        "args": _pack("args", args),
        "labels": _pack("labels", labels),
        "slot": _pack("slot", slots),
        "pid": _pack("pid", pids),
        "queued_at": _subtract(ended_at, waited),
        "started_at": _find_starts(pids, ended_at, seconds),
        "ended_at": ended_at,
        "exit_code": _pack("exit_code", codes if is_constant(codes) and not codes[0] else list(map(_fit, codes))),
        "kind": encode_words(kinds),
        "attempt": _pack("attempt", attempts),
        "input_bytes": pack_longs(input_bytes),
        "output_bytes": pack_longs(output_bytes),
        "parent": _pack("parent", [None if each is None else clean_name(each) for each in parents]),
        "stdout": _pack_stream("stdout", stdout, mask),
        "stderr": _pack_stream("stderr", stderr, mask),
        "error": _pack("error", errors),
        "stdin": _pack_stream("stdin", stdin, mask),
    }


def _find_starts(pids: Sequence[int | None], ended_at: pa.Array, seconds: Sequence[float | None]) -> pa.Array:
    """Return when tasks were started; a known result was when it ended, and what has no process was not at all."""
    import pyarrow as pa
    import pyarrow.compute as pc

    starts = _subtract(ended_at, [lasted or 0.0 for lasted in seconds])
    if None not in pids:
        return starts
    has_none = [pid is None and lasted is not None for pid, lasted in zip(pids, seconds, strict=True)]
    return pc.if_else(pa.array(has_none), pa.scalar(None, pa.int64()), starts)


def _subtract(ended_at: pa.Array, seconds: Sequence[float]) -> pa.Array:
    """Return times in microseconds less spans in seconds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    data = struct.pack(f"={len(seconds)}d", *seconds)
    spans = pa.Array.from_buffers(pa.float64(), len(seconds), [None, pa.py_buffer(data)])
    return pc.subtract(ended_at, pc.cast(pc.multiply(spans, 1_000_000.0), pa.int64(), safe=False))


def _pack(name: str, values: Sequence[Any]) -> pa.Array:
    import pyarrow as pa

    kind = tasks_schema().field(name).type
    if not is_constant(values):
        return pa.array(values, kind)
    if values[0] == []:  # lists or maps, which `repeat` takes longer for than for all other columns together
        ends, none = pa.repeat(pa.scalar(0, pa.int32()), len(values) + 1), pa.array([], pa.string())
        is_map = pa.types.is_map(kind)
        return pa.MapArray.from_arrays(ends, none, none) if is_map else pa.ListArray.from_arrays(ends, none)
    return pa.nulls(len(values), kind) if values[0] is None else pa.repeat(pa.scalar(values[0], kind), len(values))


def _pack_offsets(offsets: Sequence[Sequence[int]]) -> pa.Array:
    import pyarrow as pa

    lengths = list(map(len, offsets))
    if max(lengths) > MAX_OFFSETS:
        return pa.array([each[:MAX_OFFSETS] for each in offsets], pa.list_(pa.int64()))
    ends = pa.array([0, *itertools.accumulate(lengths)], pa.int32())
    return pa.ListArray.from_arrays(ends, pack_longs(list(itertools.chain.from_iterable(offsets))))


def _pack_stream(name: str, values: Sequence[bytes | None], mask: Callable[[bytes], bytes | None]) -> pa.Array:
    if values.count(None) < len(values):
        values = [None if data is None else mask(data) for data in values]
    return _pack(name, values)


def _fit(exit_code: int | None) -> int | None:
    """Return an exit code that fits its column; a known result may say anything."""
    return exit_code if exit_code is None or -(2**31) <= exit_code < 2**31 else None
