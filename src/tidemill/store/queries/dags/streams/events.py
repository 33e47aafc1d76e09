"""Tells the tasks of streams about the events that the triggerer stores, and triggers how full their streams are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import BigInteger, Connection, Update, and_, bindparam, literal_column, select, update

from tidemill.core.tasks.inputs import Channel
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.batches import find_dialect
from tidemill.store.calls.trigger_calls import CountUndelivered
from tidemill.store.context import CallContext
from tidemill.store.queries.dags.items.backlog import has_room
from tidemill.store.queries.dags.items.items import add_emitted
from tidemill.store.queries.dags.streams.rows import FULL, read_rows
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.statements import Statement
from tidemill.store.tables import trigger_cursor, trigger_stream

_STREAM, _CURSOR = trigger_stream.c, trigger_cursor.c
_DEFERRED = TaskState.DEFERRED.value


def note_events(
    connection: Connection, triggers: Collection[int], context: CallContext, max_undelivered: int = 0
) -> dict[int, int]:
    """Have the tasks of streams take new events, or their end; the cursors are locked.

    Args:
        connection: A connection inside a transaction.
        triggers: The triggers of the streams.
        context: The transaction's context.
        max_undelivered: With more undelivered events than that, a trigger waits until half of them are handled; 0: no
            limit.

    Returns:
        The numbers of undelivered events, by trigger.
    """
    rows = read_rows(connection, triggers)
    waiting = [one.trigger for one in rows if one.state == _DEFERRED]
    context.bells.add(Channel.WORKER)
    dialect = find_dialect(connection)
    if waiting:
        _mark.fetch(connection, IDS.build_parameters(dialect, build_id_rows(waiting)))
        context.bells.add(Channel.SCHEDULER)
    full = [one.trigger for one in rows if max_undelivered and one.progress.undelivered > max_undelivered]
    if full:
        limits = {"most": max_undelivered, "goes_on_at": max_undelivered // 2}
        _note_full.fetch(connection, {**IDS.build_parameters(dialect, build_id_rows(full)), **limits})
    return {one.trigger: one.progress.undelivered for one in rows}


@Statement
def _note_full(dialect: str) -> Update:
    # Measured again once the row is locked: an attempt may have handled the events since, and would ring nobody later.
    next_index = (
        select(_CURSOR.next_index)
        .where(_CURSOR.trigger_id == _STREAM.trigger_id)
        .correlate(trigger_stream)
        .scalar_subquery()
    )
    mine = _STREAM.trigger_id.in_(select(IDS.build_source(dialect).c.id))
    full = next_index - _STREAM.handled > bindparam("most", type_=BigInteger)
    return update(trigger_stream).where(and_(mine, full)).values(room_at=bindparam("goes_on_at", type_=BigInteger))


def count_undelivered(
    connection: Connection, request: CountUndelivered, context: CallContext
) -> tuple[tuple[int, int], ...]:
    """Return the numbers of events that were not handled; see `CountUndelivered`."""
    counts = []
    for row in read_rows(connection, request.triggers):
        if row.ended_us is not None:
            counts.append((row.trigger, 0))
        elif row.feeds and row.held and not has_room(connection, row.run, row.task, row.task_id):
            counts.append((row.trigger, FULL))
        else:
            counts.append((row.trigger, row.progress.undelivered))
    return tuple(counts)


def feed_maps(
    connection: Connection, events: Mapping[int, Sequence[tuple[str, str | None]]], context: CallContext
) -> dict[int, int]:
    """Make the new events of streams elements of the maps over their tasks.

    Args:
        connection: A connection inside a transaction that has locked the cursors.
        events: Payloads and identities, by trigger.
        context: The transaction's context.

    Returns:
        The numbers of undelivered events, by trigger: none, or `FULL` if the backlog of a map is full.
    """
    undelivered = {}
    for row in read_rows(connection, events):
        full = add_emitted(connection, row.task, events[row.trigger], context)
        new: dict[str, Any] = {"handled": row.progress.last}
        if full is not None:
            new["held"] = int(full)
        connection.execute(update(trigger_stream).where(_STREAM.trigger_id == row.trigger).values(new))
        undelivered[row.trigger] = FULL if full else 0
    return undelivered


def note_endings(connection: Connection, endings: Mapping[int, tuple[int, str]], context: CallContext) -> list[int]:
    """Store the index and content of the events that end tasks, by trigger; return the streams that they ended.

    The events before them are delivered first. The cursors are locked.
    """
    ended = []
    for number, (index, ending) in endings.items():
        mine = and_(_STREAM.trigger_id == number, _STREAM.ended_us.is_(None))
        new = {"ended_us": context.now_us, "ends_at": index, "ending": ending}
        if connection.execute(update(trigger_stream).where(mine).values(new)).rowcount:
            ended.append(number)
    return ended


@Statement
def _mark(dialect: str) -> Update:
    # A task that waits for a map is not resumed by another event.
    mine = _STREAM.trigger_id.in_(select(IDS.build_source(dialect).c.id))
    return update(trigger_stream).where(and_(mine, _STREAM.ready != literal_column("2"))).values(ready=1)
