"""Which parser has which file of DAGs, and the removal of files.

Invariants: a file has at most one live parser; another one takes it over only after the session of the first has ended.
A host that lacks a file does not deactivate the DAGs of other hosts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.service_calls import ClaimFiles, RemoveFile
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag, dag_file
from tidemill.store.queries.triggers.sessions import is_session_live
from tidemill.store.tables import service_session

_DAG, _FILE, _SESSION = dag.c, dag_file.c, service_session.c
_PATHS = RowSet("paths", path=str)


def claim_files(connection: Connection, request: ClaimFiles, context: CallContext) -> tuple[str, ...]:
    """Claim files; see `ClaimFiles`."""
    check_live(connection, request.session)
    if not request.paths:
        return ()
    dialect = find_dialect(connection)
    given = _PATHS.build_parameters(dialect, [(path,) for path in request.paths])
    wanted = _FILE.path.in_(select(_PATHS.build_source(dialect).c.path))
    known = set(connection.execute(select(_FILE.path).where(wanted), given).scalars())
    _add_unread(connection, sorted(set(request.paths) - known))
    free = select(_FILE.id).where(and_(wanted, is_free())).order_by(_FILE.id).with_for_update()
    locked = list(connection.execute(free, given).scalars())
    # Read again now that they are locked: a parser that began after the statement did may have claimed them meanwhile.
    still = select(_FILE.id).where(and_(_FILE.id.in_(locked), is_free()))
    ids = list(connection.execute(still).scalars()) if locked else []
    if ids:
        values = {"session_id": request.session, "absent": "[]"}
        connection.execute(update(dag_file).where(_FILE.id.in_(ids)).values(values))
    mine = select(_FILE.path).where(and_(wanted, _FILE.session_id == request.session)).order_by(_FILE.path)
    return tuple(connection.execute(mine, given).scalars())


def _add_unread(connection: Connection, paths: Iterable[str]) -> None:
    """Add rows for files that no parser has read yet; they are not shown."""
    rows = [{"path": path, "digest": "", "modules": "{}", "present": 0, "parsed_us": 0} for path in paths]
    if rows:
        make: Any = postgresql.insert if find_dialect(connection) == "postgresql" else sqlite.insert
        connection.execute(make(dag_file).on_conflict_do_nothing(), rows)


def is_free() -> ColumnElement[bool]:
    """Build the condition that no live parser has a file."""
    live = select(_SESSION.id).where(_SESSION.ended_us.is_(None))
    return or_(_FILE.session_id.is_(None), _FILE.session_id.not_in(live))


def check_claim(connection: Connection, path: str, session: int) -> None:
    """Ensure that a parser has a file until the transaction ends.

    Raises:
        CallRefusedError: Another live parser has it, or the session has ended.
    """
    check_live(connection, session)
    owner = connection.execute(select(_FILE.session_id).where(_FILE.path == path).with_for_update()).scalar()
    if owner not in (None, session) and is_session_live(connection, int(owner)):
        raise CallRefusedError(RefusalKind.FENCED, f"the parser of session {owner} has the file {path}")


def remove_file(connection: Connection, request: RemoveFile, context: CallContext) -> bool:
    """Mark a file as removed; see `RemoveFile`."""
    wanted = and_(_FILE.path == request.path, _FILE.present == 1)
    statement = select(_FILE.id, _FILE.session_id, _FILE.absent).where(wanted).with_for_update()
    row = connection.execute(statement).first()
    if row is None:
        return False
    if request.session is not None:
        check_live(connection, request.session)
        if row.session_id != request.session and not _lack_all(connection, row, request, context.now_us):
            return False
    values = {"present": 0, "error": None, "session_id": None, "absent": "[]"}
    connection.execute(update(dag_file).where(_FILE.id == row.id).values(values))
    gone = and_(_DAG.file_id == row.id, _DAG.active == 1)
    connection.execute(update(dag).where(gone).values(active=0, changed_us=context.now_us))
    return True


def _lack_all(connection: Connection, row: Any, request: RemoveFile, now_us: int) -> bool:
    """Record that a parser lacks a file; return whether its own parser ended a grace ago, and all live ones lack it."""
    if row.session_id is not None and is_session_live(connection, row.session_id):
        return False
    live = and_(_SESSION.kind == "parser", _SESSION.ended_us.is_(None))
    parsers = set(connection.execute(select(_SESSION.id).where(live)).scalars())
    absent = ({*json.loads(row.absent), request.session}) & parsers
    connection.execute(update(dag_file).where(_FILE.id == row.id).values(absent=json.dumps(sorted(absent))))
    ended_us = connection.execute(select(_SESSION.ended_us).where(_SESSION.id == row.session_id)).scalar()
    # The host of the file may be about to start its parser again.
    return parsers <= absent and (ended_us is None or now_us - ended_us >= request.grace_us)


def check_live(connection: Connection, session: int) -> None:
    """Ensure that the session of a service stays live until the transaction ends.

    Raises:
        CallRefusedError: It has ended.
    """
    if not is_session_live(connection, session):
        raise CallRefusedError(RefusalKind.FENCED, f"session {session} has ended; the service must start a new one")
