"""The calls of triggerers, which run the triggers of deferred tasks.

Invariants: the holder of the newest token runs a trigger. If an answer was lost, the sender repeats the request with
the same number. Times are UTC microseconds since the epoch; user values are texts of `runtime.json.codec`.
"""

from __future__ import annotations

import enum

import msgspec

from tidemill.store.calls.call import Call, answered_by
from tidemill.store.calls.worker_calls import ClaimedAttempt, OutcomeKind


class StartClaim(msgspec.Struct, frozen=True):
    """A trigger that starts its task.

    Attributes:
        rendered: Whether texts in its arguments are templates.
        attempt: The run and the task, for templates; None: there are none, or the structure of the DAG is unreadable.
        element: The mapped arguments of an element, by name, encoded.
        native: Whether templates render to Python values.
        started_us: When the try started.
    """

    rendered: bool = False
    attempt: ClaimedAttempt | None = None
    element: tuple[tuple[str, str], ...] = ()
    native: bool = False
    started_us: int = 0


class ClaimedTrigger(msgspec.Struct, frozen=True):
    """A trigger of a deferred task.

    `token`: required for storing its events. `start`: set if it starts its task and its stream is not known yet.
    `streams`: all its events are stored, not just the first one.
    """

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
    start: StartClaim | None = None
    streams: bool = False


@answered_by("sessions.task_triggers:claim_task_triggers")
class ClaimTriggers(Call[tuple[ClaimedTrigger, ...]], frozen=True):
    """Claim unclaimed triggers.

    Attributes:
        session: The service session that will run them.
        request: The request number; see `WorkerTurn`.
        capacity: The maximum number of triggers.
        queues: The queues to claim from; empty: all.
        reserved: Claim only triggers reserved for this session, from any queue; without it, no reserved ones.
    """

    session: int
    request: int
    capacity: int
    queues: tuple[str, ...] = ()
    reserved: bool = False


class OwnedTrigger(msgspec.Struct, frozen=True):
    """A trigger owned by a service session.

    Attributes:
        id: The trigger.
        token: The token of its last claim or reservation.
        running: Whether the session has claimed it; otherwise it is only reserved for the session.
        stream: The key of the shared stream that it reads; None: it reads none.
    """

    id: int
    token: int
    running: bool
    stream: str | None = None


@answered_by("sessions.reserved_triggers:list_owned", reads=True)
class ListOwnedTriggers(Call[tuple[OwnedTrigger, ...]], frozen=True):
    """Return the task triggers that a session owns, by id."""

    session: int


@answered_by("sessions.reserved_triggers:reserve_triggers")
class ReserveTriggers(Call[int], frozen=True):
    """Take triggers from one session and reserve them for another, or for the same one; return their number.

    Attributes:
        owner: The session that owns them; it may be dead.
        session: The only session that may claim them afterwards.
        triggers: Their ids; triggers that `owner` no longer owns are skipped.
    """

    owner: int
    session: int
    triggers: tuple[int, ...]


class FiredEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event; see `core.triggers.event_plan.NewEvent`."""

    trigger: int
    token: int
    payload: str
    identity: str | None
    created_us: int
    ending: str | None = None


class EventEnding(msgspec.Struct, frozen=True, array_like=True):
    """How an event ends the task that waits for it.

    Attributes:
        state: `success`, `failed` or `skipped`.
        error: The reason of a failure, for people.
        xcoms: The XComs of the task: keys and encoded values.
    """

    state: str
    error: str = ""
    xcoms: tuple[tuple[str, str], ...] = ()


class EventOutcomeKind(enum.StrEnum):
    """The kind of an event's outcome; see `core.triggers.event_plan`."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    FENCED = "fenced"


class EventOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of an event.

    Attributes:
        kind: The kind.
        sequence_index: Its index, or the index of the event that it repeats.
        undelivered: The number of events of its stream that were not handled yet; 0: it belongs to no stream.
    """

    kind: EventOutcomeKind
    sequence_index: int = -1
    undelivered: int = 0


@answered_by("sessions.task_triggers:store_task_events")
class StoreEvents(Call[tuple[EventOutcome, ...]], frozen=True):
    """Store events of triggers, in order; the first event of a task's trigger resumes the task.

    Attributes:
        session: The session that runs the triggers.
        request: The number of the batch, repeated if the answer was lost. Only one batch is sent at a time.
        events: The events.
        max_undelivered: With more undelivered events than that, the trigger of a stream waits, and the session is rung
            once half of them are handled; 0: no limit.
    """

    session: int
    request: int
    events: tuple[FiredEvent, ...]
    max_undelivered: int = 0


@answered_by("dags.streams:count_undelivered", reads=True)
class CountUndelivered(Call[tuple[tuple[int, int], ...]], frozen=True):
    """Return the numbers of events of streams that were not handled yet, by trigger; ended streams have none."""

    triggers: tuple[int, ...]


@answered_by("sessions.start_streams:place_triggers")
class PlaceTriggers(Call[tuple[int, ...]], frozen=True):
    """Store the stream keys of triggers that start their tasks; return those that another session has to run.

    The key of such a trigger is known only once it is created. All triggers of a stream run in one session.

    Attributes:
        session: The session that has claimed them.
        triggers: Their ids, tokens and stream keys.
    """

    session: int
    triggers: tuple[tuple[int, int, str], ...]


@answered_by("sessions.task_triggers:fail_trigger")
class FailTrigger(Call[OutcomeKind], frozen=True):
    """Report that a task's trigger raised or ended without an event. `error`: as in `TriggerFailed`."""

    session: int
    trigger: int
    token: int
    error: str


@answered_by("sessions.task_triggers:release_triggers")
class ReleaseTriggers(Call[int], frozen=True):
    """Release triggers, given as ids and tokens, so that another triggerer can claim them; return their number."""

    session: int
    triggers: tuple[tuple[int, int], ...]


class StoppedTrigger(msgspec.Struct, frozen=True):
    """A trigger that its triggerer must stop.

    `reason`: `done`, `failed`, `timeout` or `user` (see `core.tasks.inputs.TriggerStopReason`), or `hand-over` if
    another triggerer has taken it over.
    """

    id: int
    token: int
    reason: str


@answered_by("sessions.task_triggers:find_stopped", reads=True)
class HeldTriggers(Call[tuple[StoppedTrigger, ...]], frozen=True):
    """Compare the triggers that a triggerer runs, as ids and tokens, with the store; return those it must stop."""

    session: int
    held: tuple[tuple[int, int], ...]
