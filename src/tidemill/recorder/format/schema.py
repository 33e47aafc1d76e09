"""The columns of recorded rows, and the encoding of a batch of rows: one Arrow stream with compressed buffers.

All times are UTC microseconds since the epoch. Values common to a whole batch (engine, slot) are sent separately, and
become columns of the sealed segment. pyarrow is imported when the first batch is encoded or decoded.
"""

from __future__ import annotations

import enum
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

#: Larger batches are split by rows before they are sent.
MAX_BODY_BYTES = 128 * 1024
#: Longer keys and errors are cut.
MAX_KEY_BYTES = 256
MAX_ERROR_CHARS = 4096


class RowTable(enum.StrEnum):
    """The tables of recorded rows."""

    MESSAGES = "messages"
    TASKS = "tasks"


def schema_of(table: RowTable) -> pa.Schema:
    """Return the columns that engines send for a table."""
    return messages_schema() if table is RowTable.MESSAGES else tasks_schema()


@functools.cache
def messages_schema() -> pa.Schema:
    """Return the columns of finished messages.

    `committed_at` is null if the commit was not yet known when the row was taken. `error` is the error class by which
    `tidemill dlq stats` groups, and null if nothing failed.
    """
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            pa.field("topic", word, nullable=False),
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("key", pa.binary()),
            pa.field("record_at", pa.int64()),
            pa.field("consumed_at", pa.int64()),
            pa.field("arranged_at", pa.int64()),
            pa.field("tasks_done_at", pa.int64()),
            pa.field("resolved_at", pa.int64()),
            pa.field("committed_at", pa.int64()),
            pa.field("window", pa.int64()),
            pa.field("status", word, nullable=False),
            pa.field("tasks", pa.int32(), nullable=False),
            pa.field("precomputed", pa.int32(), nullable=False),
            pa.field("attempts", pa.int32(), nullable=False),
            pa.field("payloads", pa.int32(), nullable=False),
            pa.field("error", word),
        ]
    )


@functools.cache
def tasks_schema() -> pa.Schema:
    """Return the columns of executed tasks; `slot` is the slot in the process pool, `parent` the task that this one
    replaced.
    """
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            pa.field("task_id", pa.string(), nullable=False),
            pa.field("topic", word, nullable=False),
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("offsets", pa.list_(pa.int64())),
            pa.field("args", pa.list_(pa.string())),
            pa.field("labels", pa.map_(pa.string(), pa.string())),
            pa.field("slot", pa.int32()),
            pa.field("pid", pa.int32()),
            pa.field("queued_at", pa.int64()),
            pa.field("started_at", pa.int64()),
            pa.field("ended_at", pa.int64()),
            pa.field("exit_code", pa.int32()),
            pa.field("kind", word, nullable=False),
            pa.field("attempt", pa.int32(), nullable=False),
            pa.field("input_bytes", pa.int64()),
            pa.field("output_bytes", pa.int64()),
            pa.field("parent", pa.string()),
            pa.field("stdout", pa.binary()),
            pa.field("stderr", pa.binary()),
            pa.field("error", pa.string()),
            pa.field("stdin", pa.binary()),
        ]
    )


def encode_rows(batch: pa.RecordBatch) -> bytes:
    """Return a batch encoded for sending; it is stored in this form until its segment is sealed."""
    import pyarrow as pa

    batch = _leave_out_items(batch)
    sink = pa.BufferOutputStream()
    # A batch is small; Arrow's threads would help only on an idle machine.
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


def _leave_out_items(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Drop the shared items of list and map columns whose rows in this batch are all empty.

    For a slice with only empty lists, Arrow would otherwise write the items of the whole original column.
    """
    import pyarrow as pa

    for index, field in enumerate(batch.schema):
        if pa.types.is_list(field.type) or pa.types.is_map(field.type):
            column = batch.column(index)
            if len(column.values) and column.offsets[0] == column.offsets[-1]:
                batch = batch.set_column(index, field, column.take(pa.array(range(len(column)), pa.int32())))
    return batch


def decode_rows(table: RowTable, body: bytes | memoryview) -> pa.RecordBatch:
    """Return the batch encoded in a body.

    Raises:
        ValueError: The body is not a complete batch with the columns of this table.
    """
    import pyarrow as pa

    # A batch is small: handing its columns to other threads costs more than decompressing them.
    options = pa.ipc.IpcReadOptions(use_threads=False)
    try:
        with pa.ipc.open_stream(pa.py_buffer(body), options=options) as stream:
            if not stream.schema.equals(schema_of(table)):
                raise ValueError(f"the batch has other columns than {table}: {', '.join(stream.schema.names)}")
            batch = stream.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise ValueError(f"not a batch of {table}: {error}") from error
    batch.validate(full=True)
    return batch
