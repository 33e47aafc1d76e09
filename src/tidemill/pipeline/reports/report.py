"""What an engine tells: what became of its messages, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tidemill.core.errors import sound
from tidemill.runtime.engine_tasks import EngineTasks
from tidemill.runtime.messages import SourceMessage
from tidemill.runtime.progress import brake_name

if TYPE_CHECKING:
    from tidemill.pipeline.engine import Engine
    from tidemill.pipeline.tasks.pool import TaskRun

#: A reason for waiting is told up to this length, which is four times a second.
MAX_STALLED_CHARS = 2_000


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


def stalled_of(engine: Engine) -> dict[str, str]:
    """Return what an engine waits for, and why."""
    stalled = engine.outbox.stalled() | engine.services.stalled() | engine.hooks.calls.stalled()
    for name, text in (
        ("kafka", engine.source.stalled()),
        ("dead letters", engine.letters.stalled()),
        ("resident program", engine.executor.stalled()),
        (brake_name(engine.identity.slot), engine.brake.stalled() if engine.brake is not None else None),
    ):
        if text is not None:
            stalled[name] = text
    return {name: sound(text)[:MAX_STALLED_CHARS] for name, text in stalled.items()}
