"""Locks of shared streams, which last until the transaction ends; a SQLite file has one writer and needs none."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import BigInteger, Connection, Function, func, literal, select

from tidemill.store.batches import RowSet, find_dialect

_STREAMS = RowSet("streams", key=str)
#: The hash seed for stream keys ("tidestre" in ASCII), which separates them from other advisory locks.
_STREAMS_SEED = int.from_bytes(b"tidestre", "big")


def try_lock_streams(connection: Connection, keys: Collection[str]) -> Collection[str]:
    """Lock the streams and return those we got.

    Without the locks, two concurrent claims would not see each other and could split a stream between two services.
    There is no need to wait for the other streams: the transaction that locked them claims their triggers.
    """
    if not keys or find_dialect(connection) != "postgresql":
        return keys
    return {key for key, locked in _lock(connection, keys, func.pg_try_advisory_xact_lock) if locked}


def lock_streams(connection: Connection, keys: Collection[str]) -> None:
    """Lock the streams, and wait for those that other transactions have locked.

    Call this before anything else of the streams is locked: a transaction that waits here must not hold what the owner
    of a lock needs.
    """
    if keys and find_dialect(connection) == "postgresql":
        _lock(connection, keys, func.pg_advisory_xact_lock)


def _lock(connection: Connection, keys: Collection[str], lock: Any) -> list[tuple[str, Any]]:
    source = _STREAMS.build_source("postgresql")
    locked: Function[Any] = lock(func.hashtextextended(source.c.key, literal(_STREAMS_SEED, BigInteger())))
    rows = connection.execute(
        select(source.c.key, locked), _STREAMS.build_parameters("postgresql", [(key,) for key in sorted(keys)])
    )
    return [(row[0], row[1]) for row in rows]
