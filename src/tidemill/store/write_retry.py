"""Retries writes that must not be lost: reports about triggers wait for the database, as their events do.

Invariants: only an outage is retried; if the database rejects the content, the error is raised at once. An attempt
without an answer may have been committed, so the work must be idempotent and its last result counts. All functions of
`queries.triggers` are idempotent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

import structlog
from sqlalchemy import Connection

from tidemill.core.errors import RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.runtime.log.setup import throttle
from tidemill.store.database import Database

log = structlog.get_logger(__name__)

T = TypeVar("T")

BACKOFF = Backoff(0.1, 2.0)


async def write_patiently(database: Database, work: Callable[[Connection], T], backoff: Backoff = BACKOFF) -> T:
    """Run work and return its result after the commit; wait as long as an outage takes.

    Args:
        database: The store, open for writing.
        work: An idempotent function; its last result is returned.
        backoff: The delays between attempts.

    Raises:
        RemoteError: The database rejects the content.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await database.write(work)
        except RemoteError as error:
            if not error.retryable:
                raise
            throttle(log, 10.0).warning("cannot write to the store; a report is waiting", error=str(error))
        await asyncio.sleep(backoff.compute_delay(attempt, random.getrandbits(JITTER_BITS)))
