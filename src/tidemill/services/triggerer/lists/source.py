"""The triggers of one list in the store: registers and claims them, and stores their states.

Invariant: the list is written only while the session in which it runs has not ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Container, Mapping, Sequence

import structlog
from sqlalchemy import Connection

from tidemill.services.triggerer.hosting.state_change import StateChange
from tidemill.services.triggerer.lists.admission import ListAdmission
from tidemill.services.triggerer.lists.reload import should_run
from tidemill.services.triggerer.lists.serialized import keep_serialized
from tidemill.services.triggerer.lists.sessions import Ownership
from tidemill.services.triggerer.lists.state_writer import StateWriter
from tidemill.store.database import Database
from tidemill.store.database_events import DatabaseEvents
from tidemill.store.queries.triggers.triggers import claim_triggers, register_triggers
from tidemill.store.records import TriggerRecord, TriggerSpec

log = structlog.get_logger(__name__)


#: How long an event waits for others: half of the 20 ms within which it should be stored.
LINGER_SECONDS = 0.01


class ListSource:
    """The triggers of a list.

    Args:
        database: The store, open for writing.
        ownership: The session in which the list runs; it has been acquired.

    Attributes:
        name: The list's name.
        linger_seconds: How long an event waits for others.
        writer: Stores events.
        disowned: Whether the store has reported that another process owns triggers of this list.
    """

    linger_seconds = LINGER_SECONDS

    def __init__(self, database: Database, ownership: Ownership) -> None:
        self._database, self._ownership = database, ownership
        self._admission = ListAdmission(database, ownership)
        self._states = StateWriter(database)
        self.name = ownership.list_name
        self.writer = DatabaseEvents(database)
        self.disowned = False

    async def wait_confirmed(self) -> None:
        """Wait until it is certain that no other process may run this list."""
        await self._ownership.wait_confirmed()

    async def wait_leased(self) -> bool:
        """Return at once: a list that is lost hands its streams over by itself."""
        return True

    async def claim(
        self, specs: Sequence[TriggerSpec], running: Container[str]
    ) -> tuple[list[TriggerRecord], dict[int, int]]:
        """Register triggers, and claim those that should run.

        Args:
            specs: The triggers.
            running: The names of running triggers, which are left alone.

        Returns:
            The stored records of all, and the tokens of the claimed ones, by their ids.

        Raises:
            ConfigError: The list cannot run alongside another list.
            SessionEndedError: Another process has taken the list over.
        """
        now_us = time.time_ns() // 1000

        def take(connection: Connection) -> tuple[list[TriggerRecord], dict[int, int]]:
            records = register_triggers(connection, specs, self.name, now_us)
            wanted = [record.id for record in records if record.spec.name not in running and should_run(record)]
            return records, claim_triggers(connection, wanted, self._ownership.session_id, now_us)

        return await self._admission.write(specs, take)

    async def reserve(self, new: Sequence[TriggerSpec], replaced: Sequence[TriggerSpec]) -> None:
        """Reserve the names and upstreams of a changed list; see `ListAdmission.reserve`."""
        await self._admission.reserve(new, replaced)

    async def forget_unlisted(self, specs: Collection[TriggerSpec]) -> None:
        """Cancel triggers that were removed from the list while no host ran it; see `ListAdmission.forget_unlisted`."""
        await self._admission.forget_unlisted(specs)

    async def release(self, old: Collection[TriggerSpec], new: Collection[TriggerSpec]) -> None:
        """Release upstreams that the list no longer reads; see `ListAdmission.release`."""
        await self._admission.release(old, new)

    async def keep_serialized(self, serialized: Mapping[int, str]) -> None:
        """Store the kwargs from which triggers are created after a failure, by trigger id."""
        await keep_serialized(self._database, self._ownership, serialized)

    def report_state(self, change: StateChange) -> None:
        """Accept a change of a trigger's state, to be written soon."""
        self._states.put(change)

    def note_fenced(self) -> None:
        """Send a heartbeat now, because the store has refused an event: another process owns its trigger."""
        self.disowned = True
        self._ownership.check()

    async def settle(self) -> None:
        """Wait until all state changes are stored."""
        await self._states.settled()

    async def close(self, timeout_seconds: float) -> None:
        """Store the pending state changes, within this time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._states.settled()
        except TimeoutError:
            log.warning(
                "cannot store the last states of triggers; the next host runs them again",
                reports=await self._states.close(),
            )
