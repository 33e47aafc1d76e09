"""Writes that must not be lost: reports about triggers wait for the database as their events do.

Invariants: only an outage is waited for; what the database refuses is raised at once. As it is unknown whether an
attempt without an answer was committed, the work has to be one that may be done twice, the last result being the one
that counts; all functions of `queries.triggers` are.
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
from tidemill.runtime.log import limited
from tidemill.store.database import Database

log = structlog.get_logger(__name__)

T = TypeVar("T")

BACKOFF = Backoff(0.1, 2.0)


async def write_patiently(database: Database, work: Callable[[Connection], T], backoff: Backoff = BACKOFF) -> T:
    """Return what the work returned, once it is committed; wait however long an outage takes.

    Args:
        database: Where to.
        work: May be done twice; the last result counts.
        backoff: The waits between attempts.

    Raises:
        RemoteError: The database refuses the content.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await database.write(work)
        except RemoteError as error:
            if not error.retryable:
                raise
            limited(log, 10.0).warning("the store cannot be written; a report waits", error=str(error))
        await asyncio.sleep(backoff.delay(attempt, random.getrandbits(JITTER_BITS)))
