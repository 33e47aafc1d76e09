"""The triggers of deferred tasks: claims, events and failures.

Invariants: the first event of a task's trigger resumes the task in the transaction that stores the event. All triggers
of one stream are claimed by the same service. Requests with a stale token are refused. Tasks are locked before trigger
cursors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import (
    BigInteger,
    Connection,
    Row,
    Select,
    and_,
    bindparam,
    exists,
    literal_column,
    or_,
    select,
    update,
)

from tidemill.core.tasks.endings import Failure, Skip, Success
from tidemill.core.tasks.inputs import Input, TriggerEnded, TriggerFailed, TriggerFired, identify
from tidemill.core.triggers.event_plan import Duplicate, EventRefusal, EventStored, NewEvent, StoreOutcome
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.service_calls import TrialKind
from tidemill.store.calls.stream_calls import EndStream
from tidemill.store.calls.trigger_calls import (
    ClaimedTrigger,
    ClaimTriggers,
    EventEnding,
    EventOutcome,
    EventOutcomeKind,
    FailTrigger,
    HeldTriggers,
    ReleaseTriggers,
    StartClaim,
    StoppedTrigger,
    StoreEvents,
)
from tidemill.store.calls.worker_calls import OutcomeKind
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag, dag_run, task_instance
from tidemill.store.queries.dags.attempts.starts import StartValues, describe_starts
from tidemill.store.queries.dags.state.tasks import close_board, draw_bits, end_cleanups
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.dags.streams.events import feed_maps, note_endings, note_events
from tidemill.store.queries.dags.values.xcoms import find_fault
from tidemill.store.queries.sessions.claims import REST_US, take_free, take_joining
from tidemill.store.queries.sessions.kills import claim_kills, settle_kills
from tidemill.store.queries.sessions.reserved_triggers import take_reserved
from tidemill.store.queries.sessions.services import check_session, free_triggers, lock_session
from tidemill.store.queries.sessions.stream_ends import end_stream, find_trigger_tasks, finish_stream, name_answer
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.queries.triggers.events import store_events
from tidemill.store.queries.triggers.sessions import is_session_live
from tidemill.store.queries.triggers.triggers import make_storable
from tidemill.store.records import TriggerState
from tidemill.store.statements import Statement
from tidemill.store.tables import service_session, trigger, trigger_cursor, trigger_stream

_TRIGGER, _CURSOR, _TASK = trigger.c, trigger_cursor.c, task_instance.c
_RUNNING = TriggerState.RUNNING.value
_HELD = RowSet("held_claims", id=int, token=int)
_KINDS = {EventRefusal.UNKNOWN_TRIGGER: EventOutcomeKind.UNKNOWN, EventRefusal.FENCED: EventOutcomeKind.FENCED}
_answers = msgspec.json.Encoder().encode
_read_ending = msgspec.json.Decoder(EventEnding).decode
_read_answers = msgspec.json.Decoder(tuple[EventOutcome, ...]).decode


def claim_task_triggers(
    connection: Connection, request: ClaimTriggers, context: CallContext
) -> tuple[ClaimedTrigger, ...]:
    """Claim unclaimed triggers; see `ClaimTriggers`."""
    lock_session(connection, request.session)
    mine = and_(_CURSOR.session_id == request.session, _CURSOR.claim_request == request.request)
    again = list(connection.execute(select(_CURSOR.trigger_id).where(mine)).scalars())
    kind = connection.execute(
        select(service_session.c.trial).where(service_session.c.id == request.session)
    ).scalar_one()
    is_whole, calls_kills = kind == TrialKind.WHOLE, kind == TrialKind.KILLS
    if request.reserved and not calls_kills:
        found = again or take_reserved(connection, request, context)
        if is_whole and not again:
            found += take_joining(connection, request, request.capacity - len(found), context)
        return _describe_claimed(connection, found, context)
    kills = claim_kills(connection, request, context, is_trial=calls_kills) if request.kills or calls_kills else {}
    found = again or ([] if calls_kills else take_free(connection, request, context))
    return (*_describe_claimed(connection, found, context), *_describe_kills(connection, kills, context))


def _describe_claimed(connection: Connection, ids: Collection[int], context: CallContext) -> tuple[ClaimedTrigger, ...]:
    if not ids:
        return ()
    dialect = find_dialect(connection)
    rows = connection.execute(_build_description(dialect), IDS.build_parameters(dialect, build_id_rows(ids))).all()
    starts = describe_starts(connection, {row.task_id for row in rows if row.starts}, context)
    return tuple(_build_claimed(row, _build_start(row, starts.get(row.task_id)), context) for row in rows)


@cache
def _build_description(dialect: str) -> Select[Any]:
    return (
        select(
            trigger,
            _CURSOR.token,
            _CURSOR.moved_us,
            trigger_stream.c.handled,
            _TASK.task_id.label("task_name"),
            _TASK.map_index,
            _TASK.tries,
            _TASK.next_due_us,
            dag_run.c.run_id,
            dag.c.dag_id,
        )
        .join(trigger_cursor, _CURSOR.trigger_id == _TRIGGER.id)
        .join(trigger_stream, trigger_stream.c.trigger_id == _TRIGGER.id, isouter=True)
        .join(task_instance, _TASK.id == _TRIGGER.task_id)
        .join(dag_run, dag_run.c.id == _TASK.run)
        .join(dag, dag.c.id == dag_run.c.dag)
        .where(_TRIGGER.id.in_(select(IDS.build_source(dialect).c.id)))
        .order_by(_TRIGGER.id)
    )


def _describe_kills(connection: Connection, kills: Mapping[int, int], context: CallContext) -> list[ClaimedTrigger]:
    """Describe stopped triggers, given with their callbacks."""
    if not kills:
        return []
    dialect = find_dialect(connection)
    rows = connection.execute(_build_description(dialect), IDS.build_parameters(dialect, build_id_rows(kills))).all()
    starts = describe_starts(connection, {row.task_id for row in rows if row.starts}, context)
    return [
        replace(_build_claimed(row, _build_start(row, starts.get(row.task_id)), context), kill=kills[row.id])
        for row in rows
    ]


def _build_start(row: Row[Any], values: StartValues | None) -> StartClaim | None:
    if row.starts is None:
        return None
    return StartClaim(bool(row.starts), *values) if values is not None and row.starts else StartClaim(bool(row.starts))


def _build_claimed(row: Row[Any], start: StartClaim | None, context: CallContext) -> ClaimedTrigger:
    return ClaimedTrigger(
        row.id,
        row.token,
        row.task_id,
        row.epoch,
        row.dag_id,
        row.run_id,
        row.task_name,
        row.map_index,
        row.tries,
        row.classpath,
        context.cipher.decrypt(row.kwargs),
        row.stream_key,
        row.next_due_us,
        start,
        row.handled is not None,
        rests_us=0 if row.moved_us is None else min(REST_US, max(0, row.moved_us + REST_US - context.now_us)),
    )


def store_task_events(connection: Connection, request: StoreEvents, context: CallContext) -> tuple[EventOutcome, ...]:
    """Store events and resume the tasks that wait for them; see `StoreEvents`."""
    lock_session(connection, request.session)
    last = select(service_session.c.events_request, service_session.c.events_answer).where(
        service_session.c.id == request.session
    )
    number, answer = connection.execute(last).one()
    if number == request.request:
        return _read_answers(answer)
    events = [NewEvent(*msgspec.structs.astuple(event)) for event in request.events]
    outcomes = tuple(
        _build_outcome(outcome) for outcome in store_and_resume(connection, events, context, request.max_undelivered)
    )
    said = {"events_request": request.request, "events_answer": _answers(outcomes).decode()}
    connection.execute(update(service_session).where(service_session.c.id == request.session).values(said))
    return outcomes


def store_and_resume(
    connection: Connection, events: Sequence[NewEvent], context: CallContext, max_undelivered: int = 0
) -> list[StoreOutcome]:
    """Store events and resume the tasks whose triggers fired for the first time."""
    tasks = find_trigger_tasks(connection, {event.trigger_id for event in events})
    streams = {number: row for number, row in tasks.items() if row.streams is not None}
    # An event of a stream locks no task, unless it ends one that no attempt will end.
    ending = {event.trigger_id for event in events if event.ending is not None}
    tasks = {number: row for number, row in tasks.items() if row.streams is None or (row.feeds and number in ending)}
    board = Board(connection, context)
    board.lock({row.task_id for row in tasks.values()})
    outcomes = store_events(connection, events).outcomes
    given: list[tuple[int, Input]] = []
    for event, outcome in zip(events, outcomes, strict=True):
        row = tasks.get(event.trigger_id)
        is_first = row is not None and row.streams is None and outcome == EventStored(0)
        is_end = row is not None and row.streams is not None and event.ending is not None
        if row is not None and isinstance(outcome, EventStored) and (is_first or is_end):
            given.append((row.task_id, _build_input(row.epoch, event)))
    fed = {number for number, row in streams.items() if row.feeds}
    if fed:
        _feed(connection, events, outcomes, fed, context)
    board.give_all(given, "trigger")
    close_board(board)
    taken = streams.keys() - fed
    return _note_streamed(connection, events, outcomes, taken, context, max_undelivered) if taken else outcomes


def _feed(
    connection: Connection,
    events: Sequence[NewEvent],
    outcomes: list[StoreOutcome],
    fed: Collection[int],
    context: CallContext,
) -> None:
    """Make the new events of streams that feed maps elements; put the numbers of undelivered events into `outcomes`."""
    new: dict[int, list[tuple[str, str | None]]] = {}
    stored = [
        number
        for number, (event, outcome) in enumerate(zip(events, outcomes, strict=True))
        if event.trigger_id in fed and isinstance(outcome, EventStored)
    ]
    for event in (events[number] for number in stored):
        values = new.setdefault(event.trigger_id, [])
        if event.ending is None:
            values.append((event.payload, event.identity))
    undelivered = feed_maps(connection, new, context) if new else {}
    for number in stored:
        outcome = outcomes[number]
        assert isinstance(outcome, EventStored)
        outcomes[number] = EventStored(outcome.sequence_index, undelivered[events[number].trigger_id])


def _note_streamed(
    connection: Connection,
    events: Sequence[NewEvent],
    outcomes: Sequence[StoreOutcome],
    streams: Collection[int],
    context: CallContext,
    max_undelivered: int,
) -> list[StoreOutcome]:
    """Have tasks take the new events of their streams; return the outcomes with the numbers of undelivered events."""
    endings: dict[int, tuple[int, str]] = {}
    for event, outcome in zip(events, outcomes, strict=True):
        if event.ending is not None and event.trigger_id in streams and isinstance(outcome, EventStored):
            endings.setdefault(event.trigger_id, (outcome.sequence_index, event.ending))
    for number in note_endings(connection, endings, context):
        finish_stream(connection, number, None, context)
    undelivered = note_events(connection, streams, context, max_undelivered)
    return [
        EventStored(outcome.sequence_index, undelivered[event.trigger_id])
        if isinstance(outcome, EventStored) and event.trigger_id in undelivered
        else outcome
        for event, outcome in zip(events, outcomes, strict=True)
    ]


def _build_input(epoch: int, event: NewEvent) -> TriggerFired | TriggerEnded:
    request = f"trigger-{event.trigger_id}"
    if event.ending is None:
        return TriggerFired(epoch, event.payload, request)
    said = _read_ending(event.ending)
    fault = find_fault(said.xcoms)
    if fault is not None:
        return TriggerEnded(epoch, Failure(fault, may_retry=False), (), draw_bits(), request)
    ending: Success | Failure | Skip = Success() if said.state == "success" else Skip()
    if said.state == "failed":
        error = said.error.strip() or "the trigger fired a TaskFailedEvent"
        ending = Failure(make_storable(f"TaskDeferralError: {error}") or "")
    return TriggerEnded(epoch, ending, said.xcoms, draw_bits(), request)


def _build_outcome(outcome: StoreOutcome) -> EventOutcome:
    match outcome:
        case EventStored(index, undelivered):
            return EventOutcome(EventOutcomeKind.STORED, index, undelivered)
        case Duplicate(index):
            return EventOutcome(EventOutcomeKind.DUPLICATE, index)
        case _:
            return EventOutcome(_KINDS[outcome.reason])


def fail_trigger(connection: Connection, request: FailTrigger, context: CallContext) -> OutcomeKind:
    """Fail the task of a trigger that raised or ended without an event; see `FailTrigger`."""
    check_session(connection, request.session)
    rows = find_trigger_tasks(connection, [request.trigger])
    if not rows:
        return OutcomeKind.REFUSED
    row = rows[request.trigger]
    if row.streams is not None:
        return end_stream(
            connection, EndStream(request.session, request.trigger, request.token, request.error), context
        )
    error = make_storable(request.error) or ""
    given = TriggerFailed(row.epoch, error, draw_bits(), f"trigger-{request.trigger}-{request.token}")
    board = Board(connection, context)
    board.lock([row.task_id])
    token = connection.execute(select(_CURSOR.token).where(_CURSOR.trigger_id == request.trigger)).scalar_one()
    if token != request.token:
        note_cleaned_up(connection, request.session, [request.trigger], context, [request.trigger])
        return _recognise(connection, row, given)
    answers = board.give_all([(row.task_id, given)], "trigger")
    close_board(board)
    connection.execute(update(trigger).where(_TRIGGER.id == request.trigger).values(error=error))
    return name_answer(answers[0])


def _recognise(connection: Connection, row: Row[Any], given: TriggerFailed) -> OutcomeKind:
    """Distinguish a repeated report from a late one: stopping the trigger has raised its token once."""
    from tidemill.store.queries.dags.state.journal import find_left

    left = find_left(connection, [(row.task_id, row.epoch)]).get((row.task_id, row.epoch))
    return OutcomeKind.ALREADY if left == identify(given) else OutcomeKind.FENCED


def release_triggers(connection: Connection, request: ReleaseTriggers, context: CallContext) -> int:
    """Release triggers; see `ReleaseTriggers`."""
    if not is_session_live(connection, request.session):
        return 0  # its end releases everything
    held = dict(request.triggers)
    _end_waits(connection, request.session, held, context)
    rows = _fetch_held(connection, held)
    mine = [row.trigger_id for row in rows if row.session_id == request.session and row.token == held[row.trigger_id]]
    free_triggers(connection, mine, [request.session], context, moves=request.moves)
    # Read once the cursors are locked: until then a user may have stopped some of them.
    settle_kills(connection, request.session, held, set(request.killed), context)
    return len(mine)


def note_cleaned_up(
    connection: Connection,
    number: int,
    triggers: Collection[int],
    context: CallContext,
    killed: Collection[int] = (),
) -> None:
    """Unblock tasks that a user cleared or marked and that waited until the service stopped these triggers.

    Args:
        connection: A connection inside a transaction.
        number: The session.
        triggers: The triggers, which the session has stopped.
        context: The transaction's context.
        killed: Those whose `on_kill` was called or is not needed; another session calls it for the others.
    """
    _end_waits(connection, number, triggers, context)
    settle_kills(connection, number, triggers, set(killed), context)


def _end_waits(connection: Connection, number: int, triggers: Collection[int], context: CallContext) -> None:
    """Unblock the tasks that waited for a session to stop triggers."""
    newer = trigger.alias("newer")
    last = ~exists(select(newer.c.id).where(and_(newer.c.task_id == _TRIGGER.task_id, newer.c.epoch > _TRIGGER.epoch)))
    dialect = find_dialect(connection)
    wanted = and_(_TRIGGER.id.in_(select(IDS.build_source(dialect).c.id)), last)
    mine = or_(_TASK.session_id == number, _TASK.ending_triggerer == number)
    waiting = and_(mine, _TASK.state == literal_column("'ending'"))
    statement = select(_TASK.id).join(trigger, _TRIGGER.task_id == _TASK.id).where(and_(wanted, waiting))
    found = connection.execute(statement, IDS.build_parameters(dialect, build_id_rows(triggers))).scalars().all()
    end_cleanups(connection, found, number, context, f"triggerer {number}")


def find_stopped(connection: Connection, request: HeldTriggers, context: CallContext) -> tuple[StoppedTrigger, ...]:
    """Return the triggers that a service must stop, with the reasons; see `HeldTriggers`."""
    dialect = find_dialect(connection)
    given = _HELD.build_parameters(dialect, request.held) | {"holder": request.session}
    lost = _lost.fetch(connection, given)
    if not lost:
        return ()
    rows = {row.trigger_id: row for row in _fetch_held(connection, dict(lost))}
    live = and_(service_session.c.id == request.session, service_session.c.ended_us.is_(None))
    is_live = connection.execute(select(service_session.c.id).where(live)).first() is not None
    stopped = []
    for number, token in lost:
        row = rows.get(number)
        # A token that has risen further belongs to a later claim, whose owner is told the reason. What an ended session
        # was stopping is left to another one.
        is_own = is_live and row is not None and row.token == token + 1
        is_over = row is not None and row.state not in (_RUNNING, TriggerState.REGISTERED.value)
        reason = row.reason if row is not None and is_own and is_over else None
        stopped.append(StoppedTrigger(number, token, reason or "hand-over"))
    return tuple(stopped)


@Statement
def _lost(dialect: str) -> Select[Any]:
    """Select those of the given claims that a session does not have any more; almost always there are none."""
    given = _HELD.build_source(dialect)
    # The `+ 0` keeps the index of sessions from being scanned once per claim, however few triggers a session seems to
    # have.
    holder = (_CURSOR.session_id + 0) == bindparam("holder", type_=BigInteger)
    has = and_(_CURSOR.trigger_id == given.c.id, _CURSOR.token == given.c.token, holder)
    return (
        select(given.c.id, given.c.token)
        .where(~exists(select(_CURSOR.trigger_id).where(has).correlate(given)))
        .order_by(given.c.position)
    )


def _fetch_held(connection: Connection, held: Collection[int]) -> Sequence[Row[Any]]:
    dialect = find_dialect(connection)
    statement: Select[Any] = (
        select(_CURSOR.trigger_id, _CURSOR.session_id, _CURSOR.token, _TRIGGER.state, _TRIGGER.reason)
        .join(trigger, _TRIGGER.id == _CURSOR.trigger_id)
        .where(_CURSOR.trigger_id.in_(select(IDS.build_source(dialect).c.id)))
    )
    return connection.execute(statement, IDS.build_parameters(dialect, build_id_rows(held))).all()
