"""A submission to senders: payloads of one hook's result, released together once each of them is settled.

Invariants: `released` is called at most once, on the loop. A payload is settled when its sink confirms it, when it is
skipped, or when its dead letter is confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from tidemill.core.delivery.send_items import AskDecision, GaveUp, Item
from tidemill.sinks.base import Encoded
from tidemill.sinks.sending.delivery_batch import BatchPart

#: (source topic, partition); None for payloads that do not come from a partition.
DeliveryLane = tuple[str, int] | None


class Submission:
    """Payloads of one hook's result, across sinks.

    Attributes:
        origin: The payloads' origin, and their size.
        pending: The number of payloads that are not settled.
        released: Called when all payloads are settled.
    """

    __slots__ = ("origin", "pending", "released")

    def __init__(self, origin: Any, pending: int, released: Callable[[], None]) -> None:
        self.origin = origin
        self.pending = pending
        self.released = released

    def settle(self, count: int = 1) -> None:
        """Subtract settled payloads; the last one calls `released`."""
        self.pending -= count
        if self.pending == 0:
            try:
                self.released()
            except Exception as error:  # a bug; payloads that are settled in the same call must not suffer
                context = {"message": "the release of delivered payloads", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)


class QueuedPayload(msgspec.Struct):
    """A payload in the queue, with its encoded form and its submission."""

    payload: Any
    encoded: Encoded | None
    submission: Submission | BatchPart


Entry = Item[DeliveryLane, QueuedPayload]
Question = AskDecision[DeliveryLane, QueuedPayload]
Failure = GaveUp[DeliveryLane, QueuedPayload]
