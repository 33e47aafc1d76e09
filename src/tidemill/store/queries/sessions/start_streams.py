"""Gives triggers that start their tasks their places: all triggers of a stream run in one session.

A trigger of a deferral comes with its stream key, which the attempt has computed. One that starts its task is created
by a triggerer first, which then asks here. Invariant: the key of such a trigger is stored under the lock of its stream,
so that concurrent claims and requests never split a stream between two sessions.
"""

from __future__ import annotations

from sqlalchemy import Connection, and_, literal_column, select, update

from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.trigger_calls import PlaceTriggers
from tidemill.store.context import CallContext
from tidemill.store.queries.sessions.services import check_session, free_triggers
from tidemill.store.queries.sessions.stream_locks import lock_streams
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows, lock_cursors
from tidemill.store.tables import trigger, trigger_cursor

_TRIGGER, _CURSOR = trigger.c, trigger_cursor.c
_KEYS = RowSet("placed", id=int, stream_key=str)


def place_triggers(connection: Connection, request: PlaceTriggers, context: CallContext) -> tuple[int, ...]:
    """Store stream keys, and release triggers whose streams other sessions read; see `PlaceTriggers`."""
    check_session(connection, request.session)
    given = {number: (token, key) for number, token, key in request.triggers}
    lock_streams(connection, {key for _, key in given.values()})
    dialect = find_dialect(connection)
    lock_cursors(connection, given)
    ids = IDS.build_parameters(dialect, build_id_rows(given))
    wanted = _CURSOR.trigger_id.in_(select(IDS.build_source(dialect).c.id))
    rows = connection.execute(select(_CURSOR.trigger_id, _CURSOR.token, _CURSOR.session_id).where(wanted), ids).all()
    tokens = {row.trigger_id: row.token for row in rows if row.session_id == request.session}
    mine = {number for number, token in tokens.items() if token == given[number][0]}
    if not mine:
        return tuple(given)
    taken = _find_taken(connection, {given[number][1] for number in mine}, request.session)
    source = _KEYS.build_source(dialect)
    statement = update(trigger).where(_TRIGGER.id == source.c.id).values(stream_key=source.c.stream_key)
    connection.execute(statement, _KEYS.build_parameters(dialect, [(one, given[one][1]) for one in sorted(mine)]))
    elsewhere = sorted(number for number in mine if given[number][1] in taken)
    free_triggers(connection, elsewhere, [request.session], context)
    return tuple(sorted({*elsewhere, *(given.keys() - mine)}))


def _find_taken(connection: Connection, keys: set[str], session: int) -> set[str]:
    """Return the keys of streams that other sessions read."""
    # A state that is a parameter would keep PostgreSQL from using the index of running streams.
    running = and_(_TRIGGER.stream_key.in_(sorted(keys)), _TRIGGER.state == literal_column("'running'"))
    statement = (
        select(_TRIGGER.stream_key)
        .join(trigger_cursor, _CURSOR.trigger_id == _TRIGGER.id)
        .where(and_(running, _CURSOR.session_id != session))
        .distinct()
    )
    return set(connection.execute(statement).scalars())
