"""The narrow rows of triggers, which are locked before anything else of a trigger is.

The order of locks, in every transaction: rows of sessions and lists first, then cursors by rising id, then the wide
rows of those triggers. Two transactions that share a trigger meet at its cursor, and the one that waits there holds
nothing that the other still needs: they cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, Select, select

from tidemill.core.triggers.event_plan import Counter
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.tables import trigger_cursor

IDS = RowSet("ids", id=int)


def lock_cursors(connection: Connection, ids: Collection[int]) -> dict[int, Counter]:
    """Return the cursors of the triggers that exist, by id; they do not change before the transaction ends."""
    dialect = find_dialect(connection)
    statement = add_row_locks(select(IDS.source(dialect).c.id))
    rows = connection.execute(statement, IDS.parameters(dialect, id_rows(ids)))
    return {row.trigger_id: Counter(row.next_index, row.token) for row in rows}


def add_row_locks(wanted: Select[int]) -> Select[int, int, int]:
    """Return the statement that locks cursors by rising id; `wanted` selects the ids."""
    return (
        select(trigger_cursor.c.trigger_id, trigger_cursor.c.token, trigger_cursor.c.next_index)
        .where(trigger_cursor.c.trigger_id.in_(wanted))
        .order_by(trigger_cursor.c.trigger_id)
        # Without effect on SQLite, where the whole transaction is the only one that writes.
        .with_for_update(of=trigger_cursor, key_share=True)
    )


def id_rows(ids: Collection[int]) -> list[tuple[int]]:
    """Return ids as the rows of `IDS`, each once, rising."""
    return [(number,) for number in sorted(set(ids))]
