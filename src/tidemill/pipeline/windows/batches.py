"""Delivery of results that concern one message each: results that a sink confirms together are released together.

See `sinks.sending.delivery_batch`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.arrangement import Arrangement
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.delivery.routing import RoutedPayload
from tidemill.pipeline.handler.models import ExecutorTask
from tidemill.pipeline.partition import OwnedPartition
from tidemill.pipeline.reports.report import WindowTimes
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.pipeline.windows.hooked import TASK_HOOK
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.sending.delivery_batch import BatchPart, DeliveryBatch
from tidemill.sources.base import TopicPartition


class DeliveringWindow(Protocol):
    """The interface of a window whose results are delivered together; see `WindowInFlight`."""

    context: EngineContext
    partition: OwnedPartition
    graph: Arrangement
    messages: list[SourceMessage]
    entries: Sequence[LedgerEntry[TopicPartition, int]]
    flights_of: list[list[TaskInFlight]]
    times: WindowTimes
    deliveries: DeliveryBatch | None


def may_start_as_batch(window: DeliveringWindow) -> bool:
    """Return whether a window's results can be delivered, and its messages resolved, in bulk.

    `deliver_part` need not check this: its messages take each step individually, except for the last.
    """
    context = window.context
    if len(window.messages) == 1 or context.overridden.on_message_complete:
        return False
    return context.brake is None


def deliver_part(window: DeliveringWindow, index: int, routed: Sequence[RoutedPayload], task: ExecutorTask) -> None:
    """Deliver the payloads of a task's hook; the task's only message is held until they are settled."""
    if window.deliveries is None:
        window.deliveries = DeliveryBatch(TASK_HOOK, functools.partial(release_batch, window))
    window.graph.hold((index,))
    part = BatchPart(window.deliveries, index, window.messages[index], len(routed), task)
    window.context.outbox.submit_part(part, routed)
    window.partition.submitted(part.size_bytes)


def release_batch(window: DeliveringWindow, indexes: Sequence[int], size_bytes: int) -> None:
    """Release messages whose payloads are settled; `size_bytes` is the total size of these payloads."""
    if not window.partition.closed:
        window.partition.delivered(size_bytes, len(indexes))
        resolve_batch(window, window.graph.release_all(indexes))


def resolve_batch(window: DeliveringWindow, indexes: Sequence[int]) -> None:
    """Resolve messages together."""
    if not indexes:
        return
    messages, entries, flights = window.messages, window.entries, window.flights_of
    if len(indexes) < len(messages):
        messages, entries = [messages[index] for index in indexes], [entries[index] for index in indexes]
        flights = [flights[index] for index in indexes]
        for index in indexes:  # free their results before the window's slowest task ends
            window.flights_of[index] = []
    window.partition.resolve_all(messages, entries, flights, window.times)
