"""Stores the logs of attempts while they run: what came is sent within half a second.

Invariants: one call is under way at a time; parts are kept until the store has them, up to a limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from tidemill.core.errors import RemoteError
from tidemill.runtime.log.setup import throttle
from tidemill.services.worker.logs import AttemptLog
from tidemill.store.calls.task_calls import AppendLog
from tidemill.store.calls.worker_calls import LogPart
from tidemill.store.database import StoreCalls

log = structlog.get_logger(__name__)

#: How long lines wait for others.
FLUSH_SECONDS = 0.3
_PAUSE_SECONDS = 1.0
_MAX_PARTS = 32
#: What is kept while the store is away: some 64 MiB at the very most, usually a tenth.
_MAX_KEPT = 1024


class LogStore:
    """Stores the logs of a worker's attempts.

    Args:
        calls: The store.
        list_logs: Returns the logs of the attempts that run.
    """

    def __init__(self, calls: StoreCalls, list_logs: Callable[[], Iterable[AttemptLog]]) -> None:
        """Store nothing yet."""
        self._calls = calls
        self._list_logs = list_logs
        self._parts: list[LogPart] = []
        self._storing: asyncio.Task[None] | None = None
        self._written = False

    def note_written(self) -> None:
        """Note that there are lines to store."""
        self._written = True
        self._begin()

    def add(self, parts: Iterable[LogPart]) -> None:
        """Store these, too."""
        self._parts += parts
        if self._parts:
            self._begin()

    def _begin(self) -> None:
        if self._storing is None:
            self._storing = asyncio.get_running_loop().create_task(self._run(), name="logs of attempts")

    async def close(self, timeout_seconds: float) -> None:
        """Store what is left, within this time at most."""
        if (storing := self._storing) is not None:
            await asyncio.wait([storing], timeout=timeout_seconds)
            if not storing.done():
                storing.cancel()
                log.warning("the last lines of some attempts could not be stored")

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
        now_us = time.time_ns() // 1000
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
                    throttle(log, 10.0).warning("logs of attempts wait for the store", error=str(error))
                    self._drop_excess()
                    await asyncio.sleep(_PAUSE_SECONDS)
                    self._take()
                    continue
                log.exception("the store refuses lines of logs; they are dropped")
            except Exception:  # whatever it is, the lines of others are stored
                log.exception("the store refuses lines of logs; they are dropped")
            del self._parts[: len(batch)]

    def _drop_excess(self) -> None:
        if len(self._parts) > _MAX_KEPT:
            del self._parts[_MAX_KEPT // 2 : -_MAX_KEPT // 2]
