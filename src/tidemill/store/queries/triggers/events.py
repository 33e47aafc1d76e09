"""Stores and lists trigger events.

`core.triggers.event_plan` decides which events are stored, under which index, and which are refused. The cursors of the
triggers are locked before anything is read, so the data stays valid until the transaction ends. Storing does not touch
the wide rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import Column, Connection, Insert, Row, Select, Update, and_, func, insert, select, update

from tidemill.core.triggers.event_plan import EventPlan, EventRow, NewEvent, make_plan
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.queries.triggers.cursors import lock_cursors
from tidemill.store.queries.triggers.triggers import name_trigger
from tidemill.store.records import EventRecord, Page
from tidemill.store.tables import trigger, trigger_cursor, trigger_event, trigger_identity, trigger_stream

_ID: Column[int] = trigger_event.c.id
_INDEX: Column[int] = trigger_event.c.sequence_index
_EVENTS = (
    select(
        trigger_event, trigger.c.name, trigger_stream.c.ended_us, trigger_stream.c.ends_at, trigger_cursor.c.next_index
    )
    .join(trigger, trigger.c.id == trigger_event.c.trigger_id)
    .join(trigger_cursor, trigger_cursor.c.trigger_id == trigger_event.c.trigger_id)
    .outerjoin(trigger_stream, trigger_stream.c.trigger_id == trigger_event.c.trigger_id)
)

_IDENTITIES = RowSet("identities", trigger_id=int, identity=str)
_COUNTERS = RowSet("counters", id=int, next_index=int)
_COLUMNS = ("trigger_id", "sequence_index", "identity", "payload", "created_us")
_NEW_COLUMNS = ("trigger_id", "identity", "sequence_index", "created_us")
_NEW = RowSet("new", trigger_id=int, identity=str, sequence_index=int, created_us=int)
_ROWS = RowSet("rows", trigger_id=int, sequence_index=int, identity=str, payload=str, created_us=int)


def store_events(connection: Connection, events: Sequence[NewEvent], earlier: EventPlan | None = None) -> EventPlan:
    """Store events of any triggers.

    Args:
        connection: A connection inside a transaction.
        events: The events, in the order in which they fired.
        earlier: The plan of an earlier attempt at the same events, if its commit is uncertain because the connection
            was lost. If it was committed, nothing is stored twice.

    Returns:
        The plan with the outcome of each event, valid once the transaction is committed.
    """
    counters = lock_cursors(connection, {event.trigger_id for event in events})
    if earlier is not None and _was_committed(connection, earlier):
        return earlier
    plan = make_plan(events, counters, _find_known(connection, events))
    if plan.rows:
        _insert(connection, plan)
    return plan


def _was_committed(connection: Connection, earlier: EventPlan) -> bool:
    first = earlier.first
    if first is None:
        return False
    number, index = trigger_event.c.trigger_id, trigger_event.c.sequence_index
    statement = (
        select(*[trigger_event.c[name] for name in _COLUMNS])
        .where(number == first.trigger_id)
        .where(index == first.sequence_index)
    )
    row = connection.execute(statement).first()
    return earlier.was_committed(None if row is None else EventRow(*row))


def _find_known(connection: Connection, events: Sequence[NewEvent]) -> dict[tuple[int, str], int]:
    wanted = {(event.trigger_id, event.identity) for event in events if event.identity is not None}
    if not wanted:
        return {}
    dialect = find_dialect(connection)
    found = connection.execute(_select_known(dialect), _IDENTITIES.build_parameters(dialect, wanted))
    return {(trigger_id, identity): index for trigger_id, identity, index in found}


@cache
def _select_known(dialect: str) -> Select[Any]:
    given = _IDENTITIES.build_source(dialect)
    same = and_(trigger_identity.c.trigger_id == given.c.trigger_id, trigger_identity.c.identity == given.c.identity)
    return select(trigger_identity.c.trigger_id, trigger_identity.c.identity, trigger_identity.c.sequence_index).join(
        given, same
    )


def _insert(connection: Connection, plan: EventPlan) -> None:
    dialect = find_dialect(connection)
    connection.execute(_build_event_insert(dialect), _ROWS.build_parameters(dialect, plan.rows))
    identified = [
        (row.trigger_id, row.identity, row.sequence_index, row.created_us)
        for row in plan.rows
        if row.identity is not None
    ]
    if identified:
        connection.execute(_build_identity_insert(dialect), _NEW.build_parameters(dialect, identified))
    after = [(number, counter.next_index) for number, counter in plan.counters.items()]
    connection.execute(_build_counter_update(dialect), _COUNTERS.build_parameters(dialect, after))


@cache
def _build_event_insert(dialect: str) -> Insert:
    rows = _ROWS.build_source(dialect)
    values = select(*[rows.c[name] for name in _COLUMNS]).order_by(rows.c.position)
    return insert(trigger_event).from_select(_COLUMNS, values)


@cache
def _build_identity_insert(dialect: str) -> Insert:
    given = _NEW.build_source(dialect)
    return insert(trigger_identity).from_select(_NEW_COLUMNS, select(*[given.c[name] for name in _NEW_COLUMNS]))


@cache
def _build_counter_update(dialect: str) -> Update:
    moved = _COUNTERS.build_source(dialect)
    return update(trigger_cursor).where(trigger_cursor.c.trigger_id == moved.c.id).values(next_index=moved.c.next_index)


def list_events(connection: Connection, *, after: int | None = None, limit: int = 100) -> Page[EventRecord]:
    """Return the events of all triggers by id, oldest first.

    Several writing hosts may commit in any order, so a row can appear after a row with a higher id was returned. The
    events of one trigger always appear in order.

    Args:
        connection: A connection inside any transaction.
        after: Start after this id (`Page.next`).
        limit: The maximum number of events.
    """
    found = _fetch(connection, _select_after(_ID, after).order_by(_ID), limit)
    return _build_page(found, limit, [row.id for row in found])


def list_latest_events(connection: Connection, *, before: int | None = None, limit: int = 100) -> Page[EventRecord]:
    """Return the events of all triggers by id, newest first; `before` is `Page.next`."""
    found = _fetch(connection, _select_before(_ID, before).order_by(_ID.desc()), limit)
    return _build_page(found, limit, [row.id for row in found])


def list_trigger_events(
    connection: Connection, trigger_id: int, *, after: int | None = None, limit: int = 100
) -> Page[EventRecord]:
    """Return the events of a trigger by index, oldest first; `after` is `Page.next`."""
    statement = _select_after(_INDEX, after).where(trigger_event.c.trigger_id == trigger_id).order_by(_INDEX)
    found = _fetch(connection, statement, limit)
    return _build_page(found, limit, [row.sequence_index for row in found])


def list_latest_trigger_events(
    connection: Connection, trigger_id: int, *, before: int | None = None, limit: int = 100
) -> Page[EventRecord]:
    """Return the events of a trigger by index, newest first; `before` is `Page.next`."""
    statement = _select_before(_INDEX, before).where(trigger_event.c.trigger_id == trigger_id).order_by(_INDEX.desc())
    found = _fetch(connection, statement, limit)
    return _build_page(found, limit, [row.sequence_index for row in found])


def count_events(connection: Connection, trigger_id: int | None = None) -> int:
    """Return the number of events ever stored for one trigger or all triggers, including those removed by retention."""
    statement = select(func.coalesce(func.sum(trigger_cursor.c.next_index), 0))
    if trigger_id is not None:
        statement = statement.where(trigger_cursor.c.trigger_id == trigger_id)
    return int(connection.execute(statement).scalar_one())


def _select_after(key: Column[int], after: int | None) -> Select[Any]:
    return _EVENTS if after is None else _EVENTS.where(key > after)


def _select_before(key: Column[int], before: int | None) -> Select[Any]:
    return _EVENTS if before is None else _EVENTS.where(key < before)


def _fetch(connection: Connection, statement: Select[Any], limit: int) -> list[EventRecord]:
    return [_read_record(row) for row in connection.execute(statement.limit(limit + 1))]


def _build_page(found: list[EventRecord], limit: int, keys: list[int]) -> Page[EventRecord]:
    return Page(found[:limit], keys[limit - 1] if len(found) > limit else None)


def _read_record(row: Row[Any]) -> EventRecord:
    last = (row.next_index if row.ends_at is None else row.ends_at) - 1
    return EventRecord(
        row.id,
        row.trigger_id,
        name_trigger(row.trigger_id, row.name),
        row.sequence_index,
        row.identity,
        row.payload,
        row.created_us,
        row.ended_us is not None and row.sequence_index == last,
    )
