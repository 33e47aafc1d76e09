"""The host's services for the run of a trigger: the event store, the streams and the callbacks."""

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
    """Accepts events; `store.group_commit.EventStore` implements it."""

    @property
    def standing(self) -> ProducerStanding:
        """Whether the store accepts events, is slow, or is down."""

    def add(
        self,
        trigger_id: int,
        token: int,
        payload: str,
        identity: str | None,
        done: Callable[[StoreOutcome], None],
        ending: str | None = None,
    ) -> None:
        """Accept an event; `done` is called exactly once."""

    async def wait_open(self) -> None:
        """Wait until the next event may be created."""


@dataclass(frozen=True, slots=True)
class ListTriggerServices:
    """The host's services for a run.

    Attributes:
        manager: The shared streams of the host.
        events: The store for events.
        is_stopping: Returns whether the host is stopping; if so, it ends the streams once everything is stored.
        note_stored: Called with the trigger's name, the outcome and the identity of each stored event.
        note_fenced: Called when the store refuses an event because another process has claimed the trigger.
        report_state: Called with each change of a trigger's state, to be written to the store.
        triggers: Records the state and history of each trigger.
        keep_serialized: Stores, by trigger id, the kwargs from which triggers are created after a failure.
    """

    manager: SharedStreamManager
    events: EventTarget
    is_stopping: Callable[[], bool]
    note_stored: Callable[[str, StoreOutcome, str | None], None]
    note_fenced: Callable[[], None]
    report_state: Callable[[StateChange], None]
    triggers: TriggerBook
    keep_serialized: Callable[[Mapping[int, str]], Awaitable[None]]
