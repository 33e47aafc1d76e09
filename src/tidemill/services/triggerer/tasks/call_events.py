"""Stores the events of tasks' triggers by named calls, so that the triggerer needs no database connection.

Invariant: a retried batch keeps its number, by which the store recognizes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.core.errors import RemoteError
from tidemill.core.triggers.event_plan import Duplicate, EventRefusal, EventRefused, EventStored, NewEvent, StoreOutcome
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.trigger_calls import EventOutcome, EventOutcomeKind, FiredEvent, StoreEvents
from tidemill.store.database import StoreClient


class CallEvents:
    """Stores events by calls; an `EventWriter`.

    Args:
        calls: The store.
        session: The session that runs the triggers.
        on_fenced: Called when the store answers that the session has ended.
        max_undelivered: The number of undelivered events of a stream above which its trigger waits; 0: no limit.
    """

    def __init__(
        self, calls: StoreClient, session: int, on_fenced: Callable[[], None], max_undelivered: int = 0
    ) -> None:
        self._calls, self._session, self._on_fenced = calls, session, on_fenced
        self._max_undelivered = max_undelivered
        self._request = 0
        self._last: tuple[NewEvent, ...] | None = None

    async def store(self, events: tuple[NewEvent, ...]) -> Sequence[StoreOutcome]:
        """Store events; see `EventWriter`."""
        if events is not self._last:
            self._last = events
            self._request += 1
        fired = tuple(FiredEvent(*event) for event in events)
        try:
            outcomes = await self._calls.call(StoreEvents(self._session, self._request, fired, self._max_undelivered))
        except CallRefusedError as error:
            if error.kind is not RefusalKind.FENCED:
                raise RemoteError(str(error), retryable=False) from error
            self._on_fenced()
            return [EventRefused(EventRefusal.FENCED)] * len(events)
        return [_read_outcome(outcome) for outcome in outcomes]


def _read_outcome(outcome: EventOutcome) -> StoreOutcome:
    match outcome.kind:
        case EventOutcomeKind.STORED:
            return EventStored(outcome.sequence_index, outcome.undelivered)
        case EventOutcomeKind.DUPLICATE:
            return Duplicate(outcome.sequence_index)
        case EventOutcomeKind.FENCED:
            return EventRefused(EventRefusal.FENCED)
    return EventRefused(EventRefusal.UNKNOWN_TRIGGER)
