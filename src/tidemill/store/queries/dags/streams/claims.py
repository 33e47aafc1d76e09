"""Reads the streams that the claim of an attempt carries: its own and earlier ones, with checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, and_, func, literal_column, select

from tidemill.store.batches import find_dialect
from tidemill.store.calls.worker_calls import ClaimedStream, EarlierStream
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.queries.dags.streams.rows import read_streams
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.statements import Statement
from tidemill.store.tables import trigger_cursor, trigger_stream

_STREAM, _CURSOR = trigger_stream.c, trigger_cursor.c


def claim_streams(connection: Connection, entries: Iterable[TaskEntry]) -> dict[int, ClaimedStream]:
    """Return the streams that attempts handle, with the earlier ones whose events are delivered first, by task."""
    streams = read_streams(connection, entries)
    carrying = [task for task, stream in streams.items() if stream.carried]
    if carrying:
        earlier: dict[int, list[EarlierStream]] = {}
        given = IDS.build_parameters(find_dialect(connection), build_id_rows(carrying))
        for task, *found in _earlier.fetch(connection, given):
            if found[0] < streams[task].trigger:
                earlier.setdefault(task, []).append(EarlierStream(*found))
        for task, found in earlier.items():
            streams[task] = msgspec.structs.replace(streams[task], earlier=tuple(found))
    return streams


@Statement
def _earlier(dialect: str) -> Select[Any]:
    mine = _STREAM.task.in_(select(IDS.build_source(dialect).c.id))
    undelivered = func.coalesce(_STREAM.ends_at, _CURSOR.next_index) > _STREAM.handled
    return (
        select(_STREAM.task, _STREAM.trigger_id, _STREAM.handled, _STREAM.kept)
        .join(trigger_cursor, _CURSOR.trigger_id == _STREAM.trigger_id)
        .where(and_(mine, _STREAM.acked == literal_column("1"), undelivered))
        .order_by(_STREAM.trigger_id)
    )


def read_checkpoints(connection: Connection, entries: Iterable[TaskEntry]) -> dict[int, str]:
    """Return the last checkpoints of tasks whose try begins, from the streams of earlier tries."""
    wanted = [one.id for one in entries if one.row.resume is None and one.row.tries > one.row.tries_before + 1]
    if not wanted:
        return {}
    rows = _checkpoints.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(wanted)))
    return {task: checkpoint for task, checkpoint in rows if checkpoint is not None}


@Statement
def _checkpoints(dialect: str) -> Select[Any]:
    mine = _STREAM.task.in_(select(IDS.build_source(dialect).c.id))
    return select(_STREAM.task, _STREAM.checkpoint).where(mine).order_by(_STREAM.trigger_id)
