"""The worker turn: stores the reports of finished attempts and claims new ones, in one transaction.

Invariants: a repeated report changes nothing. A report whose content the database rejects fails only its own task.
The maps of elements are locked last, after the claims: other workers wait for them until the transaction ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import structlog
from sqlalchemy import Connection, Update, and_, select, update

from tidemill.core.errors import describe_error
from tidemill.core.tasks.attempt import Already, Answer, Fenced, Moved, Refused
from tidemill.core.tasks.endings import Deferral, Failure, Idle, Loss, Skip, Success
from tidemill.core.tasks.inputs import Deferred, Ended, Failed, Input, Lost, Returned, Skipped, StreamIdle, Succeeded
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.worker_calls import (
    AttemptReport,
    AttemptReportOutcome,
    CallbackReport,
    OutcomeKind,
    WorkerAnswer,
    WorkerTurn,
)
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import task_callback, task_instance
from tidemill.store.queries.dags.attempts.claims import claim_work, find_claims, move_blocked
from tidemill.store.queries.dags.state.effects import PackedTrigger, pack_trigger
from tidemill.store.queries.dags.state.tasks import close_board, draw_bits, move_held, tell_maps
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.dags.streams.marks import find_ready
from tidemill.store.queries.dags.values.xcoms import find_fault
from tidemill.store.queries.dags.views.task_logs import store_log_parts
from tidemill.store.queries.isolation import is_fault_of_content, isolate
from tidemill.store.queries.sessions.services import build_lost_callback, build_returned_callback, lock_session
from tidemill.store.queries.triggers.triggers import make_storable
from tidemill.store.statements import Statement

log = structlog.get_logger(__name__)

_LABELS = RowSet("labels", id=int, label=str)
_KINDS = {
    Moved: OutcomeKind.MOVED,
    Already: OutcomeKind.ALREADY,
    Fenced: OutcomeKind.FENCED,
    Refused: OutcomeKind.REFUSED,
}


def take_worker_turn(connection: Connection, turn: WorkerTurn, context: CallContext) -> WorkerAnswer:
    """Store reports and claim new work; see `WorkerTurn`."""
    lock_session(connection, turn.session, context)
    found = find_claims(connection, turn)
    context.untold = []
    board = Board(connection, context)
    outcomes = _store_reports(board, turn, found.gone)
    _store_callbacks(connection, turn, context)
    ends = [one.log_end for one in turn.reports] + [one.log_end for one in turn.callbacks]
    store_log_parts(connection, [part for part in ends if part is not None])
    # Reports that are written already may have made callbacks due.
    due = found.due or board.has_callbacks or board.wrote_callbacks or bool(turn.callbacks) or context.isolates
    if found.blocked or turn.blocked or board.has_callbacks:
        _flush(board)  # what follows reads it; otherwise it is written together with the claims
    unblocked = move_blocked(connection, turn, found, context)
    claimed = claim_work(board, turn, found, len(unblocked), due=due)
    _flush(board)
    ended = tuple(one for one in turn.held if one not in found.live)
    tell_maps(connection, context)
    return WorkerAnswer(outcomes, claimed, ended, context.now_us, unblocked)


def _flush(board: Board) -> None:
    """Write the rows of the reports, of which the database may reject one, and of the claims."""
    with isolate(board.connection, board.context):
        board.flush_rows()


def _store_reports(board: Board, turn: WorkerTurn, gone: Collection[int]) -> tuple[AttemptReportOutcome, ...]:
    """Store all reports together, and that attempts are gone; if that fails, store the reports one by one and refuse
    those that fail.

    Together, because the maps of elements are locked after all runs and tasks. If the transaction does not isolate its
    steps, the rows of the board are not written yet.
    """
    if not turn.reports and not gone:
        return ()
    connection, context = board.connection, board.context
    try:
        with isolate(connection, context):
            if not context.isolates:
                return _store_some(board, turn, turn.reports, gone, writes=False)
            return _store_some(Board(connection, context), turn, turn.reports, gone)
    except Exception as error:
        if not turn.reports or not is_fault_of_content(error):
            raise
    outcomes = tuple(_store_one(connection, turn, report, context) for report in turn.reports)
    move_held(connection, gone, turn.session, Ended, context, f"worker {turn.session}")
    return outcomes


def _store_one(
    connection: Connection, turn: WorkerTurn, report: AttemptReport, context: CallContext
) -> AttemptReportOutcome:
    """Store a report alone; an attempt whose result cannot be stored has failed."""
    reason = ""
    failed = Failure("the result cannot be stored; the log of tidemill says why")
    for given in (report, AttemptReport(report.task, report.epoch, failed, request=report.request)):
        try:
            with isolate(connection, context):
                return _store_some(Board(connection, context), turn, (given,))[0]
        except Exception as error:
            if not is_fault_of_content(error):
                raise
            reason = f"cannot store the report: {describe_error(error)}"
            log.exception("cannot store the report of an attempt", task=report.task)
    return AttemptReportOutcome(report.task, OutcomeKind.UNSTORED, reason)


def _store_some(
    board: Board,
    turn: WorkerTurn,
    reports: Sequence[AttemptReport],
    gone: Collection[int] = (),
    *,
    writes: bool = True,
) -> tuple[AttemptReportOutcome, ...]:
    connection, context = board.connection, board.context
    board.lock({*gone, *(report.task for report in reports)})
    for report in reports:
        entry = board.tasks.get(report.task)
        current = entry is not None and entry.row.state is TaskState.RUNNING and entry.row.epoch == report.epoch
        if entry is not None and current and isinstance(report.result, Success):
            board.note_skips(entry, report.skip, report.skip_all_downstream)
    idle = [
        board.tasks[report.task] for report in reports if isinstance(report.result, Idle) and report.task in board.tasks
    ]
    ready, held = find_ready(connection, idle) if idle else (set(), set())
    given = [
        (report.task, _build_input(report, context, report.task in ready, report.task in held)) for report in reports
    ]
    by = f"worker {turn.session}"
    answers = board.give_all(given, by)
    # A user may have cleared or marked a task again since it was found.
    mine = [board.tasks[task] for task in sorted(gone) if task in board.tasks]
    ended = [entry for entry in mine if entry.row.session == turn.session and entry.row.state is TaskState.ENDING]
    board.give_all([(entry.id, Ended(entry.row.epoch)) for entry in ended], by)
    close_board(board, writes=writes)
    _write_labels(connection, reports, answers)
    return tuple(_build_outcome(board, report, answer) for report, answer in zip(reports, answers, strict=True))


def _write_labels(connection: Connection, reports: Sequence[AttemptReport], answers: Sequence[Answer | None]) -> None:
    labels = {
        report.task: make_storable(report.label)
        for report, answer in zip(reports, answers, strict=True)
        if report.label is not None and isinstance(answer, Moved)
    }
    if labels:
        _label_update.fetch(connection, _LABELS.build_parameters(find_dialect(connection), labels.items()))


@Statement
def _label_update(dialect: str) -> Update:
    given = _LABELS.build_source(dialect)
    return update(task_instance).where(task_instance.c.id == given.c.id).values({"label": given.c.label})


def _build_input(report: AttemptReport, context: CallContext, ready: bool = False, held: bool = False) -> Input:
    epoch, request = report.epoch, report.request
    match report.result:
        case Success():
            fault = find_fault(report.xcoms)
            if fault is not None:
                return Failed(epoch, fault, may_retry=False, bits=draw_bits(), request=request)
            return Succeeded(epoch, report.xcoms, request)
        case Failure(error=error, may_retry=may_retry, origin=origin):
            return Failed(epoch, make_storable(error) or "", may_retry, draw_bits(), request, make_storable(origin))
        case Skip():
            return Skipped(epoch, request)
        case Deferral() as deferral:
            fault = _find_fault(deferral)
            if fault is not None:
                return Failed(epoch, fault, may_retry=False, bits=draw_bits(), request=request)
            return _build_deferred(epoch, deferral, request, context)
        case Loss(is_return=True):
            return Returned(epoch, request)
        case Idle(idle_us=idle_us, pause_us=pause_us):
            # The next event has arrived; it waits for a map, not for the trigger.
            return StreamIdle(epoch, ready, None if held else idle_us, pause_us, request)
        case _:
            return Lost(epoch, draw_bits(), request)


def _find_fault(deferral: Deferral) -> str | None:
    """Return why a deferral cannot be stored; None if it can."""
    fields = ("classpath", "kwargs", "method", "method_kwargs", "queue", "stream_key")
    for name in fields:
        text = getattr(deferral, name)
        if text is not None and make_storable(text) != text:
            return (
                f"TaskDeferralError: the {name} of the deferral has characters that databases reject: a NUL character "
                "or a lone surrogate"
            )
    return None


def _build_deferred(epoch: int, deferral: Deferral, request: str, context: CallContext) -> Deferred:
    packed = pack_trigger(
        PackedTrigger(
            deferral.classpath,
            deferral.kwargs,
            deferral.queue,
            deferral.stream_key,
            streams=deferral.streams,
            acked=deferral.acked,
        )
    )
    kwargs = context.cipher.encrypt(deferral.method_kwargs)
    limits = (deferral.timeout_us, deferral.streams, deferral.idle_us)
    return Deferred(epoch, packed, deferral.method, kwargs, *limits, request)


def _build_outcome(board: Board, report: AttemptReport, answer: Answer | None) -> AttemptReportOutcome:
    if answer is None:
        run = board.connection.execute(select(task_instance.c.run).where(task_instance.c.id == report.task)).scalar()
        if run in board.context.broken_runs:
            return AttemptReportOutcome(report.task, OutcomeKind.UNSTORED, "the structure of its DAG cannot be read")
        return AttemptReportOutcome(report.task, OutcomeKind.REFUSED, "there is no such task")
    reason = answer.reason if isinstance(answer, Refused) else ""
    return AttemptReportOutcome(report.task, _KINDS[type(answer)], reason)


def _store_callbacks(connection: Connection, turn: WorkerTurn, context: CallContext) -> None:
    for one in turn.callbacks:
        connection.execute(_build_callback_update(turn.session, one, context.now_us))


def _build_callback_update(session: int, one: CallbackReport, now_us: int) -> Update:
    columns = task_callback.c
    mine = and_(columns.id == one.id, columns.session_id == session, columns.state == "running")
    if one.returned:
        return update(task_callback).where(mine).values(build_returned_callback())
    if one.lost:
        return update(task_callback).where(mine).values(build_lost_callback(now_us))
    state = "done" if one.error is None else "failed"
    new = {"state": state, "error": make_storable(one.error), "ended_us": now_us, "session_id": None}
    return update(task_callback).where(mine).values(new)
