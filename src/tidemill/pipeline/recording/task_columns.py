"""Packs rows of tasks into Arrow columns; most columns have one value in all rows, or contain only numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from tidemill.pipeline.reports.columns import is_constant
from tidemill.pipeline.reports.parts import (
    COUNTS,
    LONGS,
    SPANS,
    Packed,
    Part,
    Values,
    are_nothing,
    join_parts,
    pack_lists,
    pack_texts,
    pack_words,
    spread_words,
)
from tidemill.recorder.format.recordable_text import MAX_NAME_CHARS, clean_name
from tidemill.recorder.format.schema import tasks_schema
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

#: A task row has at most this many offsets.
MAX_OFFSETS = 1_000

#: The recorded part of standard output, standard error and input.
Streams = tuple[bytes | None, bytes | None, bytes | None]
#: Details of an unusual task: its kind, the id of the task that it replaced, streams, and error.
Extras = tuple[str, str | None, Streams, str | None]
#: Cleaned arguments and labels, exit code, and extras.
Details = tuple[Sequence[str], Sequence[tuple[str, str]], int | None, Extras | None]
#: Id, partition, offsets, slot, pid, end (UTC, in microseconds), the time from queueing to end and from start to end if
#: it was started (in seconds), attempt, bytes of input and of output, and details; a successful task without arguments
#: and labels has no details.
TaskRow = tuple[
    str,
    TopicPartition,
    Sequence[int],
    int | None,
    int | None,
    int,
    float,
    float | None,
    int,
    int,
    int,
    Details | None,
]
#: The kind of a successful task.
OK = "ok"
_ORDINARY: Extras = (OK, None, (None, None, None), None)
_NO_DETAILS: Details = ([], [], 0, None)
#: Column parts by name: the columns of `tasks_schema`, and others that some of them are computed from.
TaskParts = dict[str, "Part"]


def pack_tasks(rows: Sequence[TaskRow], mask: Callable[[bytes], bytes | None] = bytes) -> TaskParts:
    """Return rows as parts of columns.

    Args:
        rows: At least one row.
        mask: Applied to the input and output of tasks.
    """
    (
        ids,
        topic_partitions,
        offsets,
        slots,
        pids,
        ended,
        waited,
        seconds,
        attempts,
        input_bytes,
        output_bytes,
        details,
    ) = zip(*rows, strict=True)
    return {
        "task_id": pack_texts(_clean_all(ids)),
        **_pack_partitions(topic_partitions),
        "offsets": pack_lists(offsets, MAX_OFFSETS),
        "slot": COUNTS.pack(slots),
        "pid": COUNTS.pack(pids),
        "waited": SPANS.pack(waited),
        "seconds": SPANS.pack(seconds),
        "ended_at": LONGS.pack(ended),
        "attempt": COUNTS.pack(attempts),
        "input_bytes": LONGS.pack(input_bytes),
        "output_bytes": LONGS.pack(output_bytes),
        **_pack_details(details, mask),
    }


#: The numbers of a plain task, in the order of `PlainTasks.add`: column and format.
_NUMBERS = {
    "offsets": LONGS,
    "slot": COUNTS,
    "pid": COUNTS,
    "ended_at": LONGS,
    "waited": SPANS,
    "seconds": SPANS,
    "attempt": COUNTS,
    "input_bytes": LONGS,
    "output_bytes": LONGS,
}


class PlainTasks:
    """Rows of successful tasks of one message each, without details, stored column by column.

    They are packed immediately: as objects, the values of some hundred rows would evict the engine's working set from
    the CPU caches, and lists of them are copied whenever they grow.

    Attributes:
        size: The number of current rows.
    """

    __slots__ = ("_ids", "_lengths", "_numbers", "_sizes", "_topic_partitions", "size")

    def __init__(self) -> None:
        self.size = 0
        self._ids: list[bytes] = []
        self._lengths: list[bytes] = []
        #: The partition of each group of rows, and the size of the group.
        self._topic_partitions: list[TopicPartition] = []
        self._sizes: list[int] = []
        self._numbers: tuple[list[bytes], ...] = tuple([] for _ in _NUMBERS)

    def add(self, topic_partition: TopicPartition, ids: Sequence[str], *numbers: Sequence[int | float | None]) -> None:
        """Add one or more rows of a partition.

        Args:
            topic_partition: The partition.
            ids: The id of each task.
            numbers: The offset of each task's message, then the fields of `TaskRow` from the slot on, without the
                details.

        Raises:
            Exception: A value does not fit, or needs cleaning; no row was added.
        """
        names, lengths = "".join(ids), list(map(len, ids))
        if not names.isascii() or max(lengths) > MAX_NAME_CHARS:
            raise ValueError("an id needs cleaning")
        packed_lengths, packed_names = COUNTS.pack_present(lengths), names.encode()
        packed = [
            kind.pack_present(cast("Sequence[float]", values))
            for kind, values in zip(_NUMBERS.values(), numbers, strict=True)
        ]
        self._ids.append(packed_names)
        self._lengths.append(packed_lengths)
        self._topic_partitions.append(topic_partition)
        self._sizes.append(len(ids))
        for column, values in zip(self._numbers, packed, strict=True):
            column.append(values)
        self.size += len(ids)

    def pack(self) -> TaskParts:
        """Return the rows as parts of columns; there must be at least one row."""
        numbers = dict(zip(_NUMBERS, map(b"".join, self._numbers), strict=True))
        return {
            **numbers,
            "task_id": Packed(b"".join(self._lengths), b"".join(self._ids)),
            "topic": spread_words([clean_name(topic) for topic, _ in self._topic_partitions], self._sizes),
            "partition": COUNTS.spread([partition for _, partition in self._topic_partitions], self._sizes),
            "offsets": Packed(COUNTS.repeat(1, self.size), numbers["offsets"]),
            **_pack_details([None] * self.size, bytes),
        }


def _pack_details(details: Sequence[Details | None], mask: Callable[[bytes], bytes | None]) -> TaskParts:
    count = len(details)
    nothing = dict.fromkeys(("parent", "stdout", "stderr", "stdin", "error"), count)
    if details.count(None) == count:
        return {"args": count, "labels": count, "exit_code": COUNTS.pack([0] * count), "kind": (OK, count), **nothing}
    args, labels, codes, extras = zip(*[each or _NO_DETAILS for each in details], strict=True)
    parts: TaskParts = {
        "args": _pack("args", args),
        "labels": _pack("labels", labels),
        "exit_code": COUNTS.pack(codes if is_constant(codes) and not codes[0] else list(map(_fit, codes))),
    }
    if extras.count(None) == count:
        return parts | {"kind": (OK, count), **nothing}
    kinds, parents, streams, errors = zip(*[each or _ORDINARY for each in extras], strict=True)
    stdout, stderr, stdin = zip(*streams, strict=True)
    return parts | {
        "kind": pack_words(kinds),
        "parent": _pack("parent", parents),
        "stdout": _pack_stream("stdout", stdout, mask),
        "stderr": _pack_stream("stderr", stderr, mask),
        "stdin": _pack_stream("stdin", stdin, mask),
        "error": _pack("error", errors),
    }


def join_tasks(blocks: Sequence[TaskParts]) -> pa.RecordBatch:
    """Return rows with the columns of `tasks_schema`; there must be at least one block."""
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = tasks_schema()
    columns = {
        field.name: join_parts([block[field.name] for block in blocks], field.type)
        for field in schema
        if field.name in blocks[0]
    }
    waited, seconds = (join_parts([block[name] for block in blocks], pa.float64()) for name in ("waited", "seconds"))
    ended_at, pids = columns["ended_at"], columns["pid"]
    columns["queued_at"] = _subtract(ended_at, waited)
    # A precomputed result has no seconds and started with its window. A task without a process was not started.
    started_at = _subtract(ended_at, pc.fill_null(seconds, 0.0))
    if pids.null_count:
        was_started = pc.or_(pc.is_valid(pids), pc.is_null(seconds))
        started_at = pc.if_else(was_started, started_at, pa.scalar(None, pa.int64()))
    columns["started_at"] = started_at
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def _subtract(ended_at: pa.Array, seconds: pa.Array) -> pa.Array:
    """Return times in microseconds minus durations in seconds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.subtract(ended_at, pc.cast(pc.multiply(seconds, 1_000_000.0), pa.int64(), safe=False))


def _clean_all(ids: Sequence[str]) -> Sequence[str]:
    """Return cleaned ids; nearly always they are clean already."""
    if max(map(len, ids)) <= MAX_NAME_CHARS and "".join(ids).isascii():
        return ids
    return [clean_name(each) for each in ids]


def _pack_partitions(topic_partitions: Sequence[TopicPartition]) -> TaskParts:
    topics = [topic_partition[0] for topic_partition in topic_partitions]
    names = {topic: clean_name(topic) for topic in set(topics)}
    return {
        "topic": (names[topics[0]], len(topics)) if len(names) == 1 else pack_words([names[topic] for topic in topics]),
        "partition": COUNTS.pack([topic_partition[1] for topic_partition in topic_partitions]),
    }


def _pack(name: str, values: Sequence[Any]) -> Values:
    if are_nothing(values):
        return len(values)
    import pyarrow as pa

    return pa.array(values, tasks_schema().field(name).type)


def _pack_stream(name: str, values: Sequence[bytes | None], mask: Callable[[bytes], bytes | None]) -> Values:
    if values.count(None) < len(values):
        values = [None if data is None else mask(data) for data in values]
    return _pack(name, values)


def _fit(exit_code: int | None) -> int | None:
    """Return an exit code if it fits its column; precomputed results may have any."""
    return exit_code if exit_code is None or -(2**31) <= exit_code < 2**31 else None
