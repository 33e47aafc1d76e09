"""The ends of triggers that stream their events.

Invariant: the attempts of a task handle the end of its stream after all events before it, unless its events feed maps:
then the end of the stream ends the task.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, select, update

from tidemill.core.tasks.attempt import Already, Answer, Fenced, Moved
from tidemill.core.tasks.endings import Success
from tidemill.core.tasks.inputs import Input, TriggerEnded, TriggerFailed
from tidemill.store.batches import find_dialect
from tidemill.store.calls.stream_calls import EndStream
from tidemill.store.calls.worker_calls import OutcomeKind
from tidemill.store.context import CallContext
from tidemill.store.queries.dags.state.tasks import close_board, draw_bits
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.dags.streams.events import note_events
from tidemill.store.queries.sessions.services import check_session
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows, lock_cursors
from tidemill.store.queries.triggers.triggers import make_storable
from tidemill.store.records import TriggerState
from tidemill.store.tables import trigger, trigger_cursor, trigger_stream

_TRIGGER, _CURSOR = trigger.c, trigger_cursor.c
#: The value of `trigger_stream.feeds` if the stream may not be empty.
_NEEDS_EVENTS = 1


def end_stream(connection: Connection, request: EndStream, context: CallContext) -> OutcomeKind:
    """Store the end of a stream; see `EndStream`."""
    check_session(connection, request.session)
    row = find_trigger_tasks(connection, [request.trigger]).get(request.trigger)
    board = Board(connection, context)
    if row is not None and row.feeds:
        board.lock([row.task_id])
    counters = lock_cursors(connection, [request.trigger])
    counter = counters.get(request.trigger)
    if counter is None or counter.token != request.token:
        return OutcomeKind.FENCED
    mine = and_(trigger_stream.c.trigger_id == request.trigger, trigger_stream.c.ended_us.is_(None))
    new = {"ended_us": context.now_us, "error": make_storable(request.error)}
    if not connection.execute(update(trigger_stream).where(mine).values(new)).rowcount:
        return OutcomeKind.ALREADY
    finish_stream(connection, request.trigger, make_storable(request.error), context)
    if row is not None and row.feeds:
        error = make_storable(request.error)
        if error is None and not counter.next_index and row.feeds == _NEEDS_EVENTS:
            error = "the stream ended without an event; set allow_empty_stream on the operator if that may happen"
        name = f"trigger-{request.trigger}-{request.token}"
        given: Input = TriggerEnded(row.epoch, Success(), (), draw_bits(), name)
        if error is not None:
            given = TriggerFailed(row.epoch, error, draw_bits(), name)
        answers = board.give_all([(row.task_id, given)], "trigger")
        close_board(board)
        return name_answer(answers[0])
    note_events(connection, [request.trigger], context)
    return OutcomeKind.MOVED


def finish_stream(connection: Connection, number: int, error: str | None, context: CallContext) -> None:
    """End the trigger of a stream: it is not claimed again, and its events stay until its task has handled them."""
    state = TriggerState.FINISHED if error is None else TriggerState.FAILED
    row = {"state": state.value, "changed_us": context.now_us, "error": error}
    connection.execute(update(trigger).where(_TRIGGER.id == number).values(row))
    connection.execute(update(trigger_cursor).where(_CURSOR.trigger_id == number).values(session_id=None))


def find_trigger_tasks(connection: Connection, ids: Collection[int]) -> dict[int, Row[Any]]:
    dialect = find_dialect(connection)
    wanted = and_(_TRIGGER.id.in_(select(IDS.build_source(dialect).c.id)), _TRIGGER.task_id.is_not(None))
    statement: Select[Any] = (
        select(
            _TRIGGER.id,
            _TRIGGER.task_id,
            _TRIGGER.epoch,
            trigger_stream.c.trigger_id.label("streams"),
            trigger_stream.c.feeds,
        )
        .join(trigger_stream, trigger_stream.c.trigger_id == _TRIGGER.id, isouter=True)
        .where(wanted)
    )
    rows: Sequence[Row[Any]] = connection.execute(statement, IDS.build_parameters(dialect, build_id_rows(ids))).all()
    return {row.id: row for row in rows}


def name_answer(answer: Answer | None) -> OutcomeKind:
    if isinstance(answer, Moved):
        return OutcomeKind.MOVED
    if isinstance(answer, Already):
        return OutcomeKind.ALREADY
    return OutcomeKind.FENCED if isinstance(answer, Fenced) else OutcomeKind.REFUSED
