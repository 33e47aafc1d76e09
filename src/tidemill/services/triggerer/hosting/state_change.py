"""A change of a trigger's state."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.store.records import TriggerState


class StateChange(NamedTuple):
    """A new state of a trigger, to be written to the store; see `TriggerReport`."""

    trigger_id: int
    token: int
    state: TriggerState
    reason: str | None = None
    error: str | None = None
