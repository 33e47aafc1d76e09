"""Task triggers reserved for one service session: a trial, which runs the suspects of a crash in isolation.

Invariants: a reserved trigger counts as running, so no other service claims a trigger of its stream. Its cursor names
the session but no claim request. It is released when the session ends.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select, and_, select, update

from tidemill.store.batches import find_dialect
from tidemill.store.calls.trigger_calls import ClaimTriggers, ListOwnedTriggers, OwnedTrigger, ReserveTriggers
from tidemill.store.context import CallContext
from tidemill.store.queries.sessions.services import check_session
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows, lock_cursors
from tidemill.store.tables import trigger, trigger_cursor, trigger_death

_CURSOR = trigger_cursor.c


def list_owned(connection: Connection, request: ListOwnedTriggers, context: CallContext) -> tuple[OwnedTrigger, ...]:
    """Return the task triggers that a session owns; see `ListOwnedTriggers`."""
    statement = (
        select(_CURSOR.trigger_id, _CURSOR.token, _CURSOR.claim_request, trigger.c.stream_key, trigger_death.c.deaths)
        .join(trigger, trigger.c.id == _CURSOR.trigger_id)
        .join(trigger_death, trigger_death.c.trigger_id == _CURSOR.trigger_id, isouter=True)
        .where(and_(_CURSOR.session_id == request.session, trigger.c.task_id.is_not(None)))
        .order_by(_CURSOR.trigger_id)
    )
    return tuple(
        OwnedTrigger(number, token, claim is not None, stream, deaths or 0)
        for number, token, claim, stream, deaths in connection.execute(statement)
    )


def reserve_triggers(connection: Connection, request: ReserveTriggers, context: CallContext) -> int:
    """Reserve triggers of one session for another; see `ReserveTriggers`."""
    check_session(connection, request.session)
    if not request.triggers:
        return 0
    lock_cursors(connection, request.triggers)
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(request.triggers))
    wanted = select(IDS.build_source(find_dialect(connection)).c.id)
    # The `+ 0` keeps both databases from reading all triggers of the session.
    owned = and_(_CURSOR.trigger_id.in_(wanted), _CURSOR.session_id + 0 == request.owner)
    new = {"session_id": request.session, "claim_request": None, "token": _CURSOR.token + 1}
    return connection.execute(update(trigger_cursor).where(owned).values(new), given).rowcount


def take_reserved(connection: Connection, request: ClaimTriggers, context: CallContext) -> list[int]:
    """Claim the triggers reserved for a session, and return their ids: up to its capacity, but whole streams.

    Otherwise the first triggers of a stream would read, and acknowledge to the broker, what the others have not seen.
    """
    reserved = and_(_CURSOR.session_id == request.session, _CURSOR.claim_request.is_(None))
    statement: Select[Any] = (
        select(_CURSOR.trigger_id, trigger.c.stream_key)
        .join(trigger, trigger.c.id == _CURSOR.trigger_id)
        .where(reserved)
        .order_by(_CURSOR.trigger_id)
        .with_for_update(of=trigger_cursor)
    )
    rows = connection.execute(statement.limit(max(request.capacity, 0))).all()
    found = {row.trigger_id for row in rows}
    streams = {row.stream_key for row in rows if row.stream_key is not None}
    if streams:
        shared = statement.where(trigger.c.stream_key.in_(sorted(streams)))
        found |= {row.trigger_id for row in connection.execute(shared)}
    if found:
        given = IDS.build_parameters(find_dialect(connection), build_id_rows(found))
        wanted = _CURSOR.trigger_id.in_(select(IDS.build_source(find_dialect(connection)).c.id))
        connection.execute(update(trigger_cursor).where(wanted).values(claim_request=request.request), given)
    return sorted(found)
