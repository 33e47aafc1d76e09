"""Detects that a store's file was removed or moved, and saves the store's content."""

from __future__ import annotations

import asyncio

import structlog

from tidemill.store.database import Database
from tidemill.store.engines.recovery import StoreLostError

log = structlog.get_logger(__name__)

#: Same as the heartbeat interval of services.
LOOK_SECONDS = 5.0


async def check_files(database: Database) -> None:
    """Raise StoreLostError if the file of the store was removed or moved away."""
    if (loss := await asyncio.to_thread(database.find_loss)) is not None:
        log.error("the store's file was removed or moved; stopping, and saving the store's content", file=loss)
        raise StoreLostError(loss)


async def watch_files(database: Database) -> None:
    """Check the file periodically.

    Raises:
        StoreLostError: The file was removed or moved.
    """
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await check_files(database)


async def recover_store(database: Database, loss: StoreLostError, command: str) -> None:
    """Save the content of a store that lost its file; the caller has stopped all writers.

    Args:
        database: The store.
        loss: The error that reported the loss.
        command: The command that had the store open.

    Raises:
        StoreLostError: Always; the message names the copy.
    """
    try:
        path = await database.recover()
    except StoreLostError as error:
        raise StoreLostError(f"{loss} while `{command}` had it open, {error}") from loss
    raise StoreLostError(
        f"{loss} while `{command}` had it open, so the command stopped. The store's content was saved to {path}; "
        f"to continue, move it to {database.label}, and {path}.key, if it exists, to {database.label}.key"
    ) from loss
