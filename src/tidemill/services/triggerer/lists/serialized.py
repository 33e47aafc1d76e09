"""Stores the kwargs from which triggers are created after a failure; waits for the store."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from sqlalchemy import Connection

from tidemill.services.triggerer.lists.sessions import Ownership, SessionEndedError
from tidemill.store.database import Database
from tidemill.store.queries.triggers.triggers import store_serialized
from tidemill.store.write_retry import write_patiently


async def keep_serialized(database: Database, ownership: Ownership, serialized: Mapping[int, str]) -> None:
    """Store the kwargs from which triggers are created again, before they run.

    Args:
        database: The store.
        ownership: The session in which they run; if it has ended, nothing is stored.
        serialized: Results of `serialize()` as JSON, by trigger id.
    """
    if not serialized:
        return

    def write(connection: Connection) -> None:
        ownership.guard(connection)
        store_serialized(connection, serialized)

    with contextlib.suppress(SessionEndedError):  # the session's heartbeat fails with the same error and handles it
        await write_patiently(database, write)
