"""What is handed to a sender: payloads of one hook's result, which are released together once each of them is settled.

Invariants: `released` is called at most once, on the loop; a payload is settled when its sink confirmed it, when it was
skipped, or when its dead letter is confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from tidemill.core.delivery.send_items import Ask, GaveUp, Item
from tidemill.sinks.base import Encoded
from tidemill.sinks.sending.run import RunPart

#: (source topic, partition); None for what comes from no partition.
DeliveryLane = tuple[str, int] | None


class Submission:
    """Payloads of one hook's result, across sinks.

    Attributes:
        origin: Where they come from, and their size.
        pending: How many of them are not settled.
        released: Called when none is left.
    """

    __slots__ = ("origin", "pending", "released")

    def __init__(self, origin: Any, pending: int, released: Callable[[], None]) -> None:
        """Start with everything pending."""
        self.origin = origin
        self.pending = pending
        self.released = released

    def settle(self, count: int = 1) -> None:
        """Count payloads off; the last one releases."""
        self.pending -= count
        if self.pending == 0:
            try:
                self.released()
            except Exception as error:  # a bug; payloads that are settled with it must not suffer
                context = {"message": "the release of delivered payloads", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)


class QueuedPayload(msgspec.Struct):
    """What travels with an item through the queue: the payload, its wire form, and its submission."""

    payload: Any
    encoded: Encoded | None
    submission: Submission | RunPart


Entry = Item[DeliveryLane, QueuedPayload]
Question = Ask[DeliveryLane, QueuedPayload]
Failure = GaveUp[DeliveryLane, QueuedPayload]
