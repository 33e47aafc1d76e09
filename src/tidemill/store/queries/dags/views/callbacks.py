"""Lists the callbacks of runs and reads their logs.

A task's callbacks write to the log of its try 0. Callbacks of the whole run share one log of task 0, in which the parts
of a callback are numbered from its id times `PART_BASE`.
"""

from __future__ import annotations

from sqlalchemy import Connection, and_, or_, select

from tidemill.core.tasks.instance import UNMAPPED
from tidemill.store.calls.call import CallRefusedError, Listed, RefusalKind
from tidemill.store.calls.callback_calls import CallbackRecord, ListCallbacks, ReadCallbackLog
from tidemill.store.calls.log_calls import LogPartRecord
from tidemill.store.calls.worker_calls import PART_BASE
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import task_callback, task_instance, task_log
from tidemill.store.queries.dags.runs.runs import find_run

_CALLBACK, _TASK, _LOG = task_callback.c, task_instance.c, task_log.c


def list_callbacks(connection: Connection, request: ListCallbacks, context: CallContext) -> Listed[CallbackRecord]:
    """Return a page of the callbacks of a run; see `ListCallbacks`."""
    run = find_run(connection, request.dag_id, request.run_id)
    wanted = [_CALLBACK.run == run, or_(_CALLBACK.task.is_(None), _CALLBACK.state == "failed")]
    if request.after is not None:
        wanted.append(_CALLBACK.id > int(request.after))
    statement = (
        select(task_callback, _TASK.task_id, _TASK.map_index)
        .outerjoin(task_instance, _TASK.id == _CALLBACK.task)
        .where(and_(*wanted))
        .order_by(_CALLBACK.id)
        .limit(request.limit + 1)
    )
    rows = connection.execute(statement).all()
    records = [
        CallbackRecord(
            row.id,
            row.task_id,
            UNMAPPED if row.map_index is None else row.map_index,
            row.name,
            row.state,
            row.error,
            row.created_us,
            row.ended_us,
        )
        for row in rows[: request.limit]
    ]
    return Listed(tuple(records), str(records[-1].id) if len(rows) > request.limit else None)


def read_callback_log(connection: Connection, request: ReadCallbackLog, context: CallContext) -> Listed[LogPartRecord]:
    """Return a page of the log of a callback of the whole run; see `ReadCallbackLog`.

    Raises:
        CallRefusedError: The run has no such callback.
    """
    run = find_run(connection, request.dag_id, request.run_id)
    own = and_(_CALLBACK.id == request.callback, _CALLBACK.run == run, _CALLBACK.task.is_(None))
    if connection.execute(select(_CALLBACK.id).where(own)).scalar() is None:
        raise CallRefusedError(
            RefusalKind.UNKNOWN,
            f"run {request.run_id!r} has no callback {request.callback}, or the callback belongs to a task",
        )
    first = request.callback * PART_BASE
    after = first - 1 if request.after is None else int(request.after)
    wanted = and_(_LOG.task == 0, _LOG.try_number == 0, _LOG.number > after, _LOG.number < first + PART_BASE)
    rows = connection.execute(select(task_log).where(wanted).order_by(_LOG.number).limit(request.limit + 1)).all()
    parts = tuple(
        LogPartRecord(row.number, row.first_us, row.data, row.lines, bool(row.last)) for row in rows[: request.limit]
    )
    return Listed(parts, str(parts[-1].number) if len(rows) > request.limit else None)
