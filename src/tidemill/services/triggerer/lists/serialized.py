"""Keeps in the store what triggers are created from after a failure; waits for the store."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from sqlalchemy import Connection

from tidemill.services.triggerer.lists.sessions import Ownership, SessionEndedError
from tidemill.store.database import Database
from tidemill.store.queries.triggers.triggers import store_serialized
from tidemill.store.write_retry import write_patiently


async def keep_serialized(database: Database, ownership: Ownership, serialized: Mapping[int, str]) -> None:
    """Store what triggers are created from, before they run.

    Args:
        database: The store.
        ownership: The session in which they run; if it has ended, nothing is stored.
        serialized: By the ids of the triggers.
    """
    if not serialized:
        return

    def write(connection: Connection) -> None:
        ownership.guard(connection)
        store_serialized(connection, serialized)

    with contextlib.suppress(SessionEndedError):  # the beat of the session learns it as well, and acts on it
        await write_patiently(database, write)
