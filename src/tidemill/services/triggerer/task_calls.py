"""The store as the triggerer of tasks sees it: named calls, and the doorbell.

Invariant: a call that must not be lost is repeated until the store answers; what the store refuses is raised.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import structlog

from tidemill.core.errors import RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.tasks.inputs import Channel
from tidemill.core.triggers.event_plan import Duplicate, NewEvent, Refusal, Refused, Stored, StoreOutcome
from tidemill.runtime.log import throttle
from tidemill.store.calls import (
    Call,
    CallRefusedError,
    EventOutcome,
    EventOutcomeKind,
    FiredEvent,
    RefusalKind,
    StoreEvents,
)

log = structlog.get_logger(__name__)

A = TypeVar("A")

BACKOFF = Backoff(0.1, 2.0)


class Calls(Protocol):
    """What answers named calls; `store.remote.RemoteStore` and a database are."""

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


async def call_patiently(calls: Calls, request: Call[A], backoff: Backoff = BACKOFF) -> A:
    """Return the answer to a call; wait for the store for as long as it takes.

    Raises:
        CallRefusedError: The store refuses it.
        RemoteError: The same, by the database: repeating it does not help.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await calls.call(request)
        except RemoteError as error:
            if not error.retryable:
                raise
            throttle(log, 10.0).warning("the store cannot be reached; a call waits", error=str(error))
        await asyncio.sleep(backoff.compute_delay(attempt, random.getrandbits(JITTER_BITS)))


class CallEvents:
    """Stores events by calls; an `EventWriter`.

    Args:
        calls: The store.
        service: The service that runs the triggers.
        on_fenced: Called when the store says that the service has ended.
    """

    def __init__(self, calls: Calls, service: int, on_fenced: Callable[[], None]) -> None:
        """Store nothing yet."""
        self._calls, self._service, self._on_fenced = calls, service, on_fenced
        self._request = 0
        self._last: tuple[NewEvent, ...] | None = None

    async def store(self, events: tuple[NewEvent, ...]) -> Sequence[StoreOutcome]:
        """Store events; see `EventWriter`."""
        if events is not self._last:
            # A batch that is tried again keeps its number, by which the store recognises it.
            self._last = events
            self._request += 1
        fired = tuple(FiredEvent(*event) for event in events)
        try:
            outcomes = await self._calls.call(StoreEvents(self._service, self._request, fired))
        except CallRefusedError as error:
            if error.kind is not RefusalKind.FENCED:
                raise RemoteError(str(error), retryable=False) from error
            self._on_fenced()
            return [Refused(Refusal.FENCED)] * len(events)
        return [_read_outcome(outcome) for outcome in outcomes]


def _read_outcome(outcome: EventOutcome) -> StoreOutcome:
    match outcome.kind:
        case EventOutcomeKind.STORED:
            return Stored(outcome.sequence_index)
        case EventOutcomeKind.DUPLICATE:
            return Duplicate(outcome.sequence_index)
        case EventOutcomeKind.FENCED:
            return Refused(Refusal.FENCED)
    return Refused(Refusal.UNKNOWN_TRIGGER)
