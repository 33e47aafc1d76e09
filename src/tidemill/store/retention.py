"""Removes old events and identities: a background task of a trigger host.

Invariants: if nothing is old enough, a round reads one index entry. Batches are short transactions with pauses between
them, so that events are stored in the meantime. After a failure of the store, the next round tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from sqlalchemy import Connection

from tidemill.config.sections.triggerer_settings import StoreSettings
from tidemill.core.errors import RemoteError
from tidemill.runtime.log.setup import throttle
from tidemill.store.context import read_now
from tidemill.store.database import Database
from tidemill.store.queries.triggers.retention import BATCH_COUNT, Removed, remove_events, remove_identities

log = structlog.get_logger(__name__)

#: The interval between rounds; rows are days old, so a minute does not matter.
ROUND_SECONDS = 60.0
#: The pause between batches of a round, which leaves most of the time to the host's own writes.
PAUSE_SECONDS = 0.02
_DAY_US = 24 * 60 * 60 * 1_000_000

Remove = Callable[[Connection, int, int], Removed]


class Retention:
    """Removes rows that exceed the configured age.

    Args:
        database: The store, open for writing.
        settings: Only `retention_events_days` and `retention_identities_days` are read; 0 keeps everything.
        round_seconds: The time between rounds.
        pause_seconds: The time between batches.

    Example:
        >>> async def host(database, settings):
        ...     task = asyncio.create_task(Retention(database, settings).run(), name="retention")
        ...     ...
        ...     task.cancel()
    """

    def __init__(
        self,
        database: Database,
        settings: StoreSettings,
        *,
        round_seconds: float = ROUND_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        self._database = database
        self._round_seconds = round_seconds
        self._pause_seconds = pause_seconds
        kinds: tuple[tuple[str, float, Remove], ...] = (
            ("events", settings.retention_events_days, remove_events),
            ("identities", settings.retention_identities_days, remove_identities),
        )
        self._kinds = [kind for kind in kinds if kind[1]]

    async def run(self) -> None:
        """Remove old rows, round after round, until cancelled; return at once if the settings keep everything."""
        while self._kinds:
            try:
                await self.remove_old(await self._database.read(read_now))
            except RemoteError as error:
                throttle(log, 600.0).warning("old rows cannot be removed from the store", error=str(error))
            await asyncio.sleep(self._round_seconds)

    async def remove_old(self, now_us: int) -> int:
        """Remove all old rows and return their number.

        Args:
            now_us: The time, in UTC microseconds since the epoch.

        Raises:
            RemoteError: The database failed; batches that were committed before stay removed.
        """
        total = 0
        for name, days, remove in self._kinds:
            count = await self._remove(remove, now_us - round(days * _DAY_US))
            if count:
                log.info("old rows were removed from the store", what=name, count=count, older_than_days=days)
            total += count
        return total

    async def _remove(self, remove: Remove, before_us: int) -> int:
        total, since_us = 0, 0
        while True:
            count, since_us = await self._database.write(_bind_arguments(remove, before_us, since_us))
            total += count
            if count < BATCH_COUNT:
                return total
            await asyncio.sleep(self._pause_seconds)


def _bind_arguments(remove: Remove, before_us: int, since_us: int) -> Callable[[Connection], Removed]:
    return lambda connection: remove(connection, before_us, since_us)
