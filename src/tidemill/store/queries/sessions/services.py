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
    insert,
    or_,
    select,
    union,
    update,
)

from tidemill.core.tasks.attempt import MAX_LOST
from tidemill.core.tasks.inputs import Channel, Input, Lost, Returned
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.batches import find_dialect
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.service_calls import (
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
from tidemill.store.queries.dags.effects import ON_KILL
from tidemill.store.queries.dags.tasks import draw_bits, move_all_held
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
    if request.request:
        begun = connection.execute(select(_SESSION.id).where(_SESSION.request == request.request)).scalar()
        if begun is not None:
            return int(begun)
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
    return int(connection.execute(insert(service_session).values(values).returning(_SESSION.id)).scalar_one())


def beat_service_session(connection: Connection, request: BeatSession, context: CallContext) -> bool:
    """Record a heartbeat; see `BeatSession`."""
    held = request.measures.get("triggers")
    return beat_session(connection, request.session, context.now_us, held=None if held is None else int(held))


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
    release_held(connection, [request.session, *ended], context, is_clean=isinstance(request, EndSession))
    return True


def release_left(connection: Connection, request: ReleaseLeft, context: CallContext) -> int:
    """Release a part of what ended sessions still hold; see `ReleaseLeft`."""
    forget_deaths(connection, context.now_us)
    live = select(_SESSION.id).where(_SESSION.ended_us.is_(None))
    states = (TaskState.RUNNING.value, TaskState.ENDING.value)
    task, cursor, callback = _TASK.session_id, trigger_cursor.c.session_id, task_callback.c.session_id
    # `> 0` makes both databases search the indexes of what sessions hold.
    of_tasks = select(task).where(and_(task > 0, task.not_in(live), _TASK.state.in_(states)))
    running = task_callback.c.state == "running"
    of_callbacks = select(callback).where(and_(callback > 0, callback.not_in(live), running))
    joined = select(cursor).join(trigger, trigger.c.id == trigger_cursor.c.trigger_id)
    of_triggers = joined.where(and_(cursor > 0, cursor.not_in(live), trigger.c.task_id.is_not(None)))
    found = connection.execute(union(of_tasks, of_callbacks, of_triggers).limit(_LEFT)).scalars().all()
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
    statement = select(service_session).where(_SESSION.ended_us.is_(None)).order_by(_SESSION.id)
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
            row.beat_us,
            context.now_us - row.beat_us,
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
    connection: Connection, sessions: Sequence[int], context: CallContext, *, is_clean: bool = False
) -> int:
    """Release what ended sessions hold, but at most `PART` triggers; return how much was released.

    Everything of one kind is released at once, because transactions lock all runs before all cursors.

    Args:
        connection: A connection inside a transaction.
        sessions: The sessions.
        context: The transaction's context.
        is_clean: Whether they have ended cleanly. A session that had been told to stop counts as such.
    """
    if not sessions:
        return 0
    rows = connection.execute(select(service_session).where(_SESSION.id.in_(sessions))).all()
    clean = {row.id for row in rows if is_clean or row.stopping}
    count = _lose_tasks(connection, sessions, clean, context)
    held = and_(task_callback.c.session_id.in_(sessions), task_callback.c.state == "running")
    count += connection.execute(update(task_callback).where(held).values(build_lost_callback(context.now_us))).rowcount
    context.bells |= {Channel.WORKER, Channel.TRIGGERER}
    statement = (
        select(trigger_cursor.c.trigger_id, trigger_cursor.c.session_id, trigger_cursor.c.claim_request)
        .join(trigger, trigger_cursor.c.trigger_id == trigger.c.id)
        .where(and_(trigger_cursor.c.session_id.in_(sessions), trigger.c.task_id.is_not(None)))
        .order_by(trigger_cursor.c.trigger_id)
        .limit(PART)
    )
    triggers = connection.execute(statement).all()
    count_deaths(
        connection,
        [
            LostSession(row.id, row.parent, bool(row.trial), max(0, row.beat_us - row.started_us))
            for row in rows
            if row.lost
        ],
        [HeldTrigger(*one) for one in triggers],
        context.now_us,
    )
    free_triggers(connection, [one.trigger_id for one in triggers], sessions, context)
    return count + len(triggers)


def _lose_tasks(connection: Connection, sessions: Sequence[int], clean: Collection[int], context: CallContext) -> int:
    states = (TaskState.RUNNING.value, TaskState.ENDING.value)
    held = and_(_TASK.session_id.in_(sessions), _TASK.state.in_(states))
    cleaning_up = select(_TASK.run, _TASK.id).where(_TASK.ending_triggerer.in_(sessions))
    rows = connection.execute(union(select(_TASK.run, _TASK.id).where(held), cleaning_up)).all()
    given = [(row.run, row.id) for row in rows]
    builds = {number: (_build_loss(number, is_clean=number in clean), f"service {number}") for number in sessions}
    return work_on_runs(connection, context, given, lambda tasks: move_all_held(connection, tasks, builds, context))


def _build_loss(number: int, *, is_clean: bool) -> Callable[[int], Input]:
    def build(epoch: int) -> Lost | Returned:
        return Returned(epoch, f"s{number}") if is_clean else Lost(epoch, draw_bits(), f"s{number}")

    return build


def build_lost_callback(now_us: int) -> dict[str, object]:
    """Return the update of a callback whose worker was lost: run it again, up to MAX_LOST times."""
    lost = task_callback.c.lost
    hopeless = lost >= MAX_LOST
    due = case((task_callback.c.name == ON_KILL, "kill"), else_="due")
    return {
        "state": case((hopeless, "failed"), else_=due),
        "error": case((hopeless, f"its service was lost {MAX_LOST + 1} times"), else_=None),
        "ended_us": case((hopeless, now_us), else_=None),
        "lost": lost + 1,
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
