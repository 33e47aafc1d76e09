"""The external causes that an engine waits for: sinks, brokers, programs, hooks."""

from __future__ import annotations

from typing import Protocol

from tidemill.core.errors import escape_surrogates
from tidemill.deadletters.writer import DeadLetters
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.services import Services
from tidemill.pipeline.tasks.process import TaskExecutor
from tidemill.runtime.link.progress import GROUP_NAME, brake_name
from tidemill.sources.base import Source


class Waiting(Protocol):
    """A part of the engine that may wait for an external cause."""

    def describe_stall(self) -> str | None:
        """Return what it waits for; None: nothing."""


class Waits:
    """The waits of one engine.

    Args:
        slot: The engine's slot.
        context: The engine's parts.
        services: The services of the handler.
        source: Where messages come from.
        letters: Where dead letters go.
        executor: Runs processes.
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
        self._context = context
        self._services = services
        self._source = source
        brake = context.brake
        self._others: tuple[tuple[str, Waiting], ...] = (
            ("kafka", source),
            ("dead letters", letters),
            ("resident program", executor),
            *([(brake_name(slot), brake)] if brake is not None else []),
        )

    def describe(self) -> dict[str, str]:
        """Return what the engine waits for, and why."""
        context = self._context
        stalled = (
            context.outbox.describe_stall() | self._services.describe_stall() | context.hooks.calls.describe_stall()
        )
        if (refusal := self._source.describe_refusal()) is not None:
            stalled[GROUP_NAME] = refusal
        for name, part in self._others:
            if (text := part.describe_stall()) is not None:
                stalled[name] = text
        return {name: escape_surrogates(text) for name, text in stalled.items()}
