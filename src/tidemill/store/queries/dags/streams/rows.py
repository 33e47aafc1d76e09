"""Reads the streams of tasks: the numbers that decide which events are delivered next."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, and_, case, literal_column, select

from tidemill.core.tasks.stream_progress import StreamProgress
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.worker_calls import ClaimedStream
from tidemill.store.dag_tables import task_instance
from tidemill.store.queries.dags.items.backlog import has_room
from tidemill.store.queries.dags.state.effects import count_carried
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.statements import Statement
from tidemill.store.tables import trigger, trigger_cursor, trigger_stream

_STREAM, _CURSOR, _TASK = trigger_stream.c, trigger_cursor.c, task_instance.c
_OF_TASKS = RowSet("of_streams", task=int, epoch=int)
#: The number of undelivered events of a stream whose events are elements of a map with a full backlog.
FULL = 1 << 31


def read_streams(connection: Connection, entries: Iterable[TaskEntry]) -> dict[int, ClaimedStream]:
    """Return the streams of tasks, by task."""
    streams = {entry.id: entry.row.stream for entry in entries if entry.row.stream is not None}
    if not streams:
        return {}
    wanted = [(task, stream.epoch) for task, stream in streams.items()]
    rows = _streams.fetch(connection, _OF_TASKS.build_parameters(find_dialect(connection), wanted))
    return {
        task: ClaimedStream(number, handled, kept, checkpoint, streams[task].due_us, carried)
        for task, number, handled, kept, checkpoint, carried in rows
    }


@Statement
def _streams(dialect: str) -> Select[Any]:
    given = _OF_TASKS.build_source(dialect)
    same = and_(trigger.c.task_id == given.c.task, trigger.c.epoch == given.c.epoch)
    return (
        select(_STREAM.task, _STREAM.trigger_id, _STREAM.handled, _STREAM.kept, _STREAM.checkpoint, _STREAM.carried)
        .join(trigger, trigger.c.id == _STREAM.trigger_id)
        .join(given, same)
    )


class StreamRow(NamedTuple):
    trigger: int
    task: int
    handled: int
    ended_us: int | None
    error: str | None
    held: int
    ends_at: int | None
    ending: str | None
    feeds: int
    next_index: int
    state: str
    run: int
    task_id: str
    carried: int

    @property
    def progress(self) -> StreamProgress:
        return StreamProgress(self.next_index, self.handled, self.ended_us is not None, self.ends_at, self.carried)


def is_held(connection: Connection, stream: StreamRow) -> bool:
    """Return whether the events of a stream wait until a map over its task has room."""
    waits = bool(stream.held) and stream.progress.has_events
    return waits and not has_room(connection, stream.run, stream.task, stream.task_id)


def read_rows(connection: Connection, triggers: Collection[int]) -> list[StreamRow]:
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(triggers))
    return [StreamRow(*row) for row in _rows.fetch(connection, given)]


@Statement
def _rows(dialect: str) -> Select[Any]:
    wanted = select(IDS.build_source(dialect).c.id)
    zero: ColumnElement[int] = literal_column("0")
    return (
        select(
            _STREAM.trigger_id,
            _STREAM.task,
            _STREAM.handled,
            _STREAM.ended_us,
            _STREAM.error,
            _STREAM.held,
            _STREAM.ends_at,
            _STREAM.ending,
            _STREAM.feeds,
            _CURSOR.next_index,
            _TASK.state,
            _TASK.run,
            _TASK.task_id,
            # Few streams begin with events of earlier ones.
            case((_STREAM.carried > zero, count_carried(_STREAM.task, _STREAM.trigger_id)), else_=zero),
        )
        .join(trigger_cursor, _CURSOR.trigger_id == _STREAM.trigger_id)
        .join(task_instance, _TASK.id == _STREAM.task)
        .where(_STREAM.trigger_id.in_(wanted))
        .order_by(_STREAM.trigger_id)
    )
