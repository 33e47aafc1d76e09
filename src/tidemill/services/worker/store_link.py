"""The worker's access to the store: calls that wait out outages, the doorbell, and heartbeats."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

from tidemill.core.errors import RemoteError, TidemillError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.store_clock import read_elapsed_us
from tidemill.services.sessions.beats import note_clock
from tidemill.store.calls.call import Call, CallRefusedError
from tidemill.store.calls.service_calls import BeatSession
from tidemill.store.database import StoreCalls
from tidemill.store.doorbell import StoreBell
from tidemill.store.wire.remote import call_patiently

A = TypeVar("A")

#: Claims are made at least this often, because a ring may be missed.
SCAN_SECONDS = 2.0
_BACKOFF = Backoff(0.1, 2.0)


class WorkerFencedError(TidemillError):
    """The store has ended this worker's session, and has given its attempts to others."""


async def call_unfenced(calls: StoreCalls, request: Call[A]) -> A:
    """Return the answer to a call, however long the store is unreachable.

    Raises:
        WorkerFencedError: The store refuses the call.
        RemoteError: The database refuses the content.
    """
    try:
        return await call_patiently(calls, request)
    except CallRefusedError as error:
        raise WorkerFencedError(f"the store has ended this worker: {error}") from error


async def listen(bell: StoreBell) -> None:
    """Wait until there may be work, but not for long, because a ring may be missed."""
    try:
        await bell.wait(Channel.WORKER, SCAN_SECONDS)
    except RemoteError:
        await asyncio.sleep(_BACKOFF.compute_delay(1, random.getrandbits(JITTER_BITS)))


async def beat_once(calls: StoreCalls, session: int, measures: dict[str, float]) -> None:
    """Send a heartbeat, whose answer brings the time of the store, however long the store is unreachable.

    Raises:
        WorkerFencedError: The store has ended the session.
    """
    asked_us = read_elapsed_us()
    now_us = await call_unfenced(calls, BeatSession(session, measures))
    if not now_us:
        raise WorkerFencedError("the store has ended this worker")
    note_clock(now_us, asked_us)


async def beat(calls: StoreCalls, session: int, measure: Callable[[], dict[str, float]], beat_seconds: float) -> None:
    """Send heartbeats until the store has ended the session.

    Args:
        calls: The store.
        session: The number of the session.
        measure: Returns the measures to send.
        beat_seconds: The interval of heartbeats.

    Raises:
        WorkerFencedError: The store has ended the session.
    """
    loop = asyncio.get_running_loop()
    lag = 0.0
    while True:
        await beat_once(calls, session, {**measure(), "lag_seconds": lag})
        due = loop.time() + beat_seconds
        await asyncio.sleep(beat_seconds)
        lag = loop.time() - due
