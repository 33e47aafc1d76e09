"""What an engine tells about each message that left it, to whom it concerns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tidemill.runtime.engine_tasks import EngineTasks
from tidemill.runtime.messages import SourceMessage

if TYPE_CHECKING:
    from tidemill.pipeline.tasks import TaskRun


class Report(Protocol):
    """Where finished messages are reported; `history.HistoryWriter` is one.

    Attributes:
        tasks: Where its asyncio tasks run; set by the engine.
    """

    tasks: EngineTasks

    def finished(
        self, message: SourceMessage, started_at: float | None, runs: Sequence[TaskRun], error: str | None
    ) -> None:
        """Take a message that left the pipeline; must be quick and must not raise."""

    async def close(self) -> None:
        """Write what is left."""
