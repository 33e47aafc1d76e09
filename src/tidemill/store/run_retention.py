"""Removes old runs of DAGs: the task that the owner of a store of DAGs runs besides its services.

Invariants: as those of `queries.run_retention`; transactions are short, with pauses between them, so that services go
on meanwhile; after a failure of the store it waits for the next round.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import structlog
from sqlalchemy import Connection

from tidemill.config.triggerer_settings import StoreSettings
from tidemill.core.errors import RemoteError
from tidemill.runtime.log.setup import throttle
from tidemill.store.database import Database
from tidemill.store.queries.dags.run_retention import (
    Page,
    Removal,
    count_runs,
    find_guarded,
    look_at_runs,
    remove_callback_logs,
    remove_part,
    remove_versions,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: Between rounds; runs are days old, so it does not matter how soon they are removed.
ROUND_SECONDS = 600.0
#: After each transaction; leaves most of the time to the services.
PAUSE_SECONDS = 0.02
_DAY_US = 24 * 60 * 60 * 1_000_000


class RunRetention:
    """Removes runs that are older than the settings say.

    Args:
        database: The store, open for writing.
        settings: `retention_runs_days` and `retention_runs_count` are read; with 0 days everything stays.
        round_seconds: The time between rounds.
        pause_seconds: The time between transactions.
    """

    def __init__(
        self,
        database: Database,
        settings: StoreSettings,
        *,
        round_seconds: float = ROUND_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        """Start without removing anything; `run` does."""
        self._database = database
        self._days = settings.retention_runs_days
        self._keep = settings.retention_runs_count
        self._round_seconds = round_seconds
        self._pause_seconds = pause_seconds

    async def run(self) -> None:
        """Remove old runs, round after round, until cancelled; only wait if everything is kept."""
        while True:
            if self._days:
                try:
                    await self.remove_old(time.time_ns() // 1000)
                except RemoteError as error:
                    throttle(log, 600.0).warning("old runs cannot be removed from the store", error=str(error))
                except Exception:
                    log.exception("old runs cannot be removed from the store; this is a bug in tidemill")
            await asyncio.sleep(self._round_seconds)

    async def remove_old(self, now_us: int) -> int:
        """Remove all old runs, and versions of DAGs that no run has; return how many runs there were.

        Args:
            now_us: The time, in UTC microseconds since the epoch.

        Raises:
            RemoteError: The database failed; what was removed before stays removed.
        """
        before_us = now_us - round(self._days * _DAY_US)
        left = Counter(await self._database.read(count_runs))
        guarded = await self._database.read(find_guarded)
        after: int | None = 0
        removed = 0
        while after is not None:
            seen, after = await self._database.read(partial(_look, before_us, after))
            for one in seen:
                left[one.dag] -= 1
                if one.old and left[one.dag] >= self._keep and one.run not in guarded:
                    removed += await self._remove(one.run, before_us)
            await asyncio.sleep(self._pause_seconds)
        versions = await self._remove_rest(before_us)
        if removed or versions:
            log.info(
                "old runs of DAGs were removed from the store",
                runs=removed,
                versions=versions,
                older_than_days=self._days,
            )
        return removed

    async def _remove_rest(self, before_us: int) -> int:
        while await self._write(lambda c: remove_callback_logs(c, before_us)):
            pass
        total = 0
        while count := await self._write(lambda c: remove_versions(c, before_us)):
            total += count
        return total

    async def _remove(self, run: int, before_us: int) -> int:
        while True:
            removal = await self._write(lambda c: remove_part(c, run, before_us))
            if removal is not Removal.PART:
                return int(removal is Removal.DONE)

    async def _write(self, work: Callable[[Connection], T]) -> T:
        result = await self._database.write(work)
        await asyncio.sleep(self._pause_seconds)
        return result


def _look(before_us: int, after: int, connection: Connection) -> Page:
    return look_at_runs(connection, before_us, after)
