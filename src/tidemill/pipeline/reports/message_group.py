"""Builds the message group that handlers' hooks receive."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tidemill.pipeline.handler.models import MessageGroup
from tidemill.pipeline.reports.report import WindowTimes
from tidemill.pipeline.tasks.task_run import TaskInFlight
from tidemill.runtime.kafka.source_message import SourceMessage


def make_message_group(message: SourceMessage, runs: Sequence[TaskInFlight], times: WindowTimes) -> MessageGroup:
    """Return the argument of `on_message_complete`.

    Args:
        message: The message.
        runs: Its tasks, all of which have ended.
        times: When its window was arranged.
    """
    return MessageGroup(
        message,
        [run.task for run in runs],
        [run.result for run in runs if run.result is not None],
        [run.error for run in runs if run.error is not None and not run.replaced],
        (times.started_at or 0) / 1_000_000,
        time.time(),
        sum(run.replaced for run in runs),
    )
