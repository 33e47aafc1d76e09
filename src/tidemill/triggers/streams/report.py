"""The status report of a shared stream."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tidemill.core.streams.members import LaneReport
from tidemill.triggers.streams.ack import AckStream
from tidemill.triggers.streams.life import SharedStream


@dataclass(frozen=True, slots=True)
class StreamReport:
    """The status of a shared stream.

    Attributes:
        key: The key of the stream.
        subscribers: The ids of all subscribed triggers, including those that have failed and not left yet.
        failed: Triggers that were forced to fail and have not left yet, with the time of the failure.
        outstanding: How many events have not been advanced; 0 for a stream without acknowledgements.
        full_since: Since when the producer is not pulled because of `max_outstanding`; None if it is pulled.
        lanes: What each lane waits for, with the triggers and since when, in seconds of the manager's clock.
    """

    key: Hashable
    subscribers: tuple[Any, ...]
    failed: dict[Any, float]
    outstanding: int
    full_since: float | None
    lanes: tuple[LaneReport[Hashable], ...]


def report_stream(stream: SharedStream) -> StreamReport:
    """Return the status of a stream."""
    failed = {name: one.end.failed_at for name, one in stream.subscriptions.items() if one.end.failed_at is not None}
    subscribers = tuple(stream.subscriptions)
    if not isinstance(stream, AckStream):
        return StreamReport(stream.key, subscribers, failed, 0, None, ())
    group = stream.group
    return StreamReport(stream.key, subscribers, failed, group.outstanding, group.full_since, tuple(stream.report()))
