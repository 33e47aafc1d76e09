"""Sends the heartbeats of a session, from the loop that does the work of its service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tidemill.core.errors import RemoteError
from tidemill.runtime.log.setup import throttle
from tidemill.services.sessions.lease import ServiceLease
from tidemill.store.calls.service_calls import BeatSession
from tidemill.store.database import StoreAwayError, StoreCalls

log = structlog.get_logger(__name__)


class SessionLostError(RemoteError):
    """Another process has taken this one for dead and has ended its session."""


def measure_nothing() -> dict[str, float]:
    """Return no measures."""
    return {}


async def send_beats(
    store: StoreCalls,
    session: int,
    lease: ServiceLease,
    measure: Callable[[], dict[str, float]] = measure_nothing,
) -> None:
    """Send heartbeats until cancelled.

    Args:
        store: The store.
        session: The session.
        lease: Its lease.
        measure: Returns the measures of the service.

    Raises:
        SessionLostError: The store has ended the session.
    """
    loop = asyncio.get_running_loop()
    lag = 0.0
    while True:
        try:
            lives = await store.call(BeatSession(session, {**measure(), "lag_seconds": lag}))
        except RemoteError as error:
            if not isinstance(error, StoreAwayError):
                throttle(log, 10.0).warning("the store cannot be reached; retrying", error=str(error))
        else:
            if not lives:
                raise SessionLostError(f"session {session} has ended: this process was taken for dead")
        due = loop.time() + lease.beat_seconds
        await asyncio.sleep(lease.beat_seconds)
        lag = max(0.0, loop.time() - due)
