"""Service sessions: start, heartbeat, end. Ending a session releases everything it holds in the same transaction.

Invariants: an ended session never becomes live again. An attempt whose worker session has ended is lost; a trigger
whose triggerer session has ended is claimed by another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    case,
    func,
    or_,
    select,
    union,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.errors import InvariantError
from tidemill.core.tasks.attempt import MAX_LOST
from tidemill.core.tasks.inputs import Channel, Input, Lost, Returned
from tidemill.core.tasks.task_row import TaskState
from tidemill.core.triggers.lost_hosts import KILL_LOSSES
from tidemill.store.batches import find_dialect
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.service_calls import (
    OWN_CLOCK,
    PART,
    BeatSession,
    BeginSession,
    DescribeServices,
    EndSession,
    ListSessions,
    LoseOtherSessions,
    LoseSession,
    ReleaseLeft,
    ServiceRecord,
    ServiceSession,
    StopSession,
)
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import task_callback, task_instance
from tidemill.store.queries.dags.state.effects import ON_KILL
from tidemill.store.queries.dags.state.tasks import draw_bits, move_all_held
from tidemill.store.queries.isolation import work_on_runs
from tidemill.store.queries.sessions.deaths import HeldTrigger, LostSession, count_deaths, forget_deaths
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows, lock_cursors
from tidemill.store.queries.triggers.sessions import (
    beat_session,
    end_session,
    is_session_live,
    note_session,
    select_session,
)
from tidemill.store.records import TriggerState
from tidemill.store.statements import Statement
from tidemill.store.tables import service_session, trigger, trigger_cursor

_SESSION, _TASK = service_session.c, task_instance.c
#: The maximum number of ended sessions whose work one call releases.
_LEFT = 20
#: A prime: the remainders of ids are in another order for each seed.
_SPREAD = 10007

#: The advisory lock for starting a `dev` session ("tidemdev" in ASCII).
_DEV_KEY = int.from_bytes(b"tidemdev", "big")


@Statement
def _lock_session(dialect: str) -> Select[Any]:
    live = and_(_SESSION.id == bindparam("number"), _SESSION.ended_us.is_(None))
    return select_session(dialect).where(live).with_for_update(key_share=True)


def begin_service_session(connection: Connection, request: BeginSession, context: CallContext) -> int:
    """Start a session; see `BeginSession`.

    Sessions of kind `dev` start one after another, so that the one with the higher id sees the one with the lower id.
    """
    if (begun := _find_begun(connection, request)) is not None:
        return begun
    if request.kind == "dev" and find_dialect(connection) == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_DEV_KEY)))
    if request.parent is not None:
        check_session(connection, request.parent)
    values = {
        "kind": request.kind,
        "name": request.name,
        "host": request.host,
        "boot_id": request.boot_id,
        "pid": request.pid,
        "queues": json.dumps(request.queues),
        "capacity": request.capacity,
        "parent": request.parent,
        "version": request.version,
        "list": "",
        "lock": request.lock,
        "digest": "",
        "started_us": context.now_us,
        "beat_us": context.now_us,
        "request": request.request or None,
        "trial": int(request.trial),
    }
    dialect = find_dialect(connection)
    insertion: Any = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(service_session).values(values)
    # The first request, whose answer was lost, may still be running; then the insertion waits for its end.
    number = connection.execute(insertion.on_conflict_do_nothing().returning(_SESSION.id)).scalar()
    begun = _find_begun(connection, request) if number is None else int(number)
    if begun is None:
        raise InvariantError("a session was neither begun nor found")
    return begun


def _find_begun(connection: Connection, request: BeginSession) -> int | None:
    """Return the session that an earlier call with the same request has begun."""
    if not request.request:
        return None
    begun = connection.execute(select(_SESSION.id).where(_SESSION.request == request.request)).scalar()
    return None if begun is None else int(begun)


def beat_service_session(connection: Connection, request: BeatSession, context: CallContext) -> int:
    """Record a heartbeat; see `BeatSession`."""
    held = request.measures.get("triggers")
    number = None if held is None else int(held)
    if not beat_session(connection, request.session, context.now_us, held=number):
        return 0
    return context.now_us if find_dialect(connection) == "postgresql" else OWN_CLOCK


def check_session(connection: Connection, number: int, context: CallContext | None = None) -> None:
    """Ensure that a session stays live until the transaction ends; with a context, read its time at once.

    Raises:
        CallRefusedError: The session has ended.
    """
    if not is_session_live(connection, number, context):
        raise CallRefusedError(RefusalKind.FENCED, f"session {number} has ended; the service must start a new one")


def lock_session(connection: Connection, number: int, context: CallContext | None = None) -> None:
    """Ensure that a session stays live, and lock out its other requests, until the transaction ends.

    With a context, its time is read by the same statement.

    A repeated request therefore waits while the first one is being answered, and gets the same answer.

    Raises:
        CallRefusedError: The session has ended.
    """
    if not note_session(_lock_session.fetch(connection, {"number": number}), context):
        raise CallRefusedError(RefusalKind.FENCED, f"session {number} has ended; the service must start a new one")


def note_stopping(connection: Connection, request: StopSession, context: CallContext) -> bool:
    """Record that a service stops in order; see `StopSession`."""
    mine = or_(_SESSION.id == request.session, _SESSION.parent == request.session)
    live = and_(mine, _SESSION.ended_us.is_(None))
    return connection.execute(update(service_session).where(live).values(stopping=1)).rowcount > 0


def end_service_session(connection: Connection, request: EndSession | LoseSession, context: CallContext) -> bool:
    """End a session and release what it holds; see `EndSession` and `LoseSession`."""
    by = request.by if isinstance(request, LoseSession) else None
    beat = request.beat if isinstance(request, LoseSession) else None
    is_death = isinstance(request, LoseSession) and request.is_death
    if not end_session(connection, request.session, context.now_us, by, beat, is_death=is_death):
        return False
    # No child begins from now on: it would lock its parent's session first.
    children = and_(_SESSION.parent == request.session, _SESSION.ended_us.is_(None))
    found = connection.execute(select(_SESSION.id).where(children).order_by(_SESSION.id)).scalars().all()
    # Lock services before tasks, as everywhere.
    ended = [number for number in found if end_session(connection, number, context.now_us, by, is_death=is_death)]
    given = [request.session, *ended]
    release_held(connection, given, context, is_clean=isinstance(request, EndSession), is_first=True)
    return True


def release_left(connection: Connection, request: ReleaseLeft, context: CallContext) -> int:
    """Release a part of what ended sessions still hold; see `ReleaseLeft`."""
    forget_deaths(connection, context.now_us)
    live = select(_SESSION.id).where(_SESSION.ended_us.is_(None))
    states = (TaskState.RUNNING.value, TaskState.ENDING.value)
    task, cursor, callback = _TASK.session_id, trigger_cursor.c.session_id, task_callback.c.session_id
    # `> 0` makes both databases search the indexes of what sessions hold.
    of_tasks = select(task).where(and_(task > 0, task.not_in(live), _TASK.state.in_(states)))
    cleaner = _TASK.ending_triggerer
    of_cleanups = select(cleaner).where(and_(cleaner > 0, cleaner.not_in(live)))
    running = task_callback.c.state == "running"
    of_callbacks = select(callback).where(and_(callback > 0, callback.not_in(live), running))
    joined = select(cursor).join(trigger, trigger.c.id == trigger_cursor.c.trigger_id)
    of_triggers = joined.where(and_(cursor > 0, cursor.not_in(live), trigger.c.task_id.is_not(None)))
    holders = union(of_tasks, of_cleanups, of_callbacks, of_triggers).subquery()
    number = holders.c[0]
    # In another order each time, so that sessions that keep tasks of broken runs do not hide others.
    order = (number * 7919 + context.now_us % _SPREAD) % _SPREAD
    found = connection.execute(select(number).order_by(order, number).limit(_LEFT)).scalars().all()
    return release_held(connection, sorted(found), context) if found else 0


def lose_other_sessions(connection: Connection, request: LoseOtherSessions, context: CallContext) -> tuple[int, ...]:
    """End all live sessions except the given ones; see `LoseOtherSessions`."""
    # Hosts of trigger lists may share the server with DAGs; they detect each other's death themselves.
    wanted: list[ColumnElement[bool]] = [
        _SESSION.ended_us.is_(None),
        _SESSION.id.not_in(request.keep),
        _SESSION.list == "",
    ]
    found = connection.execute(select(_SESSION.id).where(and_(*wanted)).order_by(_SESSION.id)).scalars().all()
    # Lock services before tasks, as everywhere.
    ended = tuple(number for number in found if end_session(connection, number, context.now_us, None))
    release_held(connection, ended, context)
    return ended


def list_sessions(connection: Connection, request: ListSessions, context: CallContext) -> tuple[ServiceSession, ...]:
    """Return the live sessions; see `ListSessions`."""
    # A part of a process sends no heartbeats of its own.
    parent = service_session.alias("parent")
    is_part = and_(parent.c.id == _SESSION.parent, parent.c.pid == _SESSION.pid, parent.c.beat_us > _SESSION.beat_us)
    heard = func.coalesce(parent.c.beat_us, _SESSION.beat_us).label("heard_us")
    joined = select(service_session, heard).outerjoin(parent, is_part)
    statement = joined.where(_SESSION.ended_us.is_(None)).order_by(_SESSION.id)
    if request.kind:
        statement = statement.where(_SESSION.kind == request.kind)
    return tuple(
        ServiceSession(
            row.id,
            row.kind,
            row.name,
            row.host,
            row.boot_id,
            row.pid,
            tuple(json.loads(row.queues)),
            row.capacity,
            row.beat,
            row.started_us,
            row.heard_us,
            context.now_us - row.heard_us,
            row.parent,
            row.version,
            row.list,
            row.lock,
        )
        for row in connection.execute(statement)
    )


def describe_services(
    connection: Connection, request: DescribeServices, context: CallContext
) -> tuple[ServiceRecord, ...]:
    """Return the live sessions with what they hold; see `DescribeServices`."""
    running = and_(_TASK.session_id == _SESSION.id, _TASK.state.in_((TaskState.RUNNING.value, TaskState.ENDING.value)))
    tasks = select(func.count()).where(running).scalar_subquery()
    triggers = select(func.count()).where(trigger_cursor.c.session_id == _SESSION.id).scalar_subquery()
    live = and_(_SESSION.ended_us.is_(None), _SESSION.list == "")
    held = dict(connection.execute(select(_SESSION.id, tasks + triggers).where(live)).all())
    sessions = list_sessions(connection, ListSessions(), context)
    return tuple(ServiceRecord(one, held[one.id]) for one in sessions if one.id in held)


def release_held(
    connection: Connection,
    sessions: Sequence[int],
    context: CallContext,
    *,
    is_clean: bool = False,
    is_first: bool = False,
) -> int:
    """Release what ended sessions hold, but at most `PART` tasks and as many triggers; return how much was released.

    Everything of one kind is released at once, because transactions lock all runs before all cursors.

    Args:
        connection: A connection inside a transaction.
        sessions: The sessions.
        context: The transaction's context.
        is_clean: Whether they have ended cleanly. A session that had been told to stop counts as such.
        is_first: Whether this transaction has ended a service with all that it supervised, of which nothing has been
            released before. Only then it is known which triggers were tried alone.
    """
    if not sessions:
        return 0
    rows = connection.execute(select(service_session).where(_SESSION.id.in_(sessions))).all()
    clean = {row.id for row in rows if is_clean or row.stopping}
    count = _lose_tasks(connection, sessions, clean, context)
    count += _lose_callbacks(connection, sessions, clean, context)
    context.bells |= {Channel.WORKER, Channel.TRIGGERER}
    trials = [row.id for row in rows if row.trial]
    triggers = _lock_held(connection, sessions, trials)
    count_deaths(
        connection,
        [
            LostSession(row.id, row.parent, bool(row.trial and is_first), row.started_us, row.beat_us)
            for row in rows
            if row.lost
        ],
        triggers,
        context.now_us,
    )
    free_triggers(connection, [one.id for one in triggers], sessions, context)
    return count + len(triggers)


def _lock_held(connection: Connection, sessions: Sequence[int], trials: Collection[int]) -> list[HeldTrigger]:
    """Lock up to `PART` triggers that sessions own, those of trials before the others."""
    columns = (trigger_cursor.c.trigger_id, trigger_cursor.c.session_id, trigger_cursor.c.claim_request)
    owned = trigger_cursor.c.session_id.in_(sessions)
    of_trial = case((trigger_cursor.c.session_id.in_(trials), 0), else_=1)
    order = [of_trial] if trials else []
    statement = (
        select(trigger_cursor.c.trigger_id, trigger.c.changed_us)
        .join(trigger, trigger_cursor.c.trigger_id == trigger.c.id)
        .where(and_(owned, trigger.c.task_id.is_not(None)))
        .order_by(*order, trigger_cursor.c.trigger_id)
        .limit(PART)
    )
    since = {row.trigger_id: row.changed_us for row in connection.execute(statement)}
    if not since:
        return []
    dialect = find_dialect(connection)
    wanted = trigger_cursor.c.trigger_id.in_(select(IDS.build_source(dialect).c.id))
    # Another service may release the same triggers at this moment: its transaction counts their deaths. The `+ 0` keeps
    # SQLite from reading all triggers of the sessions.
    owned = (trigger_cursor.c.session_id + 0).in_(sessions)
    still = select(*columns).where(and_(wanted, owned)).order_by(trigger_cursor.c.trigger_id)
    locked = still.with_for_update(of=trigger_cursor, key_share=True)
    rows = connection.execute(locked, IDS.build_parameters(dialect, build_id_rows(since)))
    return [HeldTrigger(*row, since[row[0]]) for row in rows]


def _lose_tasks(connection: Connection, sessions: Sequence[int], clean: Collection[int], context: CallContext) -> int:
    states = (TaskState.RUNNING.value, TaskState.ENDING.value)
    held = and_(_TASK.session_id.in_(sessions), _TASK.state.in_(states))
    cleaning_up = select(_TASK.run, _TASK.id).where(_TASK.ending_triggerer.in_(sessions))
    # A user may have stopped all tasks of a large triggerer just before it was lost.
    rows = connection.execute(union(select(_TASK.run, _TASK.id).where(held), cleaning_up).limit(PART)).all()
    given = [(row.run, row.id) for row in rows]
    builds = {number: (_build_loss(number, is_clean=number in clean), f"service {number}") for number in sessions}
    return work_on_runs(connection, context, given, lambda tasks: move_all_held(connection, tasks, builds, context))


def _build_loss(number: int, *, is_clean: bool) -> Callable[[int], Input]:
    def build(epoch: int) -> Lost | Returned:
        return Returned(epoch, f"s{number}") if is_clean else Lost(epoch, draw_bits(), f"s{number}")

    return build


def _lose_callbacks(
    connection: Connection, sessions: Sequence[int], clean: Collection[int], context: CallContext
) -> int:
    count = 0
    for numbers, values in (
        ([one for one in sessions if one in clean], build_returned_callback()),
        ([one for one in sessions if one not in clean], build_lost_callback(context.now_us)),
    ):
        if numbers:
            held = and_(task_callback.c.session_id.in_(numbers), task_callback.c.state == "running")
            count += connection.execute(update(task_callback).where(held).values(values)).rowcount
    return count


def build_returned_callback() -> dict[str, object]:
    """Return the update of a callback whose worker was told to stop: run it again."""
    due = case((task_callback.c.name == ON_KILL, "kill"), else_="due")
    return {"state": due, "session_id": None, "claim_request": None}


def build_lost_callback(now_us: int) -> dict[str, object]:
    """Return the update of a callback whose service was lost: run it again, up to a number of losses."""
    is_kill = task_callback.c.name == ON_KILL
    lost = task_callback.c.lost + 1
    most = case((is_kill, KILL_LOSSES - 1), else_=MAX_LOST)
    said = case(
        (is_kill, f"its triggerer was lost {KILL_LOSSES} times while it called on_kill; nothing calls it any more"),
        else_=f"its service was lost {MAX_LOST + 1} times",
    )
    return {
        "state": case((lost > most, "failed"), (is_kill, "kill"), else_="due"),
        "error": case((lost > most, said), else_=None),
        "ended_us": case((lost > most, now_us), else_=None),
        "lost": lost,
        "session_id": None,
        "claim_request": None,
    }


def free_triggers(
    connection: Connection, ids: list[int], owners: Collection[int], context: CallContext, *, moves: bool = False
) -> None:
    """Release task triggers for other triggerers; the new tokens fence off their owner.

    Args:
        connection: A connection inside a transaction.
        ids: The triggers.
        owners: The sessions that own them; triggers that another session has claimed in the meantime stay as they are.
        context: The transaction's context.
        moves: Whether their triggerer hands them over to another one, which it does not do again at once.
    """
    if not ids:
        return
    lock_cursors(connection, ids)
    dialect = find_dialect(connection)
    wanted = select(IDS.build_source(dialect).c.id)
    given = IDS.build_parameters(dialect, build_id_rows(ids))
    # The `+ 0` keeps SQLite from reading all triggers of the session.
    owned = and_(trigger_cursor.c.trigger_id.in_(wanted), (trigger_cursor.c.session_id + 0).in_(owners))
    new: dict[str, Any] = {"session_id": None, "claim_request": None, "token": trigger_cursor.c.token + 1}
    if moves:
        new["moved_us"] = context.now_us
    freeing = update(trigger_cursor).where(owned).values(new).returning(trigger_cursor.c.trigger_id)
    given = IDS.build_parameters(dialect, build_id_rows(list(connection.execute(freeing, given).scalars())))
    running = and_(trigger.c.id.in_(wanted), trigger.c.state == TriggerState.RUNNING.value)
    state = {"state": TriggerState.REGISTERED.value, "changed_us": context.now_us}
    connection.execute(update(trigger).where(running).values(state), given)
    context.bells.add(Channel.TRIGGERER)
