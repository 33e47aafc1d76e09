"""Builds the message group that handlers' hooks receive."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tidemill.pipeline.handler.models import MessageGroup
from tidemill.pipeline.reports.report import WindowTimes
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.runtime.kafka.source_message import SourceMessage


def make_message_group(message: SourceMessage, flights: Sequence[TaskInFlight], times: WindowTimes) -> MessageGroup:
    """Return the argument of `on_message_complete`.

    Args:
        message: The message.
        flights: Its tasks, all of which have ended.
        times: When its window was arranged.
    """
    return MessageGroup(
        message,
        [flight.task for flight in flights],
        [flight.result for flight in flights if flight.result is not None],
        [flight.error for flight in flights if flight.error is not None and not flight.replaced],
        (times.started_at or 0) / 1_000_000,
        time.time(),
        sum(flight.replaced for flight in flights),
    )
