"""The calls of triggerers, which run the triggers of deferred tasks.

Invariants: a trigger is run by who has the newest token; a request may be repeated with the same number if its answer
was lost. Times are UTC microseconds since the epoch; values of users are texts of `runtime.json.codec`.
"""

from __future__ import annotations

import enum

import msgspec

from tidemill.store.calls.call import Call
from tidemill.store.calls.worker_calls import OutcomeKind


class ClaimedTrigger(msgspec.Struct, frozen=True):
    """A trigger of a deferred task. `token`: who stores events for it gives this one."""

    id: int
    token: int
    task: int
    epoch: int
    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    try_number: int
    classpath: str
    kwargs: str
    stream_key: str | None
    due_us: int | None


class ClaimTriggers(Call[tuple[ClaimedTrigger, ...]], frozen=True):
    """Claim triggers that nobody runs.

    Attributes:
        service: The service that is to run them.
        request: As in `WorkerTurn`.
        capacity: How many.
        queues: Whose triggers; empty: all.
        reserved: Only those that are reserved for the service, of any queue; who does not say so gets none of them.
    """

    service: int
    request: int
    capacity: int
    queues: tuple[str, ...] = ()
    reserved: bool = False


class OwnedTrigger(msgspec.Struct, frozen=True):
    """A trigger that a service has.

    Attributes:
        id: The trigger.
        token: Of its last claim or reservation.
        running: Whether the service has claimed it; else it is only reserved for it.
        stream: The shared stream that it reads; None: it reads none.
    """

    id: int
    token: int
    running: bool
    stream: str | None = None


class ListOwnedTriggers(Call[tuple[OwnedTrigger, ...]], frozen=True):
    """Answer which triggers of tasks a service has, by id."""

    service: int


class ReserveTriggers(Call[int], frozen=True):
    """Take triggers from a service, and reserve them for another one, or for the same; answer how many.

    Attributes:
        owner: The service that has them, and may have died.
        service: Only this one may claim them.
        triggers: Their ids; those that the owner does not have any more are passed over.
    """

    owner: int
    service: int
    triggers: tuple[int, ...]


class FiredEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event: see `core.triggers.event_plan.NewEvent`."""

    trigger: int
    token: int
    payload: str
    identity: str | None
    created_us: int


class EventOutcomeKind(enum.StrEnum):
    """What became of an event: see `core.triggers.event_plan`."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    FENCED = "fenced"


class EventOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of an event. `sequence_index`: its number, or that of the event it repeats."""

    kind: EventOutcomeKind
    sequence_index: int = -1


class StoreEvents(Call[tuple[EventOutcome, ...]], frozen=True):
    """Store events of any triggers, in order; the first event of a task's trigger resumes the task.

    Attributes:
        service: The service that runs the triggers.
        request: The number of the batch; the same again if the answer was lost. Batches are sent one at a time.
        events: The events.
    """

    service: int
    request: int
    events: tuple[FiredEvent, ...]


class FailTrigger(Call[OutcomeKind], frozen=True):
    """Report that a trigger of a task raised, or ended without an event. `error`: as in `TriggerFailed`."""

    service: int
    trigger: int
    token: int
    error: str


class ReleaseTriggers(Call[int], frozen=True):
    """Give triggers back, as ids and tokens, so that another triggerer runs them; answer how many."""

    service: int
    triggers: tuple[tuple[int, int], ...]


class StoppedTrigger(msgspec.Struct, frozen=True):
    """A trigger that is to be stopped.

    `reason`: `done`, `failed`, `timeout` or `user` (see `core.tasks.inputs.Stop`), or `hand-over`: another triggerer
    runs it.
    """

    id: int
    token: int
    reason: str


class HeldTriggers(Call[tuple[StoppedTrigger, ...]], frozen=True):
    """Compare what a triggerer runs, as ids and tokens, with the store, and answer what is to be stopped."""

    service: int
    held: tuple[tuple[int, int], ...]
