"""What services need of a store: named calls, and a bell that says when to look again.

The process that has the store open and those that reach it over its socket look the same.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from tidemill.core.tasks.inputs import Channel
from tidemill.store.call import Call

T = TypeVar("T")


class CallStore(Protocol):
    """Answers calls."""

    async def call(self, request: Call[T]) -> T:
        """Return the answer to a call, once it is committed.

        Raises:
            CallRefusedError: The store refuses it.
            RemoteError: The store failed, or cannot be reached; a retryable one leaves open whether it was committed.
        """
        ...


class Bell(Protocol):
    """Says that there may be something to do; it does not say what."""

    async def wait(self, channel: Channel, timeout_seconds: float) -> bool:
        """Wait until it rings, or has rung since the last wait, or the time is over; return whether it rang."""
        ...
