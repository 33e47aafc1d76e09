"""The interface of reports, and what they are told about each message that left the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tidemill.pipeline.handler.models import ExecutorError, ExecutorResult
from tidemill.runtime.engine_tasks import EngineTasks
from tidemill.runtime.messages import SourceMessage


class FinishedMessage(msgspec.Struct, frozen=True):
    """A message that left the pipeline.

    Attributes:
        message: The message.
        started_at: Seconds since the epoch when its window was arranged; None if it never was.
        tasks: How many tasks it had.
        attempts: How often these were tried, together.
        results: The results of tasks that succeeded.
        errors: How its other tasks failed for good, without those that others replaced.
        rejected: Why it was dead-lettered before it had any task; None if it was not.
    """

    message: SourceMessage
    started_at: float | None
    tasks: int
    attempts: int
    results: Sequence[ExecutorResult]
    errors: Sequence[ExecutorError]
    rejected: str | None


class Report(Protocol):
    """Where finished messages are reported; `history.HistoryWriter` is one.

    Attributes:
        tasks: Where its asyncio tasks run; set by the engine.
    """

    tasks: EngineTasks

    def finished(self, finished: FinishedMessage) -> None:
        """Take a message that left the pipeline; must be quick and must not raise."""

    async def close(self) -> None:
        """Write what is left."""
