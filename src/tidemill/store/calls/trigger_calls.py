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
    `streams`: all its events are stored, not just the first one. `kill`: it does not run; `on_kill` of a new instance
    is called, and `KillCalled` reports this number. `rests_us`: it was handed over, and is not handed over again for
    this long.
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
    kill: int | None = None
    rests_us: int = 0


@answered_by("sessions.task_triggers:claim_task_triggers")
class ClaimTriggers(Call[tuple[ClaimedTrigger, ...]], frozen=True):
    """Claim unclaimed triggers: the session's fair share of what waits; `core.triggers.fair_share` decides.

    Without `reserved` no reserved triggers and no suspects are claimed.

    Attributes:
        session: The service session that will run them.
        request: The request number; see `WorkerTurn`.
        capacity: The maximum number of triggers, unless those of one stream are more than every triggerer runs at once.
        queues: The queues to claim from; empty: all.
        reserved: Claim only triggers reserved for this session, from any queue.
        held: How many triggers the session runs.
        leaving: The keys of streams that it is handing over.
        kills: Whether to claim stopped triggers, too, whose `on_kill` must be called.
    """

    session: int
    request: int
    capacity: int
    queues: tuple[str, ...] = ()
    reserved: bool = False
    held: int = 0
    leaving: tuple[str, ...] = ()
    kills: bool = False


class TriggererLoadRecord(msgspec.Struct, frozen=True, array_like=True):
    """A triggerer: how many triggers it runs, and how many at most."""

    held: int
    capacity: int


@answered_by("sessions.claims:list_loads", reads=True)
class ListLoads(Call[tuple[TriggererLoadRecord, ...]], frozen=True):
    """Return the loads of the other triggerers that serve all of these queues and have sent a heartbeat lately.

    None while a trigger that was handed over waits to be claimed.

    Attributes:
        session: The session of the triggerer that asks.
        queues: Its queues; empty: all.
    """

    session: int
    queues: tuple[str, ...] = ()


class OwnedTrigger(msgspec.Struct, frozen=True):
    """A trigger owned by a service session.

    Attributes:
        id: The trigger.
        token: The token of its last claim or reservation.
        running: Whether the session has claimed it; otherwise it is only reserved for the session.
        stream: The key of the shared stream that it reads; None: it reads none.
        deaths: How many sessions that ran it were lost.
    """

    id: int
    token: int
    running: bool
    stream: str | None = None
    deaths: int = 0


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


class FoundSuspects(msgspec.Struct, frozen=True):
    """What waits for trials.

    Attributes:
        triggers: Whether there are suspects that could be tried.
        kills: Whether `on_kill` must be called of a trigger whose triggerer was lost while it called it.
    """

    triggers: bool = False
    kills: bool = False


@answered_by("sessions.suspects:find_suspects", reads=True)
class FindSuspects(Call[FoundSuspects], frozen=True):
    """Return what waits for a trial in these queues; see `TakeSuspects`.

    `beside`: the number of trials that the triggerer has already.
    """

    queues: tuple[str, ...]
    beside: int = 0


class TakenSuspects(msgspec.Struct, frozen=True):
    """Triggers for a trial; see `core.triggers.lost_hosts.TrialPlan`."""

    triggers: tuple[int, ...] = ()
    seconds: float = 0.0
    deaths: int = 0
    is_split: bool = False


@answered_by("sessions.suspects:take_suspects")
class TakeSuspects(Call[TakenSuspects], frozen=True):
    """Reserve triggers that may have killed their hosts for a session, which tries them in a process of its own.

    Triggers that are known to kill their hosts fail instead. `core.triggers.lost_hosts` decides both.

    Attributes:
        session: The session.
        queues: The queues of the triggers.
        most: The number of triggers that a process runs at once.
        beside: The number of trials that the session has already.
    """

    session: int
    queues: tuple[str, ...]
    most: int = 10_000
    beside: int = 0


@answered_by("sessions.deaths:clear_deaths")
class ClearDeaths(Call[int], frozen=True):
    """Reduce the deaths of triggers that others explain, or that have outlived their trial; return their number.

    Attributes:
        triggers: The triggers.
        deaths: How many they keep.
    """

    triggers: tuple[int, ...]
    deaths: int = 0


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


@answered_by("dags.streams.events:count_undelivered", reads=True)
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
    """Release triggers, given as ids and tokens, so that another triggerer can claim them; return their number.

    Attributes:
        session: The session that has claimed them.
        triggers: Their ids and tokens.
        killed: Those that a user stopped, and whose `on_kill` has been called or was not needed. Another triggerer
            calls it for the others that a user stopped.
        moves: Whether the session hands them over, because it runs many more than others.
    """

    session: int
    triggers: tuple[tuple[int, int], ...]
    killed: tuple[int, ...] = ()
    moves: bool = False


@answered_by("sessions.kills:note_kill")
class KillCalled(Call[bool], frozen=True):
    """Report that `on_kill` of a stopped trigger was called; False: another session has to call it.

    Attributes:
        session: The session that has claimed it.
        kill: `ClaimedTrigger.kill`.
        error: Why it could not be called; None: it was.
    """

    session: int
    kill: int
    error: str | None = None


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
    """Compare the triggers that a triggerer runs, as ids and tokens, with the store; return those it must stop.

    A reason other than `hand-over` belongs to the claim with this token: a later owner is told the reason itself.
    """

    session: int
    held: tuple[tuple[int, int], ...]
