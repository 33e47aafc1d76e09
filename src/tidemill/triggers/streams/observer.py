"""Who subscribes to a shared stream, as a producer may want to know it.

An outcome counts failures and names nobody, which is all that a broker with a visibility timeout needs. A producer that
gives events again by itself has to wait for those who failed: it implements `SubscriberObserver`, and the manager of
its stream calls these methods, on the loop and in the order in which things happen. They may not block or raise.

A trigger that keeps a seat while it is away is told of as one that left and subscribed again at once: what it failed
before that can be given again at once, and waits in its seat.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class SubscriberObserver(Protocol):
    """What a manager tells a producer that has these methods, beside `advance`."""

    def subscriber_joined(self, trigger_id: Hashable) -> None:
        """Take that a trigger subscribed; at the start, one call for each that is there before the first event."""

    def subscriber_left(self, trigger_id: Hashable) -> None:
        """Take that a trigger's subscription ended; it may subscribe again."""

    def subscriber_gone(self, trigger_id: Hashable) -> None:
        """Take that a trigger will not subscribe again: it finished, was removed, or is not restarted."""

    def event_failed(
        self, broker_payload: object, failures: Mapping[Hashable, str], unread: Collection[Hashable]
    ) -> None:
        """Take who failed or rejected an event, with the error, and who never read it; its `advance` follows."""
