"""The batches that attempts take, and keep once they have handled them."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, Select, and_, bindparam, case, select, update

from tidemill.core.tasks.inputs import Channel, TriggerStopReason
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.stream_calls import KeepBatch, StreamBatch, StreamEvent, TakeEvents
from tidemill.store.calls.task_calls import MAX_XCOM_BYTES
from tidemill.store.calls.trigger_calls import EventEnding
from tidemill.store.content import check_identity
from tidemill.store.context import CallContext
from tidemill.store.queries.dags.items.backlog import YIELDED, count_items, read_size
from tidemill.store.queries.dags.items.items import add_emitted, read_range
from tidemill.store.queries.dags.state.effects import discard_events, stop_triggers, write_xcoms
from tidemill.store.queries.dags.streams.rows import is_held, read_rows
from tidemill.store.queries.dags.values.task_values import check_attempt, find_state_fault, write_task_state
from tidemill.store.queries.dags.values.xcoms import find_fault
from tidemill.store.queries.triggers.cursors import lock_cursors
from tidemill.store.statements import Statement
from tidemill.store.tables import trigger, trigger_cursor, trigger_event, trigger_stream

_STREAM, _CURSOR, _EVENT = trigger_stream.c, trigger_cursor.c, trigger_event.c
#: The largest batch in bytes; a batch has at least one event.
MAX_BATCH_BYTES = 8 * 1024 * 1024
#: The largest answer for all streams of a worker; those that come after it wait for the next call.
MAX_ANSWER_BYTES = 64 * 1024 * 1024
_read_ending = msgspec.json.Decoder(EventEnding).decode


def take_events(connection: Connection, request: TakeEvents, context: CallContext) -> tuple[StreamBatch, ...]:
    """Return the next events of streams; see `TakeEvents`."""
    rows = {row.trigger: row for row in read_rows(connection, [want.trigger for want in request.wants])}
    batches, total = [], 0
    for want in request.wants:
        row = rows.get(want.trigger)
        if row is None or total > MAX_ANSWER_BYTES:
            continue
        end = row.progress.last
        if want.after < end and is_held(connection, row):
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
