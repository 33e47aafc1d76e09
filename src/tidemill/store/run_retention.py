"""Removes old DAG runs, and lists that no run took over: a background task of the process that owns a store of DAGs.

Invariants: the same as in `queries.dags.runs.run_retention`. Transactions are short, with pauses between them, so that
services continue in the meantime. After a failure of the store, the next round tries again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import structlog
from sqlalchemy import Connection

from tidemill.config.sections.triggerer_settings import StoreSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.log.setup import throttle
from tidemill.store.context import read_now
from tidemill.store.database import Database
from tidemill.store.queries.dags.items.conf_lists import remove_abandoned
from tidemill.store.queries.dags.runs.run_retention import (
    RemovedPart,
    RunRemoval,
    RunRetentionPage,
    TaskName,
    count_runs,
    find_guarded,
    look_at_runs,
    remove_callback_logs,
    remove_part,
    remove_versions,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: The interval between rounds; runs are days old, so ten minutes do not matter.
ROUND_SECONDS = 600.0
#: The pause after each transaction, which leaves most of the time to the services.
PAUSE_SECONDS = 0.02
_DAY_US = 24 * 60 * 60 * 1_000_000


class RunRetention:
    """Removes runs that exceed the configured age.

    Args:
        database: The store, open for writing.
        settings: Only `retention_runs_days` and `retention_runs_count` are read; 0 days keeps all runs.
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
        self._database = database
        self._days = settings.retention_runs_days
        self._keep = settings.retention_runs_count
        self._round_seconds = round_seconds
        self._pause_seconds = pause_seconds

    async def run(self) -> None:
        """Remove old runs, round after round, until cancelled."""
        while True:
            try:
                await self.remove_lists()
                if self._days:
                    await self.remove_old(await self._database.read(read_now))
            except (RemoteError, ConfigError) as error:
                throttle(log, 600.0).warning("old runs cannot be removed from the store", error=str(error))
            except Exception:
                log.exception("old runs cannot be removed from the store; this is a bug in tidemill")
            await asyncio.sleep(self._round_seconds)

    async def remove_lists(self) -> None:
        """Remove the lists that were sent for the configuration of a run which was not created within a day."""
        while await self._write(remove_abandoned):
            pass

    async def remove_old(self, now_us: int) -> int:
        """Remove all old runs and the DAG versions that no run uses; return the number of runs.

        Args:
            now_us: The time, in UTC microseconds since the epoch.

        Raises:
            RemoteError: The database failed; transactions that were committed before stay in effect.
        """
        before_us = now_us - round(self._days * _DAY_US)
        left = Counter(await self._database.read(count_runs))
        guarded = await self._database.read(find_guarded)
        after: int | None = 0
        removed = 0
        while after is not None:
            seen, after = await self._database.read(partial(_look, before_us, after))
            for one in seen:
                # The runs come oldest first, so `left` counts the later runs of the DAG.
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
        part = RemovedPart(RunRemoval.PART)
        while part.removal is RunRemoval.PART:
            part = await self._write(partial(_remove, run, before_us, part.after))
        return int(part.removal is RunRemoval.DONE)

    async def _write(self, work: Callable[[Connection], T]) -> T:
        result = await self._database.write(work)
        await asyncio.sleep(self._pause_seconds)
        return result


def _look(before_us: int, after: int, connection: Connection) -> RunRetentionPage:
    return look_at_runs(connection, before_us, after)


def _remove(run: int, before_us: int, after: TaskName | None, connection: Connection) -> RemovedPart:
    return remove_part(connection, run, before_us, after)
