"""Stores and reads the logs of tries, in compressed parts.

Invariant: a stored part never changes; a second part with the same number is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Executable, and_, func, select
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.store.calls.call import Listed
from tidemill.store.calls.log_calls import LogPartRecord
from tidemill.store.calls.task_calls import AppendLog
from tidemill.store.calls.worker_calls import LogPart
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import task_log
from tidemill.store.statements import Statement

_LOG = task_log.c


def append_log(connection: Connection, request: AppendLog, context: CallContext) -> None:
    """Store log parts; see `AppendLog`."""
    store_log_parts(connection, request.parts)


def store_log_parts(connection: Connection, parts: Sequence[LogPart]) -> None:
    if not parts:
        return
    rows = [
        {
            "task": part.task,
            "try_number": part.try_number,
            "number": part.number,
            "first_us": part.first_us,
            "data": part.data,
            "lines": part.lines,
            "last": int(part.last),
        }
        for part in parts
    ]
    # One statement per row instead of a `RowSet`, because the data are bytes.
    _part_insert.execute_many(connection, rows)


@Statement
def _part_insert(dialect: str) -> Executable:
    insert: Any = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(task_log).on_conflict_do_nothing()  # type: ignore[no-any-return]


def find_last_try(connection: Connection, task: int) -> int:
    """Return the last try of a task that has a log; 0 if there is none."""
    return int(
        connection.execute(select(func.coalesce(func.max(_LOG.try_number), 0)).where(_LOG.task == task)).scalar_one()
    )


def read_log(
    connection: Connection, task: int, try_number: int, after: str | None, limit: int
) -> Listed[LogPartRecord]:
    """Return a page of log parts, in order; the `next` of a growing log continues after its current end."""
    wanted = [_LOG.task == task, _LOG.try_number == try_number]
    if after is not None:
        wanted.append(_LOG.number > int(after))
    rows = connection.execute(select(task_log).where(and_(*wanted)).order_by(_LOG.number).limit(limit + 1)).all()
    parts = tuple(LogPartRecord(row.number, row.first_us, row.data, row.lines, bool(row.last)) for row in rows[:limit])
    return Listed(parts, str(parts[-1].number) if len(rows) > limit else None)
