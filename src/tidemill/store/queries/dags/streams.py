"""The streams of triggers: events that an attempt takes in batches, and keeps as handled.

Theory of operation: the triggerer stores events under the trigger's cursor. An attempt that runs takes them, and keeps
a batch once it has handled it. If the task waits without a worker when an event arrives, the stream is marked, and the
next turn of the scheduler resumes the task.

Invariants: storing an event locks neither task nor run. Whether a task may leave its worker is decided under the lock
of the trigger's cursor, as streams are marked, so no event is overlooked between the two. A batch is kept in one
transaction, by the attempt that holds the task. After a STOP no event is delivered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, Update, and_, bindparam, case, exists, literal_column, select, update

from tidemill.core.tasks.inputs import Channel, StreamReady, TriggerStopReason
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
from tidemill.store.calls.worker_calls import StreamClaim
from tidemill.store.content import check_identity
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import task_instance
from tidemill.store.queries.dags.effects import stop_triggers, write_xcoms
from tidemill.store.queries.dags.map_backlog import YIELDED, count_items, lock_free, read_size
from tidemill.store.queries.dags.map_items import add_emitted, read_range
from tidemill.store.queries.dags.task_rows import TaskEntry
from tidemill.store.queries.dags.task_values import check_attempt
from tidemill.store.queries.dags.transition import Board
from tidemill.store.queries.dags.xcoms import find_fault
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


def read_streams(connection: Connection, entries: Iterable[TaskEntry]) -> dict[int, StreamClaim]:
    """Return the streams of tasks, by task."""
    streams = {entry.id: entry.row.stream for entry in entries if entry.row.stream is not None}
    if not streams:
        return {}
    wanted = [(task, stream.epoch) for task, stream in streams.items()]
    rows = _streams.fetch(connection, _OF_TASKS.build_parameters(find_dialect(connection), wanted))
    return {
        task: StreamClaim(number, handled, kept, checkpoint, streams[task].due_us)
        for task, number, handled, kept, checkpoint in rows
    }


@Statement
def _streams(dialect: str) -> Select[Any]:
    given = _OF_TASKS.build_source(dialect)
    same = and_(trigger.c.task_id == given.c.task, trigger.c.epoch == given.c.epoch)
    return (
        select(_STREAM.task, _STREAM.trigger_id, _STREAM.handled, _STREAM.kept, _STREAM.checkpoint)
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


def find_ready(connection: Connection, entries: Sequence[TaskEntry]) -> set[int]:
    """Return the tasks whose streams have an event that was not handled, or have ended; their cursors are locked."""
    streams = read_streams(connection, entries)
    lock_cursors(connection, {one.trigger for one in streams.values()})
    return _list_ready(connection, streams)


def _list_ready(connection: Connection, streams: Mapping[int, StreamClaim]) -> set[int]:
    ready = {one.trigger for one in _read(connection, {one.trigger for one in streams.values()}) if one.ready}
    return {task for task, one in streams.items() if one.trigger in ready}


class _Stream(NamedTuple):
    trigger: int
    task: int
    handled: int
    ended_us: int | None
    error: str | None
    next_index: int
    state: str

    @property
    def ready(self) -> bool:
        return self.next_index > self.handled or self.ended_us is not None


def _read(connection: Connection, triggers: Collection[int]) -> list[_Stream]:
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(triggers))
    return [_Stream(*row) for row in _described.fetch(connection, given)]


@Statement
def _described(dialect: str) -> Select[Any]:
    wanted = select(IDS.build_source(dialect).c.id)
    return (
        select(
            _STREAM.trigger_id,
            _STREAM.task,
            _STREAM.handled,
            _STREAM.ended_us,
            _STREAM.error,
            _CURSOR.next_index,
            _TASK.state,
        )
        .join(trigger_cursor, _CURSOR.trigger_id == _STREAM.trigger_id)
        .join(task_instance, _TASK.id == _STREAM.task)
        .where(_STREAM.trigger_id.in_(wanted))
        .order_by(_STREAM.trigger_id)
    )


def note_events(connection: Connection, triggers: Collection[int], context: CallContext) -> None:
    """Have the tasks of streams take new events, or their end; the cursors are locked."""
    waiting = [one.trigger for one in _read(connection, triggers) if one.state == TaskState.DEFERRED.value]
    context.bells.add(Channel.WORKER)
    if waiting:
        _mark.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(waiting)))
        context.bells.add(Channel.SCHEDULER)


@Statement
def _mark(dialect: str) -> Update:
    return update(trigger_stream).where(_STREAM.trigger_id.in_(select(IDS.build_source(dialect).c.id))).values(ready=1)


IS_READY = exists().where(_STREAM.ready == literal_column("1"))


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
        ready = _list_ready(connection, read_streams(connection, taken))
        for entry in taken:
            if entry.id in ready:
                board.give(entry, StreamReady(entry.row.epoch), by)
        board.flush()
        done = [number for number, task in found if task in board.tasks]
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
        given = {"wanted": want.trigger, "after": want.after, "most": want.limit}
        events: list[StreamEvent] = []
        size = 0
        for index, payload, identity, created_us in _next_events.fetch(connection, given):
            size += len(payload)
            if events and size > MAX_BATCH_BYTES:
                break
            events.append(StreamEvent(index, payload, identity, created_us))
        total += size
        last = events[-1].sequence_index + 1 if events else want.after
        ended = row.ended_us is not None and last >= row.next_index
        batches.append(
            StreamBatch(want.trigger, tuple(events), ended, row.error if ended else None, row.next_index - last)
        )
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
    kept = connection.execute(select(_STREAM.kept).where(mine)).scalar()
    if kept is None:
        raise CallRefusedError(RefusalKind.UNKNOWN, f"task {request.task} has no stream {request.trigger}")
    if kept >= request.number:
        return  # the same batch again, because the answer was lost
    # After a stop all events count as handled, so that another attempt gets none of them.
    handled = _stop(connection, request, context) if request.stops else request.handled
    add_emitted(connection, request.task, request.emitted, context)
    xcoms = [(request.task, key, value) for key, value in request.xcoms]
    if request.lists:
        xcoms.append((request.task, YIELDED, _list_emitted(connection, request.task)))
    write_xcoms(connection, xcoms, context.now_us)
    most = case((_STREAM.handled > handled, _STREAM.handled), else_=handled)
    new: dict[str, Any] = {"kept": request.number, "handled": most}
    if request.stops:
        new |= {"ended_us": context.now_us, "error": None}
    if request.checkpoint is not None:
        new["checkpoint"] = request.checkpoint
    connection.execute(update(trigger_stream).where(mine).values(new))


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
    return find_fault([*request.xcoms, *values])


def _stop(connection: Connection, request: KeepBatch, context: CallContext) -> int:
    """End the trigger of a stream that is not needed any more; return the number of its events."""
    epoch = connection.execute(select(trigger.c.epoch).where(trigger.c.id == request.trigger)).scalar_one()
    stop_triggers(connection, [(request.task, epoch, TriggerStopReason.DONE)], context.now_us)
    context.bells.add(Channel.TRIGGERER)
    count = select(_CURSOR.next_index).where(_CURSOR.trigger_id == request.trigger)
    return int(connection.execute(count).scalar_one())


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
