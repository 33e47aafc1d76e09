"""The delivery interface that windows use: implemented by the outbox, and by its replacement in probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tidemill.pipeline.delivery.routing import Origin, RoutedPayload
from tidemill.sinks.payloads import CollectResult
from tidemill.sinks.sending.delivery_batch import BatchPart
from tidemill.sinks.sending.submission import DeliveryLane


class ResultDelivery(Protocol):
    """Delivers results; see `Outbox`."""

    @property
    def route(self) -> Callable[[CollectResult], list[RoutedPayload]]:
        """Finds the sinks of a hook's payloads; see `Router.route`."""

    @property
    def route_one(self) -> Callable[[Any], RoutedPayload]:
        """Finds the sink of a payload; see `Router.route_one`."""

    def submit(self, routed: Sequence[RoutedPayload], origin: Origin, released: Callable[[], None]) -> None:
        """Deliver payloads; `released` is called on the loop once all are settled, never inside this call."""

    def submit_part(self, part: BatchPart, routed: Sequence[RoutedPayload]) -> None:
        """Deliver the payloads of one part of a batch; the part is never settled inside this call."""

    def submit_run(self, parts: Sequence[BatchPart], routed: Sequence[Sequence[RoutedPayload]]) -> None:
        """Deliver the payloads of a batch; `routed` has the payloads of each part."""

    def abandon(self, lane: DeliveryLane) -> None:
        """Forget the payloads of a partition that was given up."""

    def list_waiting(self) -> dict[tuple[str, int], list[tuple[str, int, int]]]:
        """Return, by partition, the sinks that results wait for, each with the first and last offset of a result."""
        ...

    def describe_wait(self) -> dict[str, str]:
        """Return what is waiting, and why."""
        ...

    async def flush(self, deadline_seconds: float) -> None:
        """Wait until nothing is in flight, or the deadline has passed."""

    async def close(self) -> None:
        """Drop the remaining payloads."""
