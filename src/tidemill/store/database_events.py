"""Stores events in a database that this process has open.

This module is separate from `group_commit` so that hosts that store events by named calls need no SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from tidemill.core.triggers.event_plan import EventPlan, NewEvent, StoreOutcome
from tidemill.store.database import Database
from tidemill.store.queries.triggers.events import store_events


class DatabaseEvents:
    """Stores events in a database that this process has open.

    Args:
        database: The store, open for writing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        # The plan of the last attempt, which may or may not have been committed.
        self._tried: tuple[tuple[NewEvent, ...], EventPlan] | None = None

    async def store(self, events: tuple[NewEvent, ...]) -> Sequence[StoreOutcome]:
        """Store events; see `EventWriter`."""
        plan = await self._database.write(lambda connection: self._store(connection, events))
        self._tried = None
        return plan.outcomes

    def _store(self, connection: Connection, events: tuple[NewEvent, ...]) -> EventPlan:
        """Store events. Runs on a database thread; nothing else uses `_tried` in the meantime."""
        tried = self._tried
        earlier = tried[1] if tried is not None and tried[0] is events else None
        plan = store_events(connection, events, earlier)
        self._tried = (events, plan)
        return plan
