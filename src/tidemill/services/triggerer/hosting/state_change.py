"""What a host tells of a trigger, wherever it tells it."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.store.records import TriggerState


class StateChange(NamedTuple):
    """A new state of a trigger; see `TriggerReport`."""

    trigger_id: int
    token: int
    state: TriggerState
    reason: str | None = None
    error: str | None = None
