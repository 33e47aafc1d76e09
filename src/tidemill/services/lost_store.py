"""What a process does whose store lost its file: it ends, and saves what was in the store."""

from __future__ import annotations

import asyncio

import structlog

from tidemill.store.database import Database
from tidemill.store.engines.recovery import StoreLostError

log = structlog.get_logger(__name__)

#: As services beat.
LOOK_SECONDS = 5.0


async def check_files(database: Database) -> None:
    """Raise StoreLostError if the file of the store was removed or moved away."""
    if (loss := await asyncio.to_thread(database.find_loss)) is not None:
        log.error("the store has lost its file; everything is ended, and its content is saved", file=loss)
        raise StoreLostError(loss)


async def watch_files(database: Database) -> None:
    """Look at the file again and again.

    Raises:
        StoreLostError: It was removed or moved away.
    """
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await check_files(database)


async def recover_store(database: Database, loss: StoreLostError, command: str) -> None:
    """Save a store that lost its file, once nothing can be stored in it any more.

    Args:
        database: The store.
        loss: What has happened to its file.
        command: What had it open.

    Raises:
        StoreLostError: In any case; it says where the copy is.
    """
    try:
        path = await database.recover()
    except StoreLostError as error:
        raise StoreLostError(f"{loss} while `{command}` had it open, {error}") from loss
    raise StoreLostError(
        f"{loss} while `{command}` had it open, so it has ended; what was in the store is in {path}. "
        f"To go on with it, move it to {database.label}, and {path}.key, if there is one, to {database.label}.key"
    ) from loss
