"""Stores the logs of running attempts; new lines are sent within half a second.

Invariants: one call is in flight at a time; parts are kept until the store has them, up to a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from tidemill.core.errors import RemoteError
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.services.worker.logs.logs import AttemptLog
from tidemill.store.calls.task_calls import AppendLog
from tidemill.store.calls.worker_calls import LogPart
from tidemill.store.database import StoreCalls

log = structlog.get_logger(__name__)

#: How long lines wait for others.
FLUSH_SECONDS = 0.3
_PAUSE_SECONDS = 1.0
_MAX_PARTS = 32
#: Maximum number of parts kept during an outage of the store: at most 64 MiB, usually a tenth of that.
_MAX_KEPT = 1024


class LogStore:
    """Stores the logs of a worker's attempts.

    Args:
        calls: The store.
        list_logs: Returns the logs of the running attempts.
    """

    def __init__(self, calls: StoreCalls, list_logs: Callable[[], Iterable[AttemptLog]]) -> None:
        self._calls = calls
        self._list_logs = list_logs
        self._parts: list[LogPart] = []
        self._storing: asyncio.Task[None] | None = None
        self._written = False

    def note_written(self) -> None:
        """Schedule a flush, because there are new lines."""
        self._written = True
        self._begin()

    def add(self, parts: Iterable[LogPart]) -> None:
        """Add parts to store."""
        self._parts += parts
        if self._parts:
            self._begin()

    def _begin(self) -> None:
        if self._storing is None:
            self._storing = asyncio.get_running_loop().create_task(self._run(), name="logs of attempts")

    async def close(self, timeout_seconds: float) -> None:
        """Store the remaining lines within this time."""
        if (storing := self._storing) is not None:
            await asyncio.wait([storing], timeout=timeout_seconds)
            if not storing.done():
                storing.cancel()
                log.warning("cannot store the last log lines of some attempts; they are lost")

    async def _run(self) -> None:
        try:
            while self._written or self._parts:
                await asyncio.sleep(FLUSH_SECONDS)
                self._take()
                await self._store()
        finally:
            self._storing = None

    def _take(self) -> None:
        self._written = False
        now_us = STORE_CLOCK.now_us()
        for each in self._list_logs():
            if each.has_lines:
                self._parts += each.take(now_us)

    async def _store(self) -> None:
        while self._parts:
            batch = self._parts[:_MAX_PARTS]
            try:
                await self._calls.call(AppendLog(tuple(batch)))
            except RemoteError as error:
                if error.retryable:
                    throttle(log, 10.0).warning("cannot store the logs of attempts; retrying", error=str(error))
                    self._drop_excess()
                    await asyncio.sleep(_PAUSE_SECONDS)
                    self._take()
                    continue
                log.exception("the store refuses log lines; dropping them")
            except Exception:  # a refused part must not prevent storing the lines of others
                log.exception("the store refuses log lines; dropping them")
            del self._parts[: len(batch)]

    def _drop_excess(self) -> None:
        if len(self._parts) > _MAX_KEPT:
            del self._parts[_MAX_KEPT // 2 : -_MAX_KEPT // 2]
