"""Writes down what becomes of triggers: many reports in one transaction, in order, waiting for the store.

Invariants: a later report of a trigger is written after an earlier one; nothing here is lost to an outage, it waits.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import structlog
from sqlalchemy import Connection

from tidemill.core.errors import RemoteError
from tidemill.store.database import Database
from tidemill.store.patience import write_patiently
from tidemill.store.queries.triggers import mark_trigger
from tidemill.store.records import TriggerState

log = structlog.get_logger(__name__)


class Mark(NamedTuple):
    """What a trigger is from now on; the arguments of `mark_trigger`."""

    trigger_id: int
    token: int
    state: TriggerState
    reason: str | None = None
    error: str | None = None


class Marks:
    """Reports that wait to be written.

    Args:
        database: Where to.
    """

    def __init__(self, database: Database) -> None:
        """Have none."""
        self._database = database
        self._waiting: list[tuple[Mark, int]] = []
        self._task: asyncio.Task[None] | None = None

    def put(self, mark: Mark) -> None:
        """Take a report; it is written soon."""
        self._waiting.append((mark, time.time_ns() // 1000))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write(), name="trigger reports")

    async def settled(self) -> None:
        """Wait until all that was put is written."""
        while self._task is not None:
            await asyncio.shield(self._task)

    async def _write(self) -> None:
        try:
            while self._waiting:
                marks, self._waiting = self._waiting, []

                def write(connection: Connection, marks: list[tuple[Mark, int]] = marks) -> None:
                    for (trigger_id, token, state, reason, error), now_us in marks:
                        mark_trigger(connection, trigger_id, token, state, now_us, reason=reason, error=error)

                try:
                    await write_patiently(self._database, write)
                except RemoteError:
                    log.exception("reports about triggers are refused by the store", count=len(marks))
        finally:
            self._task = None
