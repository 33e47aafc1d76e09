"""What the run of a trigger gets from its host: where its events go, its streams, and whom to tell what, as values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tidemill.core.triggers.event_plan import StoreOutcome
from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.services.triggerer.hosting.state_change import StateChange
from tidemill.services.triggerer.hosting.trigger_book import TriggerBook
from tidemill.triggers.shared_stream import SharedStreamManager


class EventTarget(Protocol):
    """Where events go; `store.group_commit.EventStore` is one."""

    @property
    def standing(self) -> ProducerStanding:
        """Whether to go on."""

    def add(
        self, trigger_id: int, token: int, payload: str, identity: str | None, done: Callable[[StoreOutcome], None]
    ) -> None:
        """Accept an event; `done` is called once."""

    async def wait_open(self) -> None:
        """Wait until the next event may be created."""


@dataclass(frozen=True, slots=True)
class ListTriggerServices:
    """What a run needs of its host.

    Attributes:
        manager: The shared streams of the host.
        events: Where events go.
        is_stopping: Tells whether the host is stopping: then it ends the streams once everything is stored.
        note_stored: Called with the trigger's name, the outcome and the identity of each event that is stored.
        note_fenced: Called when the store refuses an event because another process has claimed the trigger.
        report_state: Called with each change of a trigger's state, to be written to the store.
        triggers: What becomes of each trigger is noted there.
        keep_serialized: Stores what triggers are created from after a failure, by their ids.
    """

    manager: SharedStreamManager
    events: EventTarget
    is_stopping: Callable[[], bool]
    note_stored: Callable[[str, StoreOutcome, str | None], None]
    note_fenced: Callable[[], None]
    report_state: Callable[[StateChange], None]
    triggers: TriggerBook
    keep_serialized: Callable[[Mapping[int, str]], Awaitable[None]]
