"""Writes the states of triggers: many changes per transaction, in order; during an outage the changes wait.

Invariants: the changes of a trigger are written in order, and no outage loses one. A failed chunk is halved before the
retry: a chunk that exceeds the transaction timeout is not retried forever, and in the end only the change that the
database refuses is dropped.
"""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial

import structlog

from tidemill.core.errors import RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.runtime.log.setup import throttle
from tidemill.services.triggerer.hosting.state_change import StateChange
from tidemill.store.database import Database
from tidemill.store.queries.triggers.triggers import report_triggers
from tidemill.store.records import TriggerReport
from tidemill.store.write_retry import BACKOFF

log = structlog.get_logger(__name__)

#: Maximum number of reports per transaction. It takes some tens of milliseconds, during which events of these triggers
#: wait.
CHUNK_COUNT = 1_000


class StateWriter:
    """Queues state changes and writes them.

    Args:
        database: The store.
        backoff: The waits between attempts.
    """

    def __init__(self, database: Database, backoff: Backoff = BACKOFF) -> None:
        self._database = database
        self._backoff = backoff
        self._waiting: list[TriggerReport] = []
        self._task: asyncio.Task[None] | None = None

    def put(self, change: StateChange) -> None:
        """Accept a change, to be written soon."""
        number, token, state, reason, error = change
        self._waiting.append(TriggerReport(number, token, state, time.time_ns() // 1000, reason, error))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write(), name="trigger reports")

    async def settled(self) -> None:
        """Wait until all accepted changes are written."""
        while self._task is not None:
            await asyncio.shield(self._task)

    async def close(self) -> int:
        """Stop writing; return how many reports were not written."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        return len(self._waiting)

    async def _write(self) -> None:
        size, failures = CHUNK_COUNT, 0
        try:
            while self._waiting:
                chunk = self._waiting[:size]
                try:
                    await self._database.write(partial(report_triggers, reports=chunk))
                except RemoteError as error:
                    size = max(1, len(chunk) // 2)
                    if error.retryable:
                        failures += 1
                        throttle(log, 10.0).warning(
                            "cannot write trigger states to the store; retrying", error=str(error)
                        )
                        await asyncio.sleep(self._backoff.compute_delay(failures, random.getrandbits(JITTER_BITS)))
                        continue
                    if len(chunk) > 1:
                        continue
                    log.exception("the store refuses a trigger's change of state; dropping it", report=chunk[0])
                else:
                    size = min(CHUNK_COUNT, 2 * size)
                failures = 0
                del self._waiting[: len(chunk)]
        finally:
            self._task = None
