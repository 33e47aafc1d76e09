"""Removes old events and identities in batches; each batch is a short index scan.

Invariants: a batch starts where the previous one ended, so no index entry, dead or alive, is scanned twice. Rows that
another process is removing are skipped. Event ids are not reused.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Column, ColumnElement, Connection, Table, and_, delete, exists, select, tuple_

from tidemill.store.tables import trigger_event, trigger_identity, trigger_stream

#: The maximum number of rows per batch, which takes a few milliseconds.
BATCH_COUNT = 1_000


class Removed(NamedTuple):
    """The result of a batch.

    Attributes:
        rows: The number of removed rows; fewer than BATCH_COUNT means that no rows remain.
        reached_us: The start of the next batch.
    """

    rows: int
    reached_us: int


def remove_events(connection: Connection, before_us: int, since_us: int = 0) -> Removed:
    """Remove the oldest events, except those of streams that were not handled yet.

    Args:
        connection: A connection inside a transaction.
        before_us: Remove events that fired before this time, in UTC microseconds since the epoch.
        since_us: `Removed.reached_us` of the previous batch; 0 for the first batch.
    """
    stream, event = trigger_stream.c, trigger_event.c
    undelivered = exists().where(and_(stream.trigger_id == event.trigger_id, stream.handled <= event.sequence_index))
    return _remove(connection, trigger_event, [trigger_event.c.id], before_us, since_us, ~undelivered)


def remove_identities(connection: Connection, before_us: int, since_us: int = 0) -> Removed:
    """Remove the oldest identities; a redelivered event whose identity was removed is stored again."""
    keys = [trigger_identity.c.trigger_id, trigger_identity.c.identity]
    return _remove(connection, trigger_identity, keys, before_us, since_us)


def _remove(
    connection: Connection,
    table: Table,
    keys: list[Column[int] | Column[str]],
    before_us: int,
    since_us: int,
    *conditions: ColumnElement[bool],
) -> Removed:
    created: Column[int] = table.c.created_us
    oldest = (
        select(*keys)
        .where(and_(created >= since_us, created < before_us, *conditions))
        .order_by(created)
        .limit(BATCH_COUNT)
        .with_for_update(skip_locked=True)
    )
    removed = connection.execute(delete(table).where(tuple_(*keys).in_(oldest)).returning(created)).scalars().all()
    return Removed(len(removed), max(removed, default=since_us))
