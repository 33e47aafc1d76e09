"""What became of a message and its tasks, as values: for the handler's hook, and for reports."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tidemill.pipeline.handler.models import MessageGroup
from tidemill.pipeline.reports.report import FinishedMessage
from tidemill.pipeline.tasks.pool import TaskRun
from tidemill.runtime.messages import SourceMessage


def make_message_group(message: SourceMessage, runs: Sequence[TaskRun], started_at: float) -> MessageGroup:
    """Return what `on_message_complete` is given.

    Args:
        message: The message.
        runs: Its tasks, all of which are terminal.
        started_at: Seconds since the epoch when its window was arranged.
    """
    return MessageGroup(
        message,
        [run.task for run in runs],
        [run.result for run in runs if run.result is not None],
        [run.error for run in runs if run.error is not None and not run.replaced],
        started_at,
        time.time(),
        sum(run.replaced for run in runs),
    )


def make_finished_message(
    message: SourceMessage,
    runs: Sequence[TaskRun] = (),
    started_at: float | None = None,
    rejected: str | None = None,
) -> FinishedMessage:
    """Return what is reported of a message that left the pipeline.

    Args:
        message: The message.
        runs: Its tasks.
        started_at: Seconds since the epoch when its window was arranged; None if it never was.
        rejected: Why it was dead-lettered before it had any task, if it was.
    """
    results, errors, attempts = [], [], 0
    for run in runs:
        attempts += run.attempts
        if run.result is not None:
            results.append(run.result)
        if run.error is not None and not run.replaced:
            errors.append(run.error)
    return FinishedMessage(message, started_at, len(runs), attempts, results, errors, rejected)
