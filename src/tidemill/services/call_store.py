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

    def mark(self, channel: Channel) -> int:
        """Return the number of rings so far; `wait` returns at once if there were more since."""
        ...

    async def wait(self, channel: Channel, mark: int, timeout_seconds: float) -> None:
        """Wait for a ring after a mark, or for the timeout."""
        ...
