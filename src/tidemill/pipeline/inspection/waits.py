"""What an engine waits for outside: sinks, brokers, programs, hooks."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.core.errors import escape_surrogates
from tidemill.deadletters.writer import DeadLetters
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.services import Services
from tidemill.pipeline.tasks.process import TaskExecutor
from tidemill.runtime.progress import brake_name
from tidemill.sources.base import Source


class Waits:
    """The waits of one engine.

    Args:
        slot: The engine's slot.
        context: Its parts.
        services: Its other parts.
        source: Where messages come from.
        letters: Where dead letters go.
        executor: What runs processes.
    """

    def __init__(
        self,
        slot: int,
        context: EngineContext,
        services: Services,
        source: Source,
        letters: DeadLetters,
        executor: TaskExecutor,
    ) -> None:
        """Keep the parts."""
        self._context = context
        self._services = services
        brake = context.brake
        self._others: tuple[tuple[str, Callable[[], str | None]], ...] = (
            ("kafka", source.describe_stall),
            ("dead letters", letters.describe_stall),
            ("resident program", executor.describe_stall),
            (brake_name(slot), brake.describe_stall if brake is not None else lambda: None),
        )

    def describe(self) -> dict[str, str]:
        """Return what is waited for, and why."""
        context = self._context
        stalled = (
            context.outbox.describe_stall() | self._services.describe_stall() | context.hooks.calls.describe_stall()
        )
        for name, describe in self._others:
            if (text := describe()) is not None:
                stalled[name] = text
        return {name: escape_surrogates(text) for name, text in stalled.items()}
