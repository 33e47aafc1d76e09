"""Claims free triggers of tasks for a triggerer: its fair share of what waits (`core.triggers.fair_share`).

Invariants: all triggers of one stream are claimed by the same session, and those that wait when it begins to read the
stream by one transaction. A claim locks a stream before rows of its triggers, so that no claim holds rows of a stream
that another one claims. Suspects are claimed for trials only (`suspects`). What a claim leaves is claimable again once
its transaction has ended.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import structlog
from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
    union_all,
    update,
)

from tidemill.core.triggers.fair_share import (
    StreamUnit,
    TriggererLoad,
    WaitingTrigger,
    choose_claims,
    compute_share,
    find_interested,
)
from tidemill.runtime.log.setup import throttle
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.trigger_calls import ClaimTriggers, ListLoads, TriggererLoadRecord
from tidemill.store.context import CallContext
from tidemill.store.queries.sessions.stream_locks import try_lock_streams
from tidemill.store.queries.sessions.suspects import any_suspects, build_unsuspected
from tidemill.store.queries.sessions.unreadable_triggers import find_unreadable
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.records import TriggerState
from tidemill.store.tables import service_session, trigger, trigger_cursor

log = structlog.get_logger(__name__)

_TRIGGER, _CURSOR, _SESSION = trigger.c, trigger_cursor.c, service_session.c
_RUNNING = TriggerState.RUNNING.value
_KEYS = RowSet("keys", key=str)
#: How often a claim retries to replace triggers that cannot be claimed now.
_LOOKS = 20
#: The number of triggers that a retry reads at most.
_WIDEST = 1_000
#: A triggerer whose last heartbeat is older than this leaves its share to the others: it may be dead.
_FRESH_US = 12_000_000
#: A trigger that has waited for this long is claimed even if it is the share of another triggerer.
_PATIENCE_US = 10_000_000
#: How long a trigger is not handed over again.
REST_US = 60_000_000
_IS_REGISTERED = _TRIGGER.state == literal_column("'registered'")
#: The capacity of a session that has none.
_UNLIMITED = 1 << 40
#: The number of triggers that join streams, per claim of a triggerer beyond its capacity.
_JOINING = 500
#: The number of triggers that waited for too long, per claim of a triggerer without a share.
_LATE = 100
#: The most triggers of streams that a session begins to read, per claim.
_WHOLE = 20_000


def list_loads(connection: Connection, request: ListLoads, context: CallContext) -> tuple[TriggererLoadRecord, ...]:
    """Return how much other triggerers run; see `ListLoads`."""
    found = find_interested(request.queues, _list_others(connection, request.session, context.now_us))
    if found and connection.execute(_select_moved(context.now_us)).first() is not None:
        # The loads do not count what is on its way to them.
        return ()
    return tuple(TriggererLoadRecord(load.held, load.capacity) for load in found)


def _select_moved(now_us: int) -> Select[Any]:
    """Select a trigger that was handed over lately and that no session has claimed yet."""
    moved = and_(_IS_REGISTERED, _TRIGGER.task_id.is_not(None), _CURSOR.moved_us >= now_us - 2 * _PATIENCE_US)
    joined = select(_TRIGGER.id).join(trigger_cursor, _CURSOR.trigger_id == _TRIGGER.id)
    return joined.where(and_(moved, (_CURSOR.session_id + 0).is_(None))).limit(1)


def _list_others(connection: Connection, session: int, now_us: int) -> list[tuple[Collection[str], TriggererLoad]]:
    live = and_(
        _SESSION.kind == "triggerer",
        _SESSION.ended_us.is_(None),
        _SESSION.id != session,
        _SESSION.capacity > 0,
        _SESSION.trial == 0,
        _SESSION.stopping == 0,
        _SESSION.list == "",
        _SESSION.beat_us >= now_us - _FRESH_US,
    )
    columns = (_SESSION.queues, _SESSION.held, _SESSION.capacity, _SESSION.id)
    rows = connection.execute(select(*columns).where(live)).all()
    return [(json.loads(row.queues), TriggererLoad(row.held, row.capacity, row.id)) for row in rows]


def take_free(connection: Connection, request: ClaimTriggers, context: CallContext) -> list[int]:
    """Claim the fair share of what waits, and return the triggers."""
    others = find_interested(request.queues, _list_others(connection, request.session, context.now_us))
    return _take(connection, request, _choose(connection, request, others, context), context)


def take_joining(connection: Connection, request: ClaimTriggers, limit: int, context: CallContext) -> list[int]:
    """Claim triggers that have joined the streams that the session reads, but no suspects."""
    if limit <= 0:
        return []
    reader, holder = trigger.alias("mate"), trigger_cursor.alias("mate_cursor")
    own = and_(
        reader.c.stream_key == _TRIGGER.stream_key,
        reader.c.state == literal_column("'running'"),
        holder.c.session_id == request.session,
    )
    free = [
        _TRIGGER.task_id.is_not(None),
        _TRIGGER.stream_key.is_not(None),
        _IS_REGISTERED,
        (_CURSOR.session_id + 0).is_(None),
        exists(select(reader.c.id).join(holder, holder.c.trigger_id == reader.c.id).where(own)),
    ]
    if request.queues:
        free.append(_TRIGGER.queue.in_(request.queues))
    rows = _lock_some(connection, free, limit)
    unreadable = set(find_unreadable(rows, context))
    got = set(try_lock_streams(connection, {row.stream_key for row in rows}))
    found = [row.id for row in rows if row.stream_key in got and row.id not in unreadable]
    return _take(connection, request, found, context, is_trial=True)


def _take(
    connection: Connection,
    request: ClaimTriggers,
    found: list[int],
    context: CallContext,
    *,
    is_trial: bool = False,
) -> list[int]:
    """Claim locked triggers, and return those that are still free."""
    if not found:
        return []
    dialect = find_dialect(connection)
    wanted, given = select(IDS.build_source(dialect).c.id), IDS.build_parameters(dialect, build_id_rows(found))
    # Read again now that cursors and streams are locked: triggers may have changed, streams may have been claimed and
    # deaths may have been counted in the meantime.
    still = and_(_TRIGGER.id.in_(wanted), _IS_REGISTERED, _build_unclaimed_stream(request.session))
    if any_suspects(connection, context.now_us):
        still = and_(still, build_unsuspected(context.now_us, is_trial=is_trial))
    found = list(connection.execute(select(_TRIGGER.id).where(still).order_by(_TRIGGER.id), given).scalars())
    given = IDS.build_parameters(dialect, build_id_rows(found))
    new = {"token": _CURSOR.token + 1, "session_id": request.session, "claim_request": request.request}
    connection.execute(update(trigger_cursor).where(_CURSOR.trigger_id.in_(wanted)).values(new), given)
    state = {"state": _RUNNING, "reason": None, "changed_us": context.now_us}
    connection.execute(update(trigger).where(_TRIGGER.id.in_(wanted)).values(state), given)
    held = {"held": request.held + len(found)}
    connection.execute(update(service_session).where(_SESSION.id == request.session).values(held))
    return found


_reader = trigger.alias("reader")
#: Whether some session reads the stream of a trigger.
_IS_READ = and_(
    _TRIGGER.stream_key.is_not(None),
    exists(
        select(_reader.c.id).where(
            and_(_reader.c.stream_key == _TRIGGER.stream_key, _reader.c.state == literal_column("'running'"))
        )
    ),
)


def _build_unclaimed_stream(session: int) -> ColumnElement[bool]:
    """Return the condition that no other session reads the stream of a trigger."""
    other, holder = trigger.alias("other"), trigger_cursor.alias("holder")
    same = and_(
        other.c.stream_key == _TRIGGER.stream_key,
        other.c.state == literal_column("'running'"),
        holder.c.session_id != session,
    )
    elsewhere = exists(select(other.c.id).join(holder, holder.c.trigger_id == other.c.id).where(same))
    return or_(_TRIGGER.stream_key.is_(None), ~elsewhere)


def _build_free(connection: Connection, request: ClaimTriggers, context: CallContext) -> list[ColumnElement[bool]]:
    free: list[ColumnElement[bool]] = [
        _TRIGGER.task_id.is_not(None),
        _IS_REGISTERED,
        # The `+ 0` keeps SQLite from starting with the index of all unclaimed triggers, most of which have ended.
        (_CURSOR.session_id + 0).is_(None),
        _build_unclaimed_stream(request.session),
    ]
    if request.queues:
        free.append(_TRIGGER.queue.in_(request.queues))
    if request.leaving:
        free.append(or_(_TRIGGER.stream_key.is_(None), _TRIGGER.stream_key.not_in(request.leaving)))
    if any_suspects(connection, context.now_us):
        free.append(build_unsuspected(context.now_us))
    return free


def _choose(
    connection: Connection, request: ClaimTriggers, others: Sequence[TriggererLoad], context: CallContext
) -> list[int]:
    """Lock and return the triggers to claim."""
    limit = max(0, request.capacity)
    capacity = connection.execute(select(_SESSION.capacity).where(_SESSION.id == request.session)).scalar_one()
    is_over = 0 < capacity < request.held
    if not limit and not is_over:
        return []
    own = TriggererLoad(request.held, capacity or _UNLIMITED, request.session)
    free = _build_free(connection, request, context)
    share, rows = limit, []
    got: set[str] = set()
    if others or is_over:
        rows = _lock_some(connection, [*free, _IS_READ], limit or _JOINING)
        got.update(try_lock_streams(connection, _list_streams(rows)))
        free.append(or_(_TRIGGER.stream_key.is_(None), ~_IS_READ))
        most = limit * (1 + len(others))
        waiting = _select_free(free).with_only_columns(literal_column("1")).limit(most).subquery()
        share = compute_share(own, others, connection.execute(select(func.count()).select_from(waiting)).scalar_one())
    chosen: list[int] = []
    skip: set[int] = set()
    unfit: set[str] = set()
    width = 0
    for _ in range(_LOOKS):
        room = limit - len(chosen)
        lost = _list_streams(rows) - got
        if room > 0:
            late = _TRIGGER.changed_us < context.now_us - _PATIENCE_US
            wanted, most = [*free, late], min(room, _LATE)
            if share > 0:
                # Others may be in front that cannot be decrypted: each look is twice as wide as the last one.
                wanted, most = free, max(min(room, share), width)
            lost |= _lock_streams_first(connection, wanted, most, skip, unfit, got)
            found = _lock_some(connection, [*wanted, _build_of_streams(got)], most, skip, unfit | lost)
            share = share if share > 0 else len(found)
            rows += found
        unreadable = set(find_unreadable(rows, context))
        given = [
            WaitingTrigger(row.id, row.stream_key)
            for row in rows
            if row.id not in unreadable and (row.stream_key is None or row.stream_key in got)
        ]
        units = _count_units(connection, {one.stream for one in given if one.stream is not None})
        late_us = context.now_us - _PATIENCE_US
        late_streams = _list_streams([row for row in rows if row.changed_us < late_us])
        choice = choose_claims(given, units, share, room, own, others, late_streams)
        if choice.oversized:
            _say_oversized(choice.oversized, units, own)
        taken, divided = list(choice.triggers), frozenset[str]()
        if choice.whole:
            whole, divided = _take_whole(connection, free, choice.whole, context)
            taken += whole
        chosen += taken
        own = own._replace(held=own.held + len(taken))
        share -= len(taken)
        lost |= choice.unfit | divided
        skip |= unreadable | set(taken)
        width = min(_WIDEST, 2 * len(rows)) if unreadable else 0
        unfit |= lost
        if share <= 0 or choice.kept or not (unreadable or lost):
            break
        rows = []
    return chosen


def _list_streams(rows: Iterable[Row[Any]]) -> set[str]:
    return {row.stream_key for row in rows if row.stream_key is not None}


def _build_of_streams(keys: Collection[str]) -> ColumnElement[bool]:
    """Return the condition that a trigger shares no stream, or one of these."""
    alone = _TRIGGER.stream_key.is_(None)
    return or_(alone, _TRIGGER.stream_key.in_(sorted(keys))) if keys else alone


def _lock_streams_first(
    connection: Connection,
    free: Sequence[ColumnElement[bool]],
    limit: int,
    skip: Collection[int],
    unfit: Collection[str],
    got: set[str],
) -> set[str]:
    """Lock the streams of the most urgent free triggers, and add them to `got`.

    Returns:
        The streams that other transactions have locked.
    """
    is_shared = and_(_IS_REGISTERED, _TRIGGER.stream_key.is_not(None))
    if connection.execute(select(_TRIGGER.stream_key).where(is_shared).limit(1)).first() is None:
        return set()
    keys = _list_streams(connection.execute(_select_some(free, limit, skip, unfit)).all()) - got
    locked = set(try_lock_streams(connection, keys))
    got |= locked
    return keys - locked


def _take_whole(
    connection: Connection, free: Sequence[ColumnElement[bool]], keys: Collection[str], context: CallContext
) -> tuple[list[int], frozenset[str]]:
    """Lock all free triggers of as many streams as one claim may take, at least one.

    Returns:
        The triggers, and the streams that are left to a later claim: there are too many of them, or another transaction
        holds some of their triggers.
    """
    wide = [*free, _TRIGGER.stream_key.in_(sorted(keys))]
    waiting = _select_free(wide).with_only_columns(_TRIGGER.stream_key, func.count()).group_by(_TRIGGER.stream_key)
    counts = {row.stream_key: row[1] for row in connection.execute(waiting)}
    chosen: list[str] = []
    size = 0
    for key in sorted(keys):
        if not chosen or size + counts.get(key, 0) <= _WHOLE:
            chosen.append(key)
            size += counts.get(key, 0)
    rows = _lock_some(connection, [*free, _TRIGGER.stream_key.in_(chosen)], _WHOLE)
    locked = Counter(row.stream_key for row in rows)
    # A stream that exceeds the limit of a claim is divided all the same.
    divided = {key for key in chosen if locked[key] < min(counts.get(key, 0), _WHOLE)}
    unreadable = set(find_unreadable(rows, context))
    taken = [row.id for row in rows if row.stream_key not in divided and row.id not in unreadable]
    return taken, frozenset(divided | (set(keys) - set(chosen)))


def _lock_some(
    connection: Connection,
    free: Sequence[ColumnElement[bool]],
    limit: int,
    skip: Collection[int] = (),
    unfit: Collection[str] = (),
) -> list[Row[Any]]:
    """Lock the most urgent free triggers, without some of them and some streams."""
    statement = _select_some(free, limit, skip, unfit)
    return list(connection.execute(statement.with_for_update(of=trigger_cursor, skip_locked=True)).all())


def _select_some(
    free: Sequence[ColumnElement[bool]], limit: int, skip: Collection[int], unfit: Collection[str]
) -> Select[Any]:
    wanted = [*free]
    if skip:
        wanted.append(_TRIGGER.id.not_in(sorted(skip)))
    if unfit:
        wanted.append(or_(_TRIGGER.stream_key.is_(None), _TRIGGER.stream_key.not_in(sorted(unfit))))
    return _select_free(wanted).order_by(_TRIGGER.priority.desc(), _TRIGGER.id).limit(limit)


def _select_free(free: Sequence[ColumnElement[bool]]) -> Select[Any]:
    return (
        select(_TRIGGER.id, _TRIGGER.kwargs, _TRIGGER.stream_key, _TRIGGER.changed_us)
        .join(trigger_cursor, _CURSOR.trigger_id == _TRIGGER.id)
        .where(and_(*free))
    )


def _count_units(connection: Connection, keys: Collection[str]) -> dict[str, StreamUnit]:
    """Return the sizes of streams; no other session runs triggers of them."""
    if not keys:
        return {}
    dialect = find_dialect(connection)
    wanted = _TRIGGER.stream_key.in_(select(_KEYS.build_source(dialect).c.key))
    # Two statements in one, because each state has an index of its own.
    waiting, running = [
        select(_TRIGGER.stream_key, literal(state).label("state"), func.count().label("count"))
        .where(and_(wanted, _TRIGGER.state == literal_column(f"'{state}'")))
        .group_by(_TRIGGER.stream_key)
        for state in ("registered", "running")
    ]
    rows = connection.execute(
        union_all(waiting, running), _KEYS.build_parameters(dialect, [(key,) for key in sorted(keys)])
    )
    counts = {(key, state): count for key, state, count in rows}
    return {key: StreamUnit(counts.get((key, "registered"), 0), counts.get((key, "running"), 0)) for key in keys}


def _say_oversized(keys: Collection[str], units: dict[str, StreamUnit], own: TriggererLoad) -> None:
    for key in sorted(keys):
        throttle(log, 60.0, about=key).warning(
            "a shared stream has more triggers than any triggerer may run; the emptiest one runs all of them",
            triggers=units[key].size,
            capacity=own.capacity,
        )
