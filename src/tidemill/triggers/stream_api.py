"""The interface between a shared stream and its producer, and the errors that can end a subscription.

Users import these names from `tidemill.triggers.shared_stream`. This module imports nothing from the streams, so that
trigger classes and streams can both depend on it.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Collection, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from tidemill.core.errors import TidemillError

#: Set while a producer is created: the name of the trigger list that its host runs; '' outside of lists.
LIST_NAME: Final[ContextVar[str]] = ContextVar("tidemill_list_name", default="")


@dataclass(slots=True)
class UpstreamCounts:
    """Counts of a process's producers, for its metrics; a producer need not count anything.

    Attributes:
        redelivered: Events that were redelivered.
        dead_lettered: Events whose dead letters are confirmed, by kind: "failed" or "rejected".
    """

    redelivered: int = 0
    dead_lettered: dict[str, int] = field(default_factory=dict)

    def add_letter(self, kind: str) -> None:
        """Count a dead letter."""
        self.dead_lettered[kind] = self.dead_lettered.get(kind, 0) + 1


#: Set while a producer is created: where the producer counts; None outside of a host.
UPSTREAM_COUNTS: Final[ContextVar[UpstreamCounts | None]] = ContextVar("tidemill_upstream_counts", default=None)


class AdvanceOutcome(NamedTuple):
    """The combined result of all subscribers for one event; each subscriber present at its fan-out counts once.

    An event without subscribers has (0, 0, 0), which is not clean.
    """

    acked: int
    """Subscribers that moved past the event, and whose derived events are all stored."""
    failed: int
    """Subscribers that raised, timed out, overflowed, or left before reading the event: redeliver it."""
    rejected: int = 0
    """Subscribers that rejected the event permanently: dead-letter it."""

    @property
    def is_clean(self) -> bool:
        """Whether at least one subscriber acknowledged the event, and none failed or rejected it."""
        return self.acked > 0 and not (self.failed or self.rejected)


class AdvanceItem(NamedTuple):
    """One event of a batch to advance over."""

    broker_payload: Any
    """The payload that the producer yielded with the event."""
    outcome: AdvanceOutcome


class SharedStreamProducer(abc.ABC):
    """Owns the broker connection of one shared stream, from its first poll to its end."""

    @abc.abstractmethod
    def open_stream(self) -> AsyncIterator[tuple[Any, Any]]:
        """Connect, and yield `(event, broker_payload)` forever, as an async generator; called once.

        Returning counts as a failure, like raising: it fails every subscriber.
        """

    def get_advance_lane(self, broker_payload: Any) -> Hashable:
        """Return the lane of the event; events of one lane are advanced in the order of their fan-out.

        Called once per event, before its fan-out; it must not block. By default all events share one lane.
        """
        return None

    @abc.abstractmethod
    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Acknowledge the oldest events of one lane to the broker, according to their outcomes.

        Args:
            batch: The events, in order and without gaps; never empty. Calls are sequential across all lanes.

        Raising ends the stream: the exception fails every subscriber, and the broker redelivers all events not yet
        advanced.
        """

    async def aclose(self) -> None:
        """Release the connection; called once, when the stream has ended and no `advance` is in flight."""
        return


@runtime_checkable
class SubscriberObserver(Protocol):
    """Implemented by producers that need to know their subscribers, and which of them failed an event.

    An outcome counts failures without naming triggers, which is enough for a broker with a visibility timeout. A
    producer that redelivers events itself has to wait for the triggers that failed them. It implements these methods,
    and the stream's manager calls them on the event loop, in the order of the changes. They must neither block nor
    raise.

    A trigger that keeps its seat while it is away is reported as having left and rejoined at once: events that it
    failed before can be redelivered immediately and wait in its seat.
    """

    def subscriber_joined(self, trigger_id: Hashable) -> None:
        """Record that a trigger subscribed; called for each existing subscriber before the first event."""

    def subscriber_left(self, trigger_id: Hashable) -> None:
        """Record that a trigger's subscription ended; the trigger may subscribe again."""

    def subscriber_gone(self, trigger_id: Hashable) -> None:
        """Record that a trigger will not subscribe again: it finished, was removed, or will not be restarted."""

    def event_failed(
        self, broker_payload: object, failures: Mapping[Hashable, str], unread: Collection[Hashable]
    ) -> None:
        """Record which triggers failed or rejected an event, and which never read it; `advance` follows."""


class AckTimeout(TidemillError):
    """A subscriber held an event beyond the ack timeout: it did not finish, or derived events are not stored.

    All events that the subscriber holds fail, and the broker is told; other subscribers continue.
    """


class SubscriberOverflow(TidemillError):
    """A subscriber left more raw events unread than its queue holds; being too slow fails only this subscriber."""


class StreamEnded(TidemillError):
    """The poll of a shared stream returned or was cancelled, although it must run as long as the stream."""
