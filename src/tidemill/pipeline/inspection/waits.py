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


class WaitingPart(Protocol):
    """A part of the engine that may wait for an external cause."""

    def describe_wait(self) -> str | None:
        """Return what it waits for; None: nothing."""


class Waits:
    """The waits of one engine.

    Args:
        slot: The engine's slot.
        context: The engine's parts.
        services: The services of the handler.
        source: The source of an engine's messages.
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
        self._others: tuple[tuple[str, WaitingPart], ...] = (
            ("kafka", source),
            ("dead letters", letters),
            ("resident program", executor),
            *([(brake_name(slot), brake)] if brake is not None else []),
        )

    def describe(self) -> dict[str, str]:
        """Return what the engine waits for, and why."""
        context = self._context
        waits = context.outbox.describe_wait() | self._services.describe_wait() | context.hooks.calls.describe_wait()
        if (refusal := self._source.describe_refusal()) is not None:
            waits[GROUP_NAME] = refusal
        for name, part in self._others:
            if (text := part.describe_wait()) is not None:
                waits[name] = text
        return {name: escape_surrogates(text) for name, text in waits.items()}
