"""Sends the heartbeats of a session, from the loop that does the work of its service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tidemill.core.errors import RemoteError
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.store_clock import STORE_CLOCK, read_elapsed_us
from tidemill.services.sessions.lease import ServiceLease
from tidemill.store.calls.service_calls import OWN_CLOCK, BeatSession
from tidemill.store.database import StoreAwayError, StoreCalls

log = structlog.get_logger(__name__)


class SessionLostError(RemoteError):
    """Another process has taken this one for dead and has ended its session."""


def measure_nothing() -> dict[str, float]:
    """Return no measures."""
    return {}


def note_clock(now_us: int, asked_us: int) -> None:
    """Note the store's time, which was the answer to a heartbeat; warn once an hour if the clock of this host is wrong.

    Args:
        now_us: The answer.
        asked_us: When the heartbeat was sent (`read_elapsed_us`).
    """
    if now_us > OWN_CLOCK:
        STORE_CLOCK.note(now_us, asked_us)
    if error_us := STORE_CLOCK.find_error_us():
        throttle(log, 3600.0).warning(
            "the clock of this host differs from the database's, which tidemill goes by; your tasks and triggers may "
            "read the wrong time: synchronize the clock",
            ahead_seconds=round(error_us / 1e6),
        )


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
            asked_us = read_elapsed_us()
            now_us = await store.call(BeatSession(session, {**measure(), "lag_seconds": lag}))
        except RemoteError as error:
            if not isinstance(error, StoreAwayError):
                throttle(log, 10.0).warning("the store cannot be reached; retrying", error=str(error))
        else:
            if not now_us:
                raise SessionLostError(f"session {session} has ended: this process was taken for dead")
            note_clock(now_us, asked_us)
        due = loop.time() + lease.beat_seconds
        await asyncio.sleep(lease.beat_seconds)
        lag = max(0.0, loop.time() - due)
