"""The interface of a sender, which stands in front of one sink, and the function that connects it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tidemill.core.delivery.send_items import Decision
from tidemill.core.errors import RemoteError, TidemillError, describe_error
from tidemill.runtime.link.progress import SinkStats
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sinks.base import Sink
from tidemill.sinks.sending.delivery_batch import BatchPart
from tidemill.sinks.sending.submission import DeliveryLane, Question, Submission


class Sender(Protocol):
    """Sends payloads to one sink, and settles them.

    Attributes:
        stats: The statistics of the sink; the caller adds skipped and dead-lettered payloads.
    """

    stats: SinkStats

    @property
    def sink(self) -> Sink:
        """The sink behind this sender."""
        ...

    @property
    def label(self) -> str:
        """The section that configures the sink."""
        ...

    @property
    def outstanding(self) -> int:
        """The number of unsettled payloads, as far as the sender decides that."""
        ...

    async def connect(self) -> None:
        """Connect, and check that the sink is usable."""

    def start(self, tasks: EngineTasks) -> None:
        """Start sending, in the running loop."""

    def add(self, payload: Any, lane: DeliveryLane, submission: Submission | BatchPart) -> None:
        """Accept a payload; one that can never be sent becomes a question, in a later turn of the loop."""

    def add_all(self, payloads: Sequence[tuple[Any, BatchPart]], lane: DeliveryLane) -> None:
        """Accept payloads of a delivery batch, in order; see `add`."""

    def decided(self, question: Question, decision: Decision) -> None:
        """Carry out the answer to a question; the caller settles payloads that are dropped."""

    def abandon(self, lane: DeliveryLane) -> None:
        """Forget the payloads of a partition."""

    def list_waiting(self) -> Iterable[Submission | BatchPart]:
        """Return the submissions that wait for the sink; the cost is proportional to their number."""
        ...

    def describe_wait(self) -> str | None:
        """Return what waits, and why; None if nothing does."""

    async def close(self) -> None:
        """Stop sending and close the sink; payloads that are not settled never will be."""


async def connect_sender(sender: Sender, seconds: float) -> None:
    """Connect a sink within `seconds`.

    Raises:
        TidemillError: The sink cannot be connected; the text names it.
    """
    try:
        async with asyncio.timeout(seconds):
            await sender.connect()
    except TidemillError:
        raise
    except TimeoutError:
        raise RemoteError(f"{sender.label}: no connection within {seconds:g} s") from None
    except Exception as error:  # a sink of another package may raise any exception
        raise RemoteError(f"{sender.label}: {describe_error(error)}") from error
