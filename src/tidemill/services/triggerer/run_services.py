"""What the run of a trigger needs of its host: where its events, its reports and its streams are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from tidemill.core.triggers.event_plan import StoreOutcome
from tidemill.core.triggers.group_commit import Standing
from tidemill.services.triggerer.state_writer import StateChange
from tidemill.triggers.shared_stream import SharedStreamManager

if TYPE_CHECKING:
    from tidemill.services.triggerer.run import TriggerRun


class Events(Protocol):
    """Where events go; `store.group_commit.EventStore` is one."""

    @property
    def standing(self) -> Standing:
        """Whether to go on."""

    def add(
        self, trigger_id: int, token: int, payload: str, identity: str | None, done: Callable[[StoreOutcome], None]
    ) -> None:
        """Accept an event; `done` is called once."""

    async def wait_open(self) -> None:
        """Wait until the next event may be made."""


class RunServices(Protocol):
    """What a run needs of its host."""

    manager: SharedStreamManager

    @property
    def events(self) -> Events:
        """Where events go."""

    @property
    def stopping(self) -> bool:
        """Whether the host stops: then it ends the streams, when all is stored."""

    def note_fenced(self) -> None:
        """Take that another process has claimed a trigger that runs here."""

    def mark(self, mark: StateChange) -> None:
        """Have a report written."""

    async def note_made(self, runs: Iterable[TriggerRun]) -> None:
        """Write down what triggers are made of."""
