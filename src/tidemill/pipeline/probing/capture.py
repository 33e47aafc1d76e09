"""Stands in for sinks, dead letters and commits in a probe: everything is accepted at once, and captured here.

Invariants: nothing leaves the process. Windows receive confirmations in a later turn of the loop, as from a sink.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tidemill.core.errors import InvariantError
from tidemill.deadletters.letter import Letter
from tidemill.deadletters.writer import LetterStatistics
from tidemill.pipeline.delivery.routing import Origin, RoutedPayload, Router
from tidemill.sinks.sending.delivery_batch import BatchPart
from tidemill.sinks.sending.submission import DeliveryLane
from tidemill.sources.base import Records, TopicPartition

#: More payloads and letters than this are only counted.
MOST_KEPT = 500


class CapturedPayload(NamedTuple):
    """A payload that would have gone to a sink.

    Attributes:
        sink: The sink's key in the configuration.
        origin: The payload's origin.
        payload: The payload.
    """

    sink: str
    origin: Origin
    payload: Any


class CapturedDelivery:
    """Stands in for the outbox; see `Delivery`.

    Args:
        router: Finds the sinks, as in the engine.

    Attributes:
        payloads: The first payloads, in order.
        sinks: How many payloads would have gone to each sink.
    """

    def __init__(self, router: Router) -> None:
        self.route, self.route_one = router.route, router.route_one
        self.payloads: list[CapturedPayload] = []
        self.sinks: Counter[str] = Counter()

    def submit(self, routed: Sequence[RoutedPayload], origin: Origin, released: Callable[[], None]) -> None:
        """Capture payloads as if their sinks had confirmed them."""
        for each in routed:
            label = each.sender.label
            self.sinks[label] += 1
            if len(self.payloads) < MOST_KEPT:
                self.payloads.append(CapturedPayload(label, origin, each.payload))
        asyncio.get_running_loop().call_soon(released)

    def submit_part(self, part: BatchPart, routed: Sequence[RoutedPayload]) -> None:
        """Raise InvariantError: a probe has a single message, which is not part of a batch."""
        raise InvariantError("a probe was given a part of a batch")

    def submit_run(self, parts: Sequence[BatchPart], routed: Sequence[Sequence[RoutedPayload]]) -> None:
        """Raise InvariantError: a probe has a single message, which is not a batch."""
        raise InvariantError("a probe was given a batch of messages")

    def abandon(self, lane: DeliveryLane) -> None:
        """Do nothing: nothing waits."""

    def list_waiting(self) -> dict[tuple[str, int], list[tuple[str, int, int]]]:
        """Return an empty dict: nothing waits."""
        return {}

    def describe_wait(self) -> dict[str, str]:
        """Return an empty dict: nothing waits."""
        return {}

    async def flush(self, deadline_seconds: float) -> None:
        """Return at once."""

    async def close(self) -> None:
        """Return at once."""


class CapturedLetters:
    """Stands in for the dead-letter topic; see `DeadLetters`.

    Attributes:
        letters: The first letters, in order.
        count: How many letters there were.
    """

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.count = 0

    async def open(self) -> None:
        """Return at once."""

    def put(self, letter: Letter, done: Callable[[], None]) -> None:
        """Capture a letter as if it were written."""
        self.count += 1
        if len(self.letters) < MOST_KEPT:
            self.letters.append(letter)
        asyncio.get_running_loop().call_soon(done)

    def statistics(self) -> LetterStatistics:
        """Return how many letters there were."""
        return LetterStatistics(self.count, {})

    def describe_wait(self) -> None:
        """Return None: no letter waits."""

    async def close(self) -> None:
        """Return at once."""


class NoCommits:
    """Stands in for a source that commits offsets."""

    def commit(self, offsets: Mapping[TopicPartition, int], records: Records | None = None) -> None:
        """Do nothing."""
