"""The streams of triggers: events that an attempt takes in batches, and keeps as handled.

Theory of operation: the triggerer stores events under the trigger's cursor. An attempt that runs takes them, and keeps
a batch once it has handled it. If the task waits without a worker when an event arrives, the stream is marked, and the
next turn of the scheduler resumes the task.

Events of an acknowledged shared stream cannot come again from upstream. Those that a failed or cleared try has not
handled are delivered in the next one that streams, before its own events, under the number of their own trigger. Only a
STOP, a mark and a cancelled run discard them.

While the backlog of a map over the task is full, its events wait; too many of them make the trigger wait, too. An event
that ends the task follows all events before it.

Invariants: storing an event locks neither task nor run. Whether a task may leave its worker is decided under the lock
of the trigger's cursor, as streams are marked, so no event is overlooked between the two. A batch is kept in one
transaction, by the attempt that holds the task. After a STOP no event is delivered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    Update,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal_column,
    select,
    update,
)

from tidemill.core.tasks.inputs import Channel, StreamReady, TriggerStopReason
from tidemill.core.tasks.stream_progress import StreamProgress
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.stream_calls import (
    KeepBatch,
    StreamBatch,
    StreamEvent,
    TakeEvents,
)
from tidemill.store.calls.task_calls import MAX_XCOM_BYTES
from tidemill.store.calls.trigger_calls import CountUndelivered, EventEnding
from tidemill.store.calls.worker_calls import ClaimedStream, EarlierStream
from tidemill.store.content import check_identity
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import task_instance
from tidemill.store.queries.dags.items.backlog import YIELDED, count_items, has_room, lock_free, read_size
from tidemill.store.queries.dags.items.items import add_emitted, read_range
from tidemill.store.queries.dags.state.effects import count_carried, discard_events, stop_triggers, write_xcoms
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.dags.values.task_values import check_attempt, find_state_fault, write_task_state
from tidemill.store.queries.dags.values.xcoms import find_fault
from tidemill.store.queries.isolation import work_on_runs
from tidemill.store.queries.triggers.cursors import IDS, SKIPPED, build_id_rows, lock_cursors
from tidemill.store.statements import Statement
from tidemill.store.tables import trigger, trigger_cursor, trigger_event, trigger_stream

_STREAM, _CURSOR, _TASK, _EVENT = trigger_stream.c, trigger_cursor.c, task_instance.c, trigger_event.c
_OF_TASKS = RowSet("of_streams", task=int, epoch=int)
#: The largest batch in bytes; a batch has at least one event.
MAX_BATCH_BYTES = 8 * 1024 * 1024
#: The largest answer for all streams of a worker; those that come after it wait for the next call.
MAX_ANSWER_BYTES = 64 * 1024 * 1024
_MOST = 500
#: The number of undelivered events of a stream whose events are elements of a map with a full backlog.
FULL = 1 << 31
_DEFERRED = TaskState.DEFERRED.value
_read_ending = msgspec.json.Decoder(EventEnding).decode


def read_streams(connection: Connection, entries: Iterable[TaskEntry]) -> dict[int, ClaimedStream]:
    """Return the streams of tasks, by task."""
    streams = {entry.id: entry.row.stream for entry in entries if entry.row.stream is not None}
    if not streams:
        return {}
    wanted = [(task, stream.epoch) for task, stream in streams.items()]
    rows = _streams.fetch(connection, _OF_TASKS.build_parameters(find_dialect(connection), wanted))
    return {
        task: ClaimedStream(number, handled, kept, checkpoint, streams[task].due_us, carried)
        for task, number, handled, kept, checkpoint, carried in rows
    }


def claim_streams(connection: Connection, entries: Iterable[TaskEntry]) -> dict[int, ClaimedStream]:
    """Return the streams that attempts handle, with the earlier ones whose events are delivered first, by task."""
    streams = read_streams(connection, entries)
    carrying = [task for task, stream in streams.items() if stream.carried]
    if carrying:
        earlier: dict[int, list[EarlierStream]] = {}
        given = IDS.build_parameters(find_dialect(connection), build_id_rows(carrying))
        for task, *found in _earlier.fetch(connection, given):
            if found[0] < streams[task].trigger:
                earlier.setdefault(task, []).append(EarlierStream(*found))
        for task, found in earlier.items():
            streams[task] = msgspec.structs.replace(streams[task], earlier=tuple(found))
    return streams


@Statement
def _earlier(dialect: str) -> Select[Any]:
    mine = _STREAM.task.in_(select(IDS.build_source(dialect).c.id))
    undelivered = func.coalesce(_STREAM.ends_at, _CURSOR.next_index) > _STREAM.handled
    return (
        select(_STREAM.task, _STREAM.trigger_id, _STREAM.handled, _STREAM.kept)
        .join(trigger_cursor, _CURSOR.trigger_id == _STREAM.trigger_id)
        .where(and_(mine, _STREAM.acked == literal_column("1"), undelivered))
        .order_by(_STREAM.trigger_id)
    )


@Statement
def _streams(dialect: str) -> Select[Any]:
    given = _OF_TASKS.build_source(dialect)
    same = and_(trigger.c.task_id == given.c.task, trigger.c.epoch == given.c.epoch)
    return (
        select(_STREAM.task, _STREAM.trigger_id, _STREAM.handled, _STREAM.kept, _STREAM.checkpoint, _STREAM.carried)
        .join(trigger, trigger.c.id == _STREAM.trigger_id)
        .join(given, same)
    )


def read_checkpoints(connection: Connection, entries: Iterable[TaskEntry]) -> dict[int, str]:
    """Return the last checkpoints of tasks whose try begins, from the streams of earlier tries."""
    wanted = [one.id for one in entries if one.row.resume is None and one.row.tries > one.row.tries_before + 1]
    if not wanted:
        return {}
    rows = _checkpoints.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(wanted)))
    return {task: checkpoint for task, checkpoint in rows if checkpoint is not None}


@Statement
def _checkpoints(dialect: str) -> Select[Any]:
    mine = _STREAM.task.in_(select(IDS.build_source(dialect).c.id))
    return select(_STREAM.task, _STREAM.checkpoint).where(mine).order_by(_STREAM.trigger_id)


def find_ready(connection: Connection, entries: Sequence[TaskEntry]) -> tuple[set[int], set[int]]:
    """Lock the cursors of the streams of tasks; return the tasks that can go on, and those that wait for a map.

    A task can go on if its stream has an event that was not handled, or has ended. If the backlog of a map over the
    task is full, the scheduler resumes it once there is room.
    """
    streams = read_streams(connection, entries)
    lock_cursors(connection, {one.trigger for one in streams.values()})
    return _sort_ready(connection, streams)


def _sort_ready(connection: Connection, streams: Mapping[int, ClaimedStream]) -> tuple[set[int], set[int]]:
    """Return the tasks that can go on, and those that wait for a map, whose streams are marked so."""
    ready = [one for one in _read(connection, {one.trigger for one in streams.values()}) if one.progress.ready]
    held = {one.trigger for one in ready if _is_held(connection, one)}
    if held:
        _hold.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(held)))
    return {one.task for one in ready if one.trigger not in held}, {one.task for one in ready if one.trigger in held}


class _Stream(NamedTuple):
    trigger: int
    task: int
    handled: int
    ended_us: int | None
    error: str | None
    held: int
    ends_at: int | None
    ending: str | None
    feeds: int
    next_index: int
    state: str
    run: int
    task_id: str
    carried: int

    @property
    def progress(self) -> StreamProgress:
        return StreamProgress(self.next_index, self.handled, self.ended_us is not None, self.ends_at, self.carried)


def _is_held(connection: Connection, stream: _Stream) -> bool:
    """Return whether the events of a stream wait until a map over its task has room."""
    waits = bool(stream.held) and stream.progress.has_events
    return waits and not has_room(connection, stream.run, stream.task, stream.task_id)


def _read(connection: Connection, triggers: Collection[int]) -> list[_Stream]:
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(triggers))
    return [_Stream(*row) for row in _described.fetch(connection, given)]


@Statement
def _described(dialect: str) -> Select[Any]:
    wanted = select(IDS.build_source(dialect).c.id)
    zero: ColumnElement[int] = literal_column("0")
    return (
        select(
            _STREAM.trigger_id,
            _STREAM.task,
            _STREAM.handled,
            _STREAM.ended_us,
            _STREAM.error,
            _STREAM.held,
            _STREAM.ends_at,
            _STREAM.ending,
            _STREAM.feeds,
            _CURSOR.next_index,
            _TASK.state,
            _TASK.run,
            _TASK.task_id,
            # Few streams begin with events of earlier ones.
            case((_STREAM.carried > zero, count_carried(_STREAM.task, _STREAM.trigger_id)), else_=zero),
        )
        .join(trigger_cursor, _CURSOR.trigger_id == _STREAM.trigger_id)
        .join(task_instance, _TASK.id == _STREAM.task)
        .where(_STREAM.trigger_id.in_(wanted))
        .order_by(_STREAM.trigger_id)
    )


def note_events(
    connection: Connection, triggers: Collection[int], context: CallContext, max_undelivered: int = 0
) -> dict[int, int]:
    """Have the tasks of streams take new events, or their end; the cursors are locked.

    Args:
        connection: A connection inside a transaction.
        triggers: The triggers of the streams.
        context: The transaction's context.
        max_undelivered: With more undelivered events than that, a trigger waits until half of them are handled; 0: no
            limit.

    Returns:
        The numbers of undelivered events, by trigger.
    """
    rows = _read(connection, triggers)
    waiting = [one.trigger for one in rows if one.state == _DEFERRED]
    context.bells.add(Channel.WORKER)
    dialect = find_dialect(connection)
    if waiting:
        _mark.fetch(connection, IDS.build_parameters(dialect, build_id_rows(waiting)))
        context.bells.add(Channel.SCHEDULER)
    full = [one.trigger for one in rows if max_undelivered and one.progress.undelivered > max_undelivered]
    if full:
        limits = {"most": max_undelivered, "goes_on_at": max_undelivered // 2}
        _note_full.fetch(connection, {**IDS.build_parameters(dialect, build_id_rows(full)), **limits})
    return {one.trigger: one.progress.undelivered for one in rows}


@Statement
def _note_full(dialect: str) -> Update:
    # Measured again once the row is locked: an attempt may have handled the events since, and would ring nobody later.
    next_index = (
        select(_CURSOR.next_index)
        .where(_CURSOR.trigger_id == _STREAM.trigger_id)
        .correlate(trigger_stream)
        .scalar_subquery()
    )
    mine = _STREAM.trigger_id.in_(select(IDS.build_source(dialect).c.id))
    full = next_index - _STREAM.handled > bindparam("most", type_=BigInteger)
    return update(trigger_stream).where(and_(mine, full)).values(room_at=bindparam("goes_on_at", type_=BigInteger))


def count_undelivered(
    connection: Connection, request: CountUndelivered, context: CallContext
) -> tuple[tuple[int, int], ...]:
    """Return the numbers of events that were not handled; see `CountUndelivered`."""
    counts = []
    for row in _read(connection, request.triggers):
        if row.ended_us is not None:
            counts.append((row.trigger, 0))
        elif row.feeds and row.held and not has_room(connection, row.run, row.task, row.task_id):
            counts.append((row.trigger, FULL))
        else:
            counts.append((row.trigger, row.progress.undelivered))
    return tuple(counts)


def feed_maps(
    connection: Connection, events: Mapping[int, Sequence[tuple[str, str | None]]], context: CallContext
) -> dict[int, int]:
    """Make the new events of streams elements of the maps over their tasks.

    Args:
        connection: A connection inside a transaction that has locked the cursors.
        events: Payloads and identities, by trigger.
        context: The transaction's context.

    Returns:
        The numbers of undelivered events, by trigger: none, or `FULL` if the backlog of a map is full.
    """
    undelivered = {}
    for row in _read(connection, events):
        full = add_emitted(connection, row.task, events[row.trigger], context)
        new: dict[str, Any] = {"handled": row.progress.last}
        if full is not None:
            new["held"] = int(full)
        connection.execute(update(trigger_stream).where(_STREAM.trigger_id == row.trigger).values(new))
        undelivered[row.trigger] = FULL if full else 0
    return undelivered


def note_endings(connection: Connection, endings: Mapping[int, tuple[int, str]], context: CallContext) -> list[int]:
    """Store the index and content of the events that end tasks, by trigger; return the streams that they ended.

    The events before them are delivered first. The cursors are locked.
    """
    ended = []
    for number, (index, ending) in endings.items():
        mine = and_(_STREAM.trigger_id == number, _STREAM.ended_us.is_(None))
        new = {"ended_us": context.now_us, "ends_at": index, "ending": ending}
        if connection.execute(update(trigger_stream).where(mine).values(new)).rowcount:
            ended.append(number)
    return ended


@Statement
def _mark(dialect: str) -> Update:
    # A task that waits for a map is not resumed by another event.
    mine = _STREAM.trigger_id.in_(select(IDS.build_source(dialect).c.id))
    return update(trigger_stream).where(and_(mine, _STREAM.ready != literal_column("2"))).values(ready=1)


@Statement
def _hold(dialect: str) -> Update:
    return update(trigger_stream).where(_STREAM.trigger_id.in_(select(IDS.build_source(dialect).c.id))).values(ready=2)


def has_marked(mark: str, of_tasks: Sequence[ColumnElement[bool]]) -> ColumnElement[bool]:
    """Build the condition that a stream is marked. `of_tasks`: conditions on its task."""
    marked = _STREAM.ready == literal_column(mark)
    if not of_tasks:
        return exists().where(marked)
    return exists(select(_STREAM.trigger_id).join(task_instance, _TASK.id == _STREAM.task).where(marked, *of_tasks))


def release_streams(connection: Connection, context: CallContext, skip: Collection[int] = ()) -> int:
    """Mark streams whose tasks wait for a map that has room now, so that they are resumed; return their number."""
    given: dict[str, Any] = {"most": _MOST}
    if skip:
        given |= SKIPPED.build_parameters(find_dialect(connection), build_id_rows(skip))
    rows = _held.fetch(connection, given, bool(skip))

    def release(found: list[int]) -> int:
        free = [one.trigger for one in _read(connection, found) if not _is_held(connection, one)]
        if free:
            _release.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(free)))
        return len(free)

    return work_on_runs(connection, context, [(run, number) for number, run in rows], release)


@Statement
def _held(dialect: str, skips: bool) -> Select[Any]:
    wanted = [_STREAM.ready == literal_column("2")]
    if skips:
        wanted.append(_TASK.run.not_in(select(SKIPPED.build_source(dialect).c.id)))
    return (
        select(_STREAM.trigger_id, _TASK.run)
        .join(task_instance, _TASK.id == _STREAM.task)
        .where(and_(*wanted))
        .order_by(_STREAM.trigger_id)
        .limit(bindparam("most"))
        .with_for_update(of=trigger_stream, skip_locked=True)
    )


@Statement
def _release(dialect: str) -> Update:
    mine = _STREAM.trigger_id.in_(select(IDS.build_source(dialect).c.id))
    return update(trigger_stream).where(and_(mine, _STREAM.ready == literal_column("2"))).values(ready=1)


def resume_streams(
    connection: Connection, context: CallContext, by: str, limit: int, skip: Collection[int] = ()
) -> int:
    """Resume tasks that wait for events that have arrived; return the number of marks that were found.

    It waits for nothing that another transaction has locked: those marks stay for the next turn. A mark is removed only
    under its lock and that of its task, so one that is made meanwhile is not lost.
    """
    given: dict[str, Any] = {"most": limit}
    if skip:
        given |= SKIPPED.build_parameters(find_dialect(connection), build_id_rows(skip))
    rows = _ready.fetch(connection, given, bool(skip))

    def resume(found: list[tuple[int, int]]) -> int:
        dialect = find_dialect(connection)
        board = Board(connection, context)
        locked = lock_free.fetch(connection, IDS.build_parameters(dialect, build_id_rows([task for _, task in found])))
        taken = board.take(locked)
        # A mark may be older than the wait of its task; the others were resumed or have ended in the meantime.
        ready, held = _sort_ready(connection, read_streams(connection, taken))
        for entry in taken:
            if entry.id in ready:
                board.give(entry, StreamReady(entry.row.epoch), by)
        board.flush()
        done = [number for number, task in found if task in board.tasks and task not in held]
        _unmark.fetch(connection, IDS.build_parameters(dialect, build_id_rows(done)))
        return len(done)

    return work_on_runs(connection, context, [(run, (number, task)) for number, task, run in rows], resume)


@Statement
def _ready(dialect: str, skips: bool) -> Select[Any]:
    wanted = [_STREAM.ready == literal_column("1")]
    if skips:
        wanted.append(_TASK.run.not_in(select(SKIPPED.build_source(dialect).c.id)))
    return (
        select(_STREAM.trigger_id, _STREAM.task, _TASK.run)
        .join(task_instance, _TASK.id == _STREAM.task)
        .where(and_(*wanted))
        .order_by(_STREAM.trigger_id)
        .limit(bindparam("most"))
        .with_for_update(of=trigger_stream, skip_locked=True)
    )


@Statement
def _unmark(dialect: str) -> Update:
    return update(trigger_stream).where(_STREAM.trigger_id.in_(select(IDS.build_source(dialect).c.id))).values(ready=0)


def take_events(connection: Connection, request: TakeEvents, context: CallContext) -> tuple[StreamBatch, ...]:
    """Return the next events of streams; see `TakeEvents`."""
    rows = {row.trigger: row for row in _read(connection, [want.trigger for want in request.wants])}
    batches, total = [], 0
    for want in request.wants:
        row = rows.get(want.trigger)
        if row is None or total > MAX_ANSWER_BYTES:
            continue
        end = row.progress.last
        if want.after < end and _is_held(connection, row):
            batches.append(StreamBatch(want.trigger, left=end - want.after))
            continue
        given = {"wanted": want.trigger, "after": want.after, "most": min(want.limit, max(end - want.after, 0))}
        events: list[StreamEvent] = []
        size = 0
        # Most streams of a worker have nothing new when it is rung.
        for index, payload, identity, created_us in _next_events.fetch(connection, given) if given["most"] else ():
            size += len(payload)
            if events and size > MAX_BATCH_BYTES:
                break
            events.append(StreamEvent(index, payload, identity, created_us))
        total += size
        last = events[-1].sequence_index + 1 if events else want.after
        ended = row.ended_us is not None and last >= end
        ending = None if row.ending is None or not ended else _read_ending(row.ending)
        left = max(end - last, 0)
        batches.append(StreamBatch(want.trigger, tuple(events), ended, row.error if ended else None, left, ending))
    return tuple(batches)


@Statement
def _next_events(dialect: str) -> Select[Any]:
    mine = and_(_EVENT.trigger_id == bindparam("wanted"), _EVENT.sequence_index >= bindparam("after"))
    statement = select(_EVENT.sequence_index, _EVENT.payload, _EVENT.identity, _EVENT.created_us)
    return statement.where(mine).order_by(_EVENT.sequence_index).limit(bindparam("most"))


def keep_batch(connection: Connection, request: KeepBatch, context: CallContext) -> None:
    """Store that an attempt has handled events; see `KeepBatch`."""
    fault = _find_fault(request)
    if fault is not None:
        raise CallRefusedError(RefusalKind.INVALID, fault)
    check_attempt(connection, request.task, request.epoch)
    mine = and_(_STREAM.trigger_id == request.trigger, _STREAM.task == request.task)
    stored = connection.execute(select(_STREAM.kept, _STREAM.final).where(mine)).one_or_none()
    if stored is None:
        raise CallRefusedError(RefusalKind.UNKNOWN, f"task {request.task} has no stream {request.trigger}")
    if stored.kept >= request.number:
        return  # the same batch again, because the answer was lost
    if request.stops:  # cursors are locked before maps
        lock_cursors(connection, [request.trigger if request.current is None else request.current])
    # An attempt that was lost after the end of the stream has stored its last elements.
    emitted = () if request.final and stored.final else request.emitted
    full = add_emitted(connection, request.task, emitted, context)
    xcoms = [(request.task, key, value) for key, value in request.xcoms]
    if request.lists:
        xcoms.append((request.task, YIELDED, _list_emitted(connection, request.task)))
    write_xcoms(connection, xcoms, context.now_us)
    if request.states or request.clears_state:
        write_task_state(connection, request.task, dict(request.states), context.now_us, clears=request.clears_state)
    handled = request.handled
    most = case((_STREAM.handled > handled, _STREAM.handled), else_=handled)
    new: dict[str, Any] = {"kept": request.number, "handled": most}
    if request.final:
        new["final"] = 1
    # What an attempt goes on with is read from its own stream.
    shared: dict[str, Any] = {}
    if request.checkpoint is not None:
        shared["checkpoint"] = request.checkpoint
    if full is not None:
        shared["held"] = int(full)
    statement = update(trigger_stream).where(mine).values({**new, **shared}).returning(_STREAM.room_at)
    room_at = connection.execute(statement).scalar()
    if request.current is not None and shared:
        own = and_(_STREAM.trigger_id == request.current, _STREAM.task == request.task)
        connection.execute(update(trigger_stream).where(own).values(shared))
    if request.stops:
        _stop(connection, request, context)
    if room_at is not None:
        _let_trigger_go_on(connection, request, room_at, context)


def _let_trigger_go_on(connection: Connection, request: KeepBatch, room_at: int, context: CallContext) -> None:
    """Ring the triggerer if a trigger that waits has room now."""
    mine = _CURSOR.trigger_id == request.trigger
    next_index = connection.execute(select(_CURSOR.next_index).where(mine)).scalar_one()
    if next_index - request.handled <= room_at:
        done = update(trigger_stream).where(_STREAM.trigger_id == request.trigger).values(room_at=None)
        connection.execute(done)
        context.bells.add(Channel.TRIGGERER)


def _find_fault(request: KeepBatch) -> str | None:
    """Return why a batch cannot be stored; None if it can."""
    values = [(YIELDED, value) for value, _ in request.emitted]
    if request.checkpoint is not None:
        values.append(("checkpoint", request.checkpoint))
    for _, identity in request.emitted:
        try:
            check_identity(identity or "")
        except ValueError as error:
            return f"an element cannot be emitted: {error}"
    return find_fault([*request.xcoms, *values]) or find_state_fault(request.states)


def _stop(connection: Connection, request: KeepBatch, context: CallContext) -> None:
    """End the trigger of a stream that is not needed any more, and discard what it has not delivered.

    All its events count as handled, so that another attempt gets none of them.
    """
    number = request.trigger if request.current is None else request.current
    epoch = connection.execute(select(trigger.c.epoch).where(trigger.c.id == number)).scalar_one()
    stop_triggers(connection, [(request.task, epoch, TriggerStopReason.DONE)], context.now_us)
    context.bells.add(Channel.TRIGGERER)
    discard_events(connection, {request.task: "STOP"})
    count = select(_CURSOR.next_index).where(_CURSOR.trigger_id == number).scalar_subquery()
    ended = {"ended_us": context.now_us, "error": None, "ends_at": None, "ending": None, "handled": count}
    connection.execute(update(trigger_stream).where(_STREAM.trigger_id == number).values(ended))


def _list_emitted(connection: Connection, task: int) -> str:
    """Return all elements that a task has emitted, as an encoded list."""
    number = count_items(connection, task, YIELDED)
    size = read_size(connection, task, YIELDED, number)
    if size + number + 1 > MAX_XCOM_BYTES:
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"the {number:,} elements that the task has emitted have {size:,} bytes, and its result is a list of them "
            f"with at most {MAX_XCOM_BYTES:,}; return another value from on_stream_end, or emit references",
        )
    return f"[{','.join(read_range(connection, task, YIELDED, 0, number))}]"
