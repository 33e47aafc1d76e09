"""Gives triggers that may have killed their hosts to trials, and fails those that have; see `core.triggers.lost_hosts`.

Invariants: a suspect is claimed only for a trial, and by one session at a time. A stream with a suspect is read by no
other session, unless it already was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import structlog
from sqlalchemy import ColumnElement, Connection, Row, Select, and_, exists, literal_column, not_, or_, select, update

from tidemill.core.tasks.inputs import TriggerFailed
from tidemill.core.triggers.lost_hosts import (
    CULPRIT_LOSSES,
    FORGET_US,
    SUSPECT_LOSSES,
    FreeSuspect,
    choose_trial,
    compute_least_wait,
)
from tidemill.store.batches import find_dialect
from tidemill.store.calls.stream_calls import EndStream
from tidemill.store.calls.trigger_calls import FindSuspects, FoundSuspects, TakenSuspects, TakeSuspects
from tidemill.store.context import CallContext
from tidemill.store.queries.dags.state.tasks import draw_bits, move_tasks
from tidemill.store.queries.sessions.kills import has_fatal_kills
from tidemill.store.queries.sessions.services import check_session
from tidemill.store.queries.sessions.stream_ends import end_stream
from tidemill.store.queries.sessions.stream_locks import try_lock_streams
from tidemill.store.queries.sessions.unreadable_triggers import find_unreadable
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.records import TriggerState
from tidemill.store.tables import trigger, trigger_cursor, trigger_death, trigger_stream

log = structlog.get_logger(__name__)

_TRIGGER, _CURSOR, _DEATH = trigger.c, trigger_cursor.c, trigger_death.c
_reader = trigger.alias("reader")
#: The number of suspects that a call looks at.
_SUSPECTS = 20_000
#: A literal, so that the partial index of suspects applies.
_LOSSES: ColumnElement[int] = literal_column(str(SUSPECT_LOSSES))


def is_suspect(now_us: int) -> ColumnElement[bool]:
    """Return the condition on `trigger_death` that makes a trigger a suspect."""
    return and_(_DEATH.deaths >= _LOSSES, _DEATH.at_us >= now_us - FORGET_US)


def find_suspects(connection: Connection, request: FindSuspects, context: CallContext) -> FoundSuspects:
    """Return what waits for a trial; see `FindSuspects`."""
    latest_us = context.now_us - round(compute_least_wait(request.beside) * 1e6)
    waiting = _build_free(request.queues, context.now_us).where(_TRIGGER.changed_us <= latest_us)
    is_found = connection.execute(waiting.limit(1)).first() is not None
    return FoundSuspects(is_found, has_fatal_kills(connection, request.queues, context))


def take_suspects(connection: Connection, request: TakeSuspects, context: CallContext) -> TakenSuspects:
    """Reserve suspects for a trial; see `TakeSuspects`."""
    check_session(connection, request.session)
    free = _build_free(request.queues, context.now_us)
    _fail_culprits(connection, free, request.session, context)
    # A culprit that could not be failed yet is not tried again.
    free = free.where(_DEATH.alone < CULPRIT_LOSSES)
    # By streams, so that the limit divides only the last one.
    ordered = free.order_by(_TRIGGER.stream_key, _CURSOR.trigger_id).limit(_SUSPECTS)
    found = connection.execute(ordered.with_for_update(of=trigger_cursor, skip_locked=True)).all()
    unreadable = set(find_unreadable(found, context))
    rows = [row for row in _drop_divided(found) if row.id not in unreadable]
    streams = try_lock_streams(connection, {row.stream_key for row in rows if row.stream_key is not None})
    free_streams = set(streams) - _find_read(connection, streams)
    suspects = [
        FreeSuspect(row.id, row.deaths, row.lived_us, row.stream_key, context.now_us - row.changed_us)
        for row in rows
        if row.stream_key is None or row.stream_key in free_streams
    ]
    suspects += _lock_others(connection, request, free_streams, [one.id for one in suspects], context)
    plan = choose_trial(suspects, request.most, beside=request.beside)
    if plan is None:
        return TakenSuspects()
    dialect = find_dialect(connection)
    given = IDS.build_parameters(dialect, build_id_rows(plan.triggers))
    wanted = select(IDS.build_source(dialect).c.id)
    # Read again now that the cursors are locked: users may have stopped some in the meantime.
    still = and_(_TRIGGER.id.in_(wanted), _TRIGGER.state == literal_column("'registered'"))
    taken = tuple(connection.execute(select(_TRIGGER.id).where(still).order_by(_TRIGGER.id), given).scalars())
    given = IDS.build_parameters(dialect, build_id_rows(taken))
    new = {"session_id": request.session, "claim_request": None, "token": _CURSOR.token + 1}
    connection.execute(update(trigger_cursor).where(_CURSOR.trigger_id.in_(wanted)).values(new), given)
    state = {"state": TriggerState.RUNNING.value, "reason": None, "changed_us": context.now_us}
    connection.execute(update(trigger).where(_TRIGGER.id.in_(wanted)).values(state), given)
    return TakenSuspects(taken, plan.seconds, plan.deaths, plan.is_split)


def _drop_divided(rows: Sequence[Row[Any]]) -> Sequence[Row[Any]]:
    """Leave out the last stream if the limit has cut it off: a trial of a part of it would acknowledge what the other
    part has not seen.
    """
    if len(rows) < _SUSPECTS or rows[-1].stream_key == rows[0].stream_key:
        return rows
    return [row for row in rows if row.stream_key is None or row.stream_key != rows[-1].stream_key]


def _lock_others(
    connection: Connection,
    request: TakeSuspects,
    streams: Collection[str],
    suspects: Collection[int],
    context: CallContext,
) -> list[FreeSuspect]:
    """Lock and return the free triggers of the streams that are not suspects."""
    if not streams:
        return []
    now_us = context.now_us
    free = and_(
        _TRIGGER.task_id.is_not(None),
        _TRIGGER.stream_key.in_(sorted(streams)),
        _TRIGGER.state == literal_column("'registered'"),
        _TRIGGER.queue.in_(request.queues),
        (_CURSOR.session_id + 0).is_(None),
        or_(_DEATH.trigger_id.is_(None), not_(is_suspect(now_us))),
    )
    statement: Select[Any] = (
        select(_TRIGGER.id, _TRIGGER.kwargs, _TRIGGER.stream_key, _TRIGGER.changed_us, _DEATH.deaths, _DEATH.lived_us)
        .join(trigger_cursor, _CURSOR.trigger_id == _TRIGGER.id)
        .join(trigger_death, _DEATH.trigger_id == _TRIGGER.id, isouter=True)
        .where(free)
        .order_by(_TRIGGER.id)
        .limit(_SUSPECTS)
        .with_for_update(of=trigger_cursor, skip_locked=True)
    )
    rows = connection.execute(statement).all()
    skip = {*suspects, *find_unreadable(rows, context)}
    return [
        FreeSuspect(
            row.id, min(row.deaths or 0, SUSPECT_LOSSES - 1), row.lived_us or 0, row.stream_key, now_us - row.changed_us
        )
        for row in rows
        if row.id not in skip
    ]


def _build_free(queues: Collection[str], now_us: int) -> Select[Any]:
    free = and_(
        is_suspect(now_us),
        # The `+ 0` keeps SQLite from starting with the index of all unclaimed triggers, most of which have ended.
        (_CURSOR.session_id + 0).is_(None),
        _TRIGGER.state == TriggerState.REGISTERED.value,
        _TRIGGER.queue.in_(queues),
        # Its stream is read by no session.
        or_(
            _TRIGGER.stream_key.is_(None),
            ~exists(
                select(_reader.c.id).where(
                    and_(_reader.c.stream_key == _TRIGGER.stream_key, _reader.c.state == literal_column("'running'"))
                )
            ),
        ),
    )
    return (
        select(
            _TRIGGER.id,
            _TRIGGER.kwargs,
            _DEATH.deaths,
            _DEATH.alone,
            _DEATH.lived_us,
            _TRIGGER.changed_us,
            _CURSOR.token,
            _TRIGGER.stream_key,
            _TRIGGER.task_id,
            _TRIGGER.epoch,
            trigger_stream.c.trigger_id.label("streams"),
        )
        .select_from(trigger_death)
        .join(trigger_stream, trigger_stream.c.trigger_id == _DEATH.trigger_id, isouter=True)
        .join(trigger_cursor, _CURSOR.trigger_id == _DEATH.trigger_id)
        .join(trigger, _TRIGGER.id == _DEATH.trigger_id)
        .where(free)
    )


def _fail_culprits(connection: Connection, free: Select[Any], session: int, context: CallContext) -> None:
    """Fail the tasks of triggers that were alone at the loss of several hosts; of streams at most one."""
    rows = connection.execute(free.where(_DEATH.alone >= CULPRIT_LOSSES)).all()
    given = []
    streams = []
    for row in rows:
        error = (
            f"the host that tried only this trigger was lost {row.alone} times in a row; a trigger must not kill the "
            "processes of its host, or use up its memory"
        )
        log.error("a trigger kills its hosts; failing its task", trigger=row.id, losses=row.deaths)
        if row.streams is not None:
            streams.append(EndStream(session, row.id, row.token, error))
            continue
        request = f"deaths-{row.id}-{row.deaths}"
        given.append((row.task_id, TriggerFailed(row.epoch, error, draw_bits(), request)))
    if given:
        move_tasks(connection, given, context, "suspects")
    elif streams:
        # The attempts of its task handle the end. Cursors are locked after tasks, so the others follow later.
        end_stream(connection, min(streams, key=lambda one: one.trigger), context)


def _find_read(connection: Connection, keys: Collection[str]) -> set[str]:
    """Return the streams that some session reads."""
    if not keys:
        return set()
    read = and_(_TRIGGER.stream_key.in_(sorted(keys)), _TRIGGER.state == literal_column("'running'"))
    return set(connection.execute(select(_TRIGGER.stream_key).where(read).distinct()).scalars()) - {None}


def build_unsuspected(now_us: int, *, is_trial: bool = False) -> ColumnElement[bool]:
    """Return the condition that a trigger is no suspect, nor, except for a trial, another one of its stream."""
    own = exists().where(and_(_DEATH.trigger_id == _TRIGGER.id, is_suspect(now_us)))
    if is_trial:
        return ~own
    other, death = trigger.alias("suspected"), trigger_death.alias("its_death")
    shared = exists(
        select(other.c.id)
        .join(death, death.c.trigger_id == other.c.id)
        .where(
            and_(
                other.c.stream_key == _TRIGGER.stream_key,
                other.c.state == literal_column("'registered'"),
                death.c.deaths >= _LOSSES,
                death.c.at_us >= now_us - FORGET_US,
            )
        )
    )
    return and_(~own, ~shared)


def any_suspects(connection: Connection, now_us: int) -> bool:
    """Return whether any trigger is a suspect; usually none is, and claims need not look at each."""
    return connection.execute(select(_DEATH.trigger_id).where(is_suspect(now_us)).limit(1)).first() is not None
