"""The store as a worker sees it: calls, which wait for it, the bell, and beats."""

from __future__ import annotations

import asyncio
import random
from typing import Protocol, TypeVar

import structlog

from tidemill.core.errors import RemoteError, TidemillError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.log import throttle
from tidemill.store.call import Call, CallRefusedError
from tidemill.store.service_calls import BeatService

log = structlog.get_logger(__name__)

A = TypeVar("A")

#: Claims are made at least this often: a bell may be missed.
SCAN_SECONDS = 2.0
BEAT_SECONDS = 5.0
_BACKOFF = Backoff(0.1, 2.0)


class Calls(Protocol):
    """What answers named calls."""

    async def call(self, request: Call[A]) -> A:
        """Return the answer.

        Raises:
            RemoteError: The store cannot be reached; it may have carried the call out.
            CallRefusedError: It refuses the call, which changes nothing.
        """
        ...


class Bell(Protocol):
    """What tells that there may be something to do."""

    async def wait(self, channel: Channel, timeout_seconds: float) -> bool:
        """Wait until it rings, or has rung since the last wait, or the time is over; return whether it rang."""
        ...


class WorkerFencedError(TidemillError):
    """The store has ended this worker's service; its attempts have been given to others."""


async def call_patiently(calls: Calls, request: Call[A]) -> A:
    """Return an answer, however long the store is away.

    Raises:
        WorkerFencedError: The store refuses.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await calls.call(request)
        except CallRefusedError as error:
            raise WorkerFencedError(f"the store has ended this worker: {error}") from error
        except RemoteError as error:
            throttle(log, 10.0).warning("the store cannot be reached; attempts run on", error=str(error))
        await asyncio.sleep(_BACKOFF.compute_delay(attempt, random.getrandbits(JITTER_BITS)))


async def listen(bell: Bell) -> None:
    """Wait until there may be work; not for long, since a bell may be missed."""
    try:
        await bell.wait(Channel.WORKER, SCAN_SECONDS)
    except RemoteError:
        await asyncio.sleep(_BACKOFF.compute_delay(1, random.getrandbits(JITTER_BITS)))


async def beat(calls: Calls, service: int) -> None:
    """Beat until the store has ended the service.

    Raises:
        WorkerFencedError: It has.
    """
    while await call_patiently(calls, BeatService(service)):  # noqa: ASYNC110 - the answer may be no
        await asyncio.sleep(BEAT_SECONDS)
    raise WorkerFencedError("the store has ended this worker")
