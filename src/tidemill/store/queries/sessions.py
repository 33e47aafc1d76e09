"""Sessions of trigger hosts: which are live, which list each runs, and what each may read from upstream.

Invariants: a session that has ended never lives again; a list has one live session at most; an upstream that is
claimed is read by one live list at most. Rows are locked in one order: the session's, its list's, then those of
triggers (`queries.cursors`). Each function may be called again when it is unknown whether its commit took place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, exists, func, insert, literal, select, true, update
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.records import SessionRecord
from tidemill.store.tables import list_claim, session, trigger, trigger_cursor, trigger_list

#: No other program's advisory lock: "tideclai" in ASCII. Two sessions that claim at once see each other's claims.
_CLAIMS_KEY = int.from_bytes(b"tideclai", "big")

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
    """Begin a session, and return its id; the arguments are those of `SessionRecord`.

    Called again after an answer that was lost, it begins another one; the first never beats, and is found dead.
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
    return int(connection.execute(insert(session).values(values).returning(session.c.id)).scalar_one())


def beat_session(connection: Connection, session_id: int, now_us: int, digest: str | None = None) -> bool:
    """Raise the beat of a session by one; False: it has been ended by another one, and stays dead.

    Args:
        connection: In a transaction; until it ends the session is not ended.
        session_id: Which.
        now_us: The time, in UTC microseconds since the epoch.
        digest: That of the list's content, if it may have changed.
    """
    statement = (
        update(session)
        .where(and_(session.c.id == session_id, session.c.ended_us.is_(None)))
        .values(beat=session.c.beat + 1, beat_us=now_us, digest=session.c.digest if digest is None else digest)
    )
    return connection.execute(statement).rowcount > 0


def end_session(connection: Connection, session_id: int, now_us: int, by: int | None = None) -> bool:
    """End a session, and free its list and its claims.

    Args:
        connection: In a transaction.
        session_id: Which.
        now_us: The time, in UTC microseconds since the epoch.
        by: The session that found it dead; None: it ends by itself.

    Returns:
        False if it had ended already, or there is no such session.
    """
    statement = (
        update(session)
        .where(and_(session.c.id == session_id, session.c.ended_us.is_(None)))
        .values(ended_us=now_us, ended_by=by)
    )
    if not connection.execute(statement).rowcount:
        return False
    connection.execute(update(trigger_list).where(trigger_list.c.session_id == session_id).values(session_id=None))
    connection.execute(delete(list_claim).where(list_claim.c.session_id == session_id))
    return True


def is_session_live(connection: Connection, session_id: int) -> bool:
    """Tell whether a session has not ended; if so, it is not ended before this transaction ends."""
    statement = (
        select(session.c.id)
        .where(and_(session.c.id == session_id, session.c.ended_us.is_(None)))
        .with_for_update(read=True)
    )
    return connection.execute(statement).first() is not None


def list_live_sessions(connection: Connection, kind: str) -> list[SessionRecord]:
    """Return the sessions of a kind that have not ended, by id."""
    statement = select(session).where(and_(session.c.kind == kind, session.c.ended_us.is_(None))).order_by(session.c.id)
    return [_read_record(row) for row in connection.execute(statement)]


def take_list(connection: Connection, name: str, session_id: int) -> int | None:
    """Have a session run a list, if no other live session does.

    Returns:
        None: it runs it now. Otherwise the id of the live session that does.
    """
    dialect = find_dialect(connection)
    connection.execute(_insert(dialect)(trigger_list).values(name=name).on_conflict_do_nothing())
    statement = select(trigger_list.c.session_id).where(trigger_list.c.name == name).with_for_update()
    holder = connection.execute(statement).scalar_one()
    if holder is not None and holder != session_id:
        # Read without a lock: one that ends at this moment waits for the list's row, with its own row locked.
        lives = select(session.c.id).where(and_(session.c.id == holder, session.c.ended_us.is_(None)))
        if connection.execute(lives).first() is not None:
            return int(holder)
    connection.execute(update(trigger_list).where(trigger_list.c.name == name).values(session_id=session_id))
    return None


def lock_lists(connection: Connection) -> None:
    """Let no other transaction that does the same go on before this one ends: lists are admitted one by one."""
    if find_dialect(connection) == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_CLAIMS_KEY)))


def claim_upstreams(connection: Connection, session_id: int, claims: Collection[str]) -> list[tuple[str, str]]:
    """Note that a session reads upstreams which only one live list may read; what it has claimed before stays.

    Returns:
        The claims that a live session of another list has, each with the name of that list, sorted; if there are any,
        nothing is noted.
    """
    if not claims:
        return []
    lock_lists(connection)
    dialect = find_dialect(connection)
    given = _CLAIMS.source(dialect)
    parameters = _CLAIMS.parameters(dialect, [(claim,) for claim in sorted(set(claims))])
    own = select(session.c.list).where(session.c.id == session_id).scalar_subquery()
    taken = (
        select(list_claim.c.claim, session.c.list)
        .join(given, given.c.claim == list_claim.c.claim)
        .join(session, session.c.id == list_claim.c.session_id)
        .where(and_(session.c.ended_us.is_(None), session.c.list != own))
        .distinct()
    )
    found = sorted((row.claim, row.list) for row in connection.execute(taken, parameters))
    if not found:
        # The condition is for SQLite, which would take ON CONFLICT for that of a join.
        rows = select(given.c.claim, literal(session_id)).where(true())
        noted = _insert(dialect)(list_claim).from_select(["claim", "session_id"], rows).on_conflict_do_nothing()
        connection.execute(noted, parameters)
    return found


def release_upstreams(connection: Connection, session_id: int, claims: Collection[str]) -> None:
    """Note that a session no longer reads these upstreams."""
    dialect = find_dialect(connection)
    wanted = select(_CLAIMS.source(dialect).c.claim)
    statement = delete(list_claim).where(and_(list_claim.c.session_id == session_id, list_claim.c.claim.in_(wanted)))
    connection.execute(statement, _CLAIMS.parameters(dialect, [(claim,) for claim in claims]))


def find_foreign_names(connection: Connection, names: Iterable[str], list: str) -> dict[str, str]:
    """Return which of these triggers belong to other lists, and to which; whether those live does not matter."""
    dialect = find_dialect(connection)
    given = _NAMES.source(dialect)
    statement = (
        select(trigger.c.name, trigger.c.list)
        .where(and_(trigger.c.name.in_(select(given.c.name)), trigger.c.list != list))
        .order_by(trigger.c.name)
    )
    rows = connection.execute(statement, _NAMES.parameters(dialect, [(name,) for name in names]))
    return {row.name: row.list for row in rows}


def count_held_triggers(connection: Connection, session_id: int) -> tuple[int, int]:
    """Return how many triggers a session holds, and the sum of their tokens: it changes if one is lost or replaced."""
    statement = select(func.count(), func.coalesce(func.sum(trigger_cursor.c.token), 0)).where(
        trigger_cursor.c.session_id == session_id
    )
    count, total = connection.execute(statement).one()
    return int(count), int(total)


def find_lost_triggers(connection: Connection, session_id: int, held: Mapping[int, int]) -> list[int]:
    """Return which of the triggers that a session believes to hold, by id with their tokens, it has lost."""
    dialect = find_dialect(connection)
    given = _HELD.source(dialect)
    still = exists().where(
        and_(
            trigger_cursor.c.trigger_id == given.c.id,
            trigger_cursor.c.token == given.c.token,
            trigger_cursor.c.session_id == session_id,
        )
    )
    statement = select(given.c.id).where(~still).order_by(given.c.id)
    return [int(row.id) for row in connection.execute(statement, _HELD.parameters(dialect, held.items()))]


def _read_record(row: Row[Any]) -> SessionRecord:
    return SessionRecord(**row._mapping)


def _insert(dialect: str) -> Any:
    return postgresql.insert if dialect == "postgresql" else sqlite.insert
