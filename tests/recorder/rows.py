"""Rows and batches for tests of the recorder."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tidemill.recorder.format.schema import RowTable, encode_rows, messages_schema, schema_of, tasks_schema

#: A moment, in UTC microseconds: 2027-01-15.
START = 1_800_000_000_000_000
TOPIC = "orders"


def message(offset: int, partition: int = 0, **columns: Any) -> dict[str, Any]:
    """Return the row of a message that was done 10 ms after it was consumed."""
    at = START + offset * 1000
    return {
        "topic": TOPIC,
        "partition": partition,
        "offset": offset,
        "key": f"customer-{offset}".encode(),
        "record_at": at - 500_000,
        "consumed_at": at,
        "arranged_at": at + 1000,
        "tasks_done_at": at + 8000,
        "resolved_at": at + 10_000,
        "committed_at": None,
        "window": offset // 10,
        "status": "done",
        "tasks": 1,
        "precomputed": 0,
        "attempts": 1,
        "payloads": 1,
        "error": None,
    } | columns


def task(task_id: str, offsets: list[int], partition: int = 0, **columns: Any) -> dict[str, Any]:
    """Return the row of a task that ran for 5 ms."""
    at = START + (offsets[0] if offsets else 0) * 1000
    return {
        "task_id": task_id,
        "topic": TOPIC,
        "partition": partition,
        "offsets": offsets,
        "args": ["--fast"],
        "labels": [("tenant", "acme")],
        "slot": 1,
        "pid": 4711,
        "queued_at": at + 1500,
        "started_at": at + 2000,
        "ended_at": at + 7000,
        "exit_code": 0,
        "kind": "ok",
        "attempt": 1,
        "input_bytes": 10,
        "output_bytes": 20,
        "parent": None,
        "stdout": None,
        "stderr": None,
        "error": None,
        "stdin": None,
    } | columns


def batch_of(table: RowTable, *rows: dict[str, Any]) -> pa.RecordBatch:
    """Return rows as a batch."""
    return pa.RecordBatch.from_pylist(list(rows), schema=schema_of(table))


def messages(*rows: dict[str, Any]) -> bytes:
    """Return messages as an engine sends them."""
    return encode_rows(pa.RecordBatch.from_pylist(list(rows), schema=messages_schema()))


def tasks(*rows: dict[str, Any]) -> bytes:
    """Return tasks as an engine sends them."""
    return encode_rows(pa.RecordBatch.from_pylist(list(rows), schema=tasks_schema()))
