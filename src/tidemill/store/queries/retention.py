"""Removes old events and identities, one batch at a time, each a short walk along an index.

Invariants: a batch begins where the one before it ended, so that nothing is walked twice, dead entries of the index
included; rows that another process is removing are left to it. Numbers of events are not used again.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Column, Connection, Table, and_, delete, select, tuple_

from tidemill.store.tables import trigger_event, trigger_identity

#: Most rows of one batch: some milliseconds.
BATCH_COUNT = 1_000


class Removed(NamedTuple):
    """What one batch did.

    Attributes:
        rows: How many it removed; fewer than BATCH_COUNT: there are no more.
        reached_us: Where the next batch begins.
    """

    rows: int
    reached_us: int


def remove_events(connection: Connection, before_us: int, since_us: int = 0) -> Removed:
    """Remove the oldest events.

    Args:
        connection: In a transaction.
        before_us: Those that fired earlier, in UTC microseconds since the epoch.
        since_us: `Removed.reached_us` of the batch before; 0: there was none.
    """
    return _remove(connection, trigger_event, [trigger_event.c.id], before_us, since_us)


def remove_identities(connection: Connection, before_us: int, since_us: int = 0) -> Removed:
    """Remove the oldest identities, likewise; a redelivered event with one of them is stored again."""
    keys = [trigger_identity.c.trigger_id, trigger_identity.c.identity]
    return _remove(connection, trigger_identity, keys, before_us, since_us)


def _remove(
    connection: Connection, table: Table, keys: list[Column[int] | Column[str]], before_us: int, since_us: int
) -> Removed:
    created: Column[int] = table.c.created_us
    oldest = (
        select(*keys)
        .where(and_(created >= since_us, created < before_us))
        .order_by(created)
        .limit(BATCH_COUNT)
        .with_for_update(skip_locked=True)
    )
    removed = connection.execute(delete(table).where(tuple_(*keys).in_(oldest)).returning(created)).scalars().all()
    return Removed(len(removed), max(removed, default=since_us))
