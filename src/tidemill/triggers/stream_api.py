"""What a producer of a shared stream implements and is given, and how a subscriber's stream can end.

Users import these names from `tidemill.triggers.shared_stream`. It imports nothing of the streams themselves, so that
trigger classes and streams can both stand on it.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Collection, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from tidemill.core.errors import TidemillError

#: Set while a producer is created: the name of the list of triggers whose host runs it, '' without one.
LIST_NAME: Final[ContextVar[str]] = ContextVar("tidemill_list_name", default="")


@dataclass(slots=True)
class UpstreamCounts:
    """What the producers of a process did, for its metrics; a producer that counts nothing is counted as nothing.

    Attributes:
        redelivered: Events that were delivered once more.
        dead_lettered: Events whose dead letters are confirmed, by what happened to them: "failed" or "rejected".
    """

    redelivered: int = 0
    dead_lettered: dict[str, int] = field(default_factory=dict)

    def add_letter(self, kind: str) -> None:
        """Count a dead letter."""
        self.dead_lettered[kind] = self.dead_lettered.get(kind, 0) + 1


#: Set while a producer is created: where it counts; None outside of a host.
UPSTREAM_COUNTS: Final[ContextVar[UpstreamCounts | None]] = ContextVar("tidemill_upstream_counts", default=None)


class AdvanceOutcome(NamedTuple):
    """How the subscribers dealt with one event; each that was present at its fan-out counts once.

    An event without any subscriber is (0, 0, 0), and not clean.
    """

    acked: int
    """Subscribers that moved past it, and everything they derived from it is stored."""
    failed: int
    """Subscribers that raised on it, were too late or too far behind, or left before they read it: redeliver it."""
    rejected: int = 0
    """Subscribers that rejected it for good: make it a dead letter."""

    @property
    def is_clean(self) -> bool:
        """Whether at least one subscriber accepted it, and none failed or rejected it."""
        return self.acked > 0 and not (self.failed or self.rejected)


class AdvanceItem(NamedTuple):
    """One event of a batch to advance over."""

    broker_payload: Any
    """What the producer yielded with the event."""
    outcome: AdvanceOutcome


class SharedStreamProducer(abc.ABC):
    """Owns the broker connection of one shared stream, from its first poll to its end."""

    @abc.abstractmethod
    def open_stream(self) -> AsyncIterator[tuple[Any, Any]]:
        """Connect, and yield `(event, broker_payload)` forever, as an async generator; called once.

        Returning is an error, like raising: every subscriber gets it.
        """

    def get_advance_lane(self, broker_payload: Any) -> Hashable:
        """Return the lane of the event: events of one lane are advanced in the order of their fan-out.

        Called once per event, before its fan-out; it must not block. The default puts all events in one lane.
        """
        return None

    @abc.abstractmethod
    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Tell the broker what became of the oldest events of one lane.

        Args:
            batch: Never empty, in order, without gaps. One call is awaited at a time over all lanes.

        Raising ends the stream: every subscriber gets the exception, and the broker redelivers what was not advanced.
        """

    async def aclose(self) -> None:
        """Release the connection; called once, when the stream has ended and no advance is in flight."""
        return


@runtime_checkable
class SubscriberObserver(Protocol):
    """What a producer implements to learn who subscribes to its stream, and who failed an event.

    An outcome counts failures without naming anybody, which is all that a broker with a visibility timeout needs. A
    producer that redelivers events itself has to wait for the triggers that failed them: it implements these methods,
    and the manager of its stream calls them, on the event loop and in the order in which things happen. They must
    neither block nor raise.

    A trigger that keeps a seat while it is away is reported as one that left and subscribed again at once: what it
    failed before that can be redelivered immediately, and waits in its seat.
    """

    def subscriber_joined(self, trigger_id: Hashable) -> None:
        """Note that a trigger subscribed; called once for each that is there before the first event."""

    def subscriber_left(self, trigger_id: Hashable) -> None:
        """Note that a trigger's subscription ended; it may subscribe again."""

    def subscriber_gone(self, trigger_id: Hashable) -> None:
        """Note that a trigger will not subscribe again: it finished, was removed, or is not restarted."""

    def event_failed(
        self, broker_payload: object, failures: Mapping[Hashable, str], unread: Collection[Hashable]
    ) -> None:
        """Note who failed or rejected an event, with the error, and who never read it; its `advance` follows."""


class AckTimeout(TidemillError):
    """A subscriber held an event for longer than the ack timeout: it is still on it, or what it derived is not stored.

    The subscriber fails everything it holds, which the broker is told; the others continue.
    """


class SubscriberOverflow(TidemillError):
    """A subscriber left more raw events unread than its queue holds: it is too slow for its stream, and fails alone."""


class StreamEnded(TidemillError):
    """The poll of a shared stream returned or was cancelled; it is expected to run for the lifetime of the group."""
