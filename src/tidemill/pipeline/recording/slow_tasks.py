"""Logs slow attempts of tasks at a limited rate: a pipeline of slow tasks must not flood its log."""

from __future__ import annotations

import structlog

from tidemill.pipeline.tasks.process import ProcessOutcome
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.runtime.log.setup import throttle
from tidemill.sources.base import name_partition

log = structlog.get_logger(__name__)

#: At most one entry is logged in this many seconds; it counts those omitted since the last one.
LOG_SECONDS = 60.0
_MAX_ID_CHARS = 200


class SlowTasks:
    """The slow attempts of one engine.

    Attributes:
        least_seconds: Attempts that take longer are logged.
    """

    def __init__(self, least_seconds: float) -> None:
        self.least_seconds = least_seconds

    def note(self, flight: TaskInFlight, outcome: ProcessOutcome) -> None:
        """Log a slow attempt that has just ended."""
        offsets = flight.find_offsets()
        throttle(log, LOG_SECONDS).info(
            "a task was slow",
            task_id=flight.task.task_id[:_MAX_ID_CHARS],
            seconds=round(outcome.duration_seconds, 3),
            attempt=flight.attempts,
            partition=name_partition(flight.owner.topic_partition),
            offset=offsets[0] if offsets else None,
            exit_code=outcome.exit_code,
        )
