"""Logs attempts of tasks that took long, at a limited rate: a pipeline of slow tasks must not flood its log."""

from __future__ import annotations

import structlog

from tidemill.core.errors import escape_surrogates
from tidemill.pipeline.tasks.process import ProcessOutcome
from tidemill.pipeline.tasks.task_run import TaskRun
from tidemill.runtime.log import throttle
from tidemill.sources.base import name_partition

log = structlog.get_logger(__name__)

#: One entry is written in this time; it says how many were left out since the one before.
LOG_SECONDS = 60.0
_MAX_ID_CHARS = 200


class SlowTasks:
    """The slow attempts of one engine.

    Attributes:
        least_seconds: What takes longer is logged.
    """

    def __init__(self, least_seconds: float) -> None:
        """Start without any."""
        self.least_seconds = least_seconds

    def note(self, run: TaskRun, outcome: ProcessOutcome) -> None:
        """Log an attempt that has just ended and took long."""
        offsets = run.find_offsets()
        throttle(log, LOG_SECONDS).info(
            "a task was slow",
            task_id=escape_surrogates(run.task_id[:_MAX_ID_CHARS]),
            seconds=round(outcome.duration_seconds, 3),
            attempt=run.attempts,
            partition=name_partition(run.owner.place),
            offset=offsets[0] if offsets else None,
            exit_code=outcome.exit_code,
        )
