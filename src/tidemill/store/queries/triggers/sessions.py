"""Service sessions of trigger hosts: which are live, which list each one runs, and which upstreams it may read.

Invariants: an ended session never becomes live again. A list has at most one live session. A claimed upstream is read
by at most one live list. The lock order is session, list, triggers (`queries.triggers.cursors`). Each function may be
called again after an uncertain commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Row,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    literal_column,
    select,
    true,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.context import CallContext
from tidemill.store.records import ListHostSession
from tidemill.store.statements import CLOCK, Statement
from tidemill.store.tables import list_claim, service_session, trigger, trigger_cursor, trigger_list

#: The advisory lock for claims ("tideclai" in ASCII): concurrent sessions see each other's claims.
_CLAIMS_KEY = int.from_bytes(b"tideclai", "big")

_FIELDS = [service_session.c[field.name] for field in fields(ListHostSession)]
_CLAIMS = RowSet("claims", claim=str)
_NAMES = RowSet("names", name=str)
_HELD = RowSet("held", id=int, token=int)


def begin_session(
    connection: Connection,
    *,
    kind: str,
    name: str,
    host: str,
    boot_id: str,
    pid: int,
    list: str,
    lock: str,
    digest: str,
    now_us: int,
) -> int:
    """Start a session and return its id; `ListHostSession` explains the arguments.

    If the call is repeated because its answer was lost, it starts a second session. The first one never sends a
    heartbeat and is eventually found dead.
    """
    values = {
        "kind": kind,
        "name": name,
        "host": host,
        "boot_id": boot_id,
        "pid": pid,
        "list": list,
        "lock": lock,
        "digest": digest,
        "started_us": now_us,
        "beat_us": now_us,
    }
    return int(connection.execute(insert(service_session).values(values).returning(service_session.c.id)).scalar_one())


def beat_session(
    connection: Connection, session_id: int, now_us: int, digest: str | None = None, held: int | None = None
) -> bool:
    """Increment the heartbeat of a session; return False if another session has ended it.

    Args:
        connection: A connection inside a transaction; the session cannot be ended until the transaction ends.
        session_id: The session.
        now_us: The time, in UTC microseconds since the epoch.
        digest: The digest of the list's content, if it may have changed.
        held: How many triggers of tasks it runs; None: this does not change.
    """
    statement = (
        update(service_session)
        .where(and_(service_session.c.id == session_id, service_session.c.ended_us.is_(None)))
        .values(
            beat=service_session.c.beat + 1,
            beat_us=now_us,
            digest=service_session.c.digest if digest is None else digest,
            held=service_session.c.held if held is None else held,
        )
    )
    return connection.execute(statement).rowcount > 0


def end_session(
    connection: Connection,
    session_id: int,
    now_us: int,
    by: int | None = None,
    beat: int | None = None,
    *,
    is_death: bool = False,
) -> bool:
    """End a session, and release its list and its claims.

    Args:
        connection: A connection inside a transaction.
        session_id: The session.
        now_us: The time, in UTC microseconds since the epoch.
        by: The session that found it dead; None: it ended cleanly.
        beat: The last heartbeat that was seen; None: any.
        is_death: Whether its triggers may have killed it, unless it had been told to stop.

    Returns:
        False if it had already ended, does not exist, or has sent another heartbeat.
    """
    seen = [] if beat is None else [service_session.c.beat == beat]
    statement = (
        update(service_session)
        .where(and_(service_session.c.id == session_id, service_session.c.ended_us.is_(None), *seen))
        .values(ended_us=now_us, ended_by=by, lost=(1 - service_session.c.stopping) if is_death else 0)
    )
    if not connection.execute(statement).rowcount:
        return False
    connection.execute(update(trigger_list).where(trigger_list.c.session_id == session_id).values(session_id=None))
    connection.execute(delete(list_claim).where(list_claim.c.session_id == session_id))
    return True


def is_session_live(connection: Connection, session_id: int, context: CallContext | None = None) -> bool:
    """Return whether a session is live; a live one cannot be ended until this transaction ends.

    With a context, PostgreSQL reads its time by the same statement.
    """
    return note_session(_lock_live.fetch(connection, {"session_id": session_id}), context)


def note_session(rows: Sequence[tuple[int, ...]], context: CallContext | None) -> bool:
    """Return whether a session was found; `rows`: its id, and PostgreSQL's time (`select_session`)."""
    if rows and context is not None and len(rows[0]) > 1:
        context.note_now(rows[0][1])
    return bool(rows)


def select_session(dialect: str) -> Select[Any]:
    """Select the columns that `note_session` takes."""
    clock = [literal_column(CLOCK, BigInteger()).label("now_us")] if dialect == "postgresql" else []
    return select(service_session.c.id, *clock)


@Statement
def _lock_live(dialect: str) -> Select[Any]:
    live = and_(service_session.c.id == bindparam("session_id"), service_session.c.ended_us.is_(None))
    return select_session(dialect).where(live).with_for_update(read=True)


def list_live_sessions(connection: Connection, kind: str) -> list[ListHostSession]:
    """Return the live sessions of a kind, by id."""
    statement = (
        select(*_FIELDS)
        .where(and_(service_session.c.kind == kind, service_session.c.ended_us.is_(None)))
        .order_by(service_session.c.id)
    )
    return [_read_record(row) for row in connection.execute(statement)]


def take_list(connection: Connection, name: str, session_id: int) -> int | None:
    """Assign a list to a session, unless another live session runs it.

    Returns:
        None if the list was assigned; otherwise the id of the live session that runs it.
    """
    dialect = find_dialect(connection)
    connection.execute(_insert(dialect)(trigger_list).values(name=name).on_conflict_do_nothing())
    statement = select(trigger_list.c.session_id).where(trigger_list.c.name == name).with_for_update()
    holder = connection.execute(statement).scalar_one()
    if holder is not None and holder != session_id:
        # Read without a lock: a session that is ending holds the lock on its own row while it waits for the list's row.
        live = select(service_session.c.id).where(
            and_(service_session.c.id == holder, service_session.c.ended_us.is_(None))
        )
        if connection.execute(live).first() is not None:
            return int(holder)
    connection.execute(update(trigger_list).where(trigger_list.c.name == name).values(session_id=session_id))
    return None


def lock_lists(connection: Connection) -> None:
    """Serialize the admission of lists: wait for other transactions that called this, until they end."""
    if find_dialect(connection) == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_CLAIMS_KEY)))


def claim_upstreams(connection: Connection, session_id: int, claims: Collection[str]) -> list[tuple[str, str]]:
    """Claim upstreams for a session, each of which only one live list may read; its earlier claims stay.

    Returns:
        The claims held by a live session of another list, each with that list's name, sorted. If there are any,
        nothing is claimed.
    """
    if not claims:
        return []
    lock_lists(connection)
    dialect = find_dialect(connection)
    given = _CLAIMS.build_source(dialect)
    parameters = _CLAIMS.build_parameters(dialect, [(claim,) for claim in sorted(set(claims))])
    own = select(service_session.c.list).where(service_session.c.id == session_id).scalar_subquery()
    taken = (
        select(list_claim.c.claim, service_session.c.list)
        .join(given, given.c.claim == list_claim.c.claim)
        .join(service_session, service_session.c.id == list_claim.c.session_id)
        .where(and_(service_session.c.ended_us.is_(None), service_session.c.list != own))
        .distinct()
    )
    found = sorted((row.claim, row.list) for row in connection.execute(taken, parameters))
    if not found:
        # SQLite needs the WHERE clause; without it, it parses ON CONFLICT as a join condition.
        rows = select(given.c.claim, literal(session_id)).where(true())
        insertion = _insert(dialect)(list_claim).from_select(["claim", "session_id"], rows).on_conflict_do_nothing()
        connection.execute(insertion, parameters)
    return found


def release_upstreams(connection: Connection, session_id: int, claims: Collection[str]) -> None:
    """Release a session's claims to the given upstreams."""
    dialect = find_dialect(connection)
    wanted = select(_CLAIMS.build_source(dialect).c.claim)
    statement = delete(list_claim).where(and_(list_claim.c.session_id == session_id, list_claim.c.claim.in_(wanted)))
    connection.execute(statement, _CLAIMS.build_parameters(dialect, [(claim,) for claim in claims]))


def find_foreign_names(connection: Connection, names: Iterable[str], list: str) -> dict[str, str]:
    """Return the triggers among `names` that belong to other lists, live or not, with the names of those lists."""
    dialect = find_dialect(connection)
    given = _NAMES.build_source(dialect)
    statement = (
        select(trigger.c.name, trigger.c.list)
        .where(and_(trigger.c.name.in_(select(given.c.name)), trigger.c.list != list))
        .order_by(trigger.c.name)
    )
    rows = connection.execute(statement, _NAMES.build_parameters(dialect, [(name,) for name in names]))
    return {row.name: row.list for row in rows}


def count_held_triggers(connection: Connection, session_id: int) -> tuple[int, int]:
    """Return the number of triggers that a session holds, and the sum of their tokens, which detects takeovers."""
    statement = select(func.count(), func.coalesce(func.sum(trigger_cursor.c.token), 0)).where(
        trigger_cursor.c.session_id == session_id
    )
    count, total = connection.execute(statement).one()
    return int(count), int(total)


def find_lost_triggers(connection: Connection, session_id: int, held: Mapping[int, int]) -> list[int]:
    """Return the triggers in `held` (tokens by id) that the session no longer holds."""
    dialect = find_dialect(connection)
    given = _HELD.build_source(dialect)
    still = exists().where(
        and_(
            trigger_cursor.c.trigger_id == given.c.id,
            trigger_cursor.c.token == given.c.token,
            trigger_cursor.c.session_id == session_id,
        )
    )
    statement = select(given.c.id).where(~still).order_by(given.c.id)
    return [int(row.id) for row in connection.execute(statement, _HELD.build_parameters(dialect, held.items()))]


def _read_record(row: Row[Any]) -> ListHostSession:
    return ListHostSession(**row._mapping)


def _insert(dialect: str) -> Any:
    return postgresql.insert if dialect == "postgresql" else sqlite.insert
