"""Describes the streams of tasks for display: their events, and how many of them were handled."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, and_, case, func, literal_column, select

from tidemill.store.batches import find_dialect
from tidemill.store.calls.call import Listed
from tidemill.store.calls.instance_calls import StreamAbout
from tidemill.store.calls.stream_calls import EventEnvelope, ListTaskEvents
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import task_instance
from tidemill.store.queries.dags.runs.runs import find_run
from tidemill.store.queries.dags.state.effects import count_carried
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.statements import Statement
from tidemill.store.tables import trigger, trigger_cursor, trigger_event, trigger_stream

_STREAM, _CURSOR, _EVENT, _TASK = trigger_stream.c, trigger_cursor.c, trigger_event.c, task_instance.c
#: The rate is measured over this many of the latest events.
_MEASURED = 100
#: Longer payloads, checkpoints and errors are cut.
_MAX_TEXT = 2_000


def describe_streams(connection: Connection, tasks: Collection[int], now_us: int) -> dict[int, StreamAbout]:
    """Return the latest stream of each task that has one, by the row id of the task."""
    if not tasks:
        return {}
    rows = _streams.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(tasks)))
    return {task: _describe(_Found(*found), now_us) for task, *found in rows}


class _Found(NamedTuple):
    trigger: int
    next_index: int
    ends_at: int | None
    handled: int
    checkpoint: str | None
    ended_us: int | None
    error: str | None
    measured_us: int | None
    carried: int
    own_discarded: int
    discarded: Any
    discarded_for: str | None


@Statement
def _streams(dialect: str) -> Select[Any]:
    wanted = select(IDS.build_source(dialect).c.id)
    # A trigger has a greater number than those of earlier tries.
    latest = (
        select(func.max(_STREAM.trigger_id).label("number")).where(_STREAM.task.in_(wanted)).group_by(_STREAM.task)
    ).subquery()
    before_last = _CURSOR.next_index - literal_column(str(_MEASURED))
    measured = (
        select(_EVENT.created_us)
        .where(and_(_EVENT.trigger_id == _STREAM.trigger_id, _EVENT.sequence_index >= before_last))
        .order_by(_EVENT.sequence_index)
        .limit(literal_column("1"))
        .correlate(trigger_stream, trigger_cursor)
        .scalar_subquery()
    )
    other = trigger_stream.alias("other")
    of_task = other.c.task == _STREAM.task
    discarded = select(func.sum(other.c.discarded)).where(of_task).correlate(trigger_stream).scalar_subquery()
    discarding = and_(of_task, other.c.discarded > literal_column("0"))
    reasons = select(other.c.discarded_for).where(discarding).order_by(other.c.trigger_id.desc())
    reason = reasons.limit(literal_column("1")).correlate(trigger_stream).scalar_subquery()
    return (
        select(
            _STREAM.task,
            _STREAM.trigger_id,
            _CURSOR.next_index,
            _STREAM.ends_at,
            _STREAM.handled - _STREAM.discarded,
            _STREAM.checkpoint,
            _STREAM.ended_us,
            _STREAM.error,
            measured.label("measured_us"),
            count_carried(_STREAM.task, _STREAM.trigger_id),
            _STREAM.discarded,
            # Those of earlier tries are discarded with those of the latest one.
            discarded.label("discarded"),
            reason.label("discarded_for"),
        )
        .join(latest, latest.c.number == _STREAM.trigger_id)
        .join(trigger_cursor, _CURSOR.trigger_id == _STREAM.trigger_id)
    )


def _describe(row: _Found, now_us: int) -> StreamAbout:
    received = row.next_index if row.ends_at is None else row.ends_at
    seconds = 0.0
    if row.measured_us is not None:
        seconds = max(((row.ended_us or now_us) - row.measured_us) / 1e6, 0.0)
    rate = min(received, _MEASURED) / seconds if seconds else None
    return StreamAbout(
        row.trigger,
        received,
        min(row.handled, received),
        max(received - row.handled - row.own_discarded, 0),
        rate,
        None if row.checkpoint is None else row.checkpoint[:_MAX_TEXT],
        row.ended_us is not None,
        None if row.error is None else row.error[-_MAX_TEXT:],
        row.carried,
        int(row.discarded),
        row.discarded_for,
    )


def list_task_events(connection: Connection, request: ListTaskEvents, context: CallContext) -> Listed[EventEnvelope]:
    """Return a page of the events of a task's latest trigger; see `ListTaskEvents`."""
    run = find_run(connection, request.dag_id, request.run_id)
    mine = and_(_TASK.run == run, _TASK.task_id == request.task_id, _TASK.map_index == request.map_index)
    latest = (
        select(func.max(trigger.c.id)).join(task_instance, _TASK.id == trigger.c.task_id).where(mine).scalar_subquery()
    )
    last = case((_STREAM.ended_us.is_not(None), func.coalesce(_STREAM.ends_at, _CURSOR.next_index) - 1), else_=-1)
    statement = (
        select(
            _EVENT.trigger_id,
            _EVENT.sequence_index,
            func.substr(_EVENT.payload, 1, _MAX_TEXT),
            _EVENT.identity,
            _EVENT.created_us,
            last,
        )
        .join(trigger_cursor, _CURSOR.trigger_id == _EVENT.trigger_id)
        .outerjoin(trigger_stream, _STREAM.trigger_id == _EVENT.trigger_id)
        .where(_EVENT.trigger_id == latest)
        .order_by(_EVENT.sequence_index.desc())
        .limit(request.limit + 1)
    )
    if request.after is not None:
        statement = statement.where(_EVENT.sequence_index < int(request.after))
    rows = connection.execute(statement).all()
    found = tuple(EventEnvelope(*row[:5], row[1] == row[5]) for row in rows[: request.limit])
    return Listed(found, str(found[-1].sequence_index) if len(rows) > request.limit else None)
