"""Locks cursors, the narrow rows of triggers. A transaction locks the cursor before any other row of a trigger.

The lock order in every transaction: sessions and lists, then cursors by ascending id, then the wide rows of those
triggers. Two transactions that share a trigger meet at its cursor, and the waiting one holds no lock that the other
still needs, so they cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from sqlalchemy import Connection, Select, and_, case, select

from tidemill.core.triggers.event_plan import Counter
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.statements import Statement
from tidemill.store.tables import trigger, trigger_cursor

IDS = RowSet("ids", id=int)
#: Rows that a statement skips.
SKIPPED = RowSet("skipped", id=int)
_DEFERRED = RowSet("deferred", task=int, epoch=int)


def lock_cursors(connection: Connection, ids: Collection[int]) -> dict[int, Counter]:
    """Lock the cursors of existing triggers until the transaction ends, and return their counters by id."""
    dialect = find_dialect(connection)
    rows = connection.execute(_build_lock(dialect), IDS.build_parameters(dialect, build_id_rows(ids)))
    return {trigger_id: Counter(next_index, token) for trigger_id, token, next_index in rows}


@cache
def _build_lock(dialect: str) -> Select[int, int, int]:
    return build_lock_statement(select(IDS.build_source(dialect).c.id))


def build_lock_statement(wanted: Select[int]) -> Select[int, int, int]:
    """Return the statement that locks cursors by ascending id; `wanted` selects the ids."""
    return (
        select(trigger_cursor.c.trigger_id, trigger_cursor.c.token, trigger_cursor.c.next_index)
        .where(trigger_cursor.c.trigger_id.in_(wanted))
        .order_by(trigger_cursor.c.trigger_id)
        # No effect on SQLite, where only one transaction can write at a time.
        .with_for_update(of=trigger_cursor, key_share=True)
    )


def find_triggerers(connection: Connection, tasks: Collection[tuple[int, int]]) -> dict[int, int]:
    """Lock the triggers of deferred tasks, given as task and epoch, and return the session that runs each of them.

    A trigger that waits for its trial does not run, although it is reserved for a session.

    The caller must have locked the tasks and their runs; afterwards it may still lock other tasks of those runs.
    """
    if not tasks:
        return {}
    dialect = find_dialect(connection)
    given = _DEFERRED.build_parameters(dialect, tasks)
    return {task: session for task, session in _triggerers.fetch(connection, given) if session is not None}


@Statement
def _triggerers(dialect: str) -> Select[Any]:
    given = _DEFERRED.build_source(dialect)
    same = and_(trigger.c.task_id == given.c.task, trigger.c.epoch == given.c.epoch)
    return (
        select(trigger.c.task_id, case((trigger_cursor.c.claim_request.is_not(None), trigger_cursor.c.session_id)))
        .join(given, same)
        .join(trigger_cursor, trigger_cursor.c.trigger_id == trigger.c.id)
        .order_by(trigger_cursor.c.trigger_id)
        .with_for_update(of=trigger_cursor, key_share=True)
    )


def build_id_rows(ids: Collection[int]) -> list[tuple[int]]:
    """Return ids as rows of `IDS`, without duplicates, in ascending order."""
    return [(number,) for number in sorted(set(ids))]
