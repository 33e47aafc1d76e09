"""How the files of live parsers and workers differ from the stored ones, and the tasks that no worker can run.

Invariants: a service that has ended lacks nothing. A task fails only if it is queued, and if no live worker of its
queue has had its file for the whole limit, by the store's clock.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Select, and_, bindparam, delete, exists, literal_column, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.tasks.inputs import FileMissing
from tidemill.core.tasks.missing_files import LackedFile, UnservedFile, describe_missing_file, find_unserved
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.service_calls import FileDifference, ListFileDifferences, ReportFiles
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag, dag_file, dag_run, file_difference, task_callback, task_instance
from tidemill.store.queries.dags.files.files import check_live
from tidemill.store.queries.dags.state.tasks import draw_bits, move_tasks
from tidemill.store.queries.isolation import work_on_runs
from tidemill.store.queries.triggers.triggers import make_storable
from tidemill.store.statements import Statement
from tidemill.store.tables import service_session

_DIFFERENCE, _SESSION = file_difference.c, service_session.c
_TASK, _CALLBACK, _RUN = task_instance.c, task_callback.c, dag_run.c
_UNSERVED = RowSet("unserved", queue=str, path=str)
_LIVE = _SESSION.ended_us.is_(None)
#: A file that a live worker lacks.
_IS_LACKED = and_(
    _DIFFERENCE.difference == literal_column("'missing'"), _SESSION.kind == literal_column("'worker'"), _LIVE
)


def report_files(connection: Connection, request: ReportFiles, context: CallContext) -> None:
    """Store how the files of a service differ; see `ReportFiles`."""
    check_live(connection, request.session)
    ended = _DIFFERENCE.session_id.not_in(select(_SESSION.id).where(_LIVE))
    connection.execute(delete(file_difference).where(ended))
    mine = _DIFFERENCE.session_id == request.session
    kinds = {**dict.fromkeys(request.differing, "differs"), **dict.fromkeys(request.missing, "missing")}
    wanted = {path: kind for path, kind in kinds.items() if make_storable(path) == path}
    known = select(_DIFFERENCE.path, _DIFFERENCE.difference).where(mine)
    stored: dict[str, str] = dict(connection.execute(known).all())
    gone = [path for path, kind in stored.items() if wanted.get(path) != kind]
    if gone:
        connection.execute(delete(file_difference).where(and_(mine, _DIFFERENCE.path.in_(gone))))
    new = [
        {"session_id": request.session, "path": path, "difference": kind, "since_us": context.now_us}
        for path, kind in wanted.items()
        if stored.get(path) != kind
    ]
    if new:
        make: Any = postgresql.insert if find_dialect(connection) == "postgresql" else sqlite.insert
        insertion = make(file_difference)
        # The same report, whose answer was lost, may still be being stored.
        values = {name: insertion.excluded[name] for name in ("difference", "since_us")}
        connection.execute(insertion.on_conflict_do_update(index_elements=["session_id", "path"], set_=values), new)


def list_differences(
    connection: Connection, request: ListFileDifferences, context: CallContext
) -> tuple[FileDifference, ...]:
    """Return the differences; see `ListFileDifferences`."""
    columns = (_DIFFERENCE.path, _DIFFERENCE.difference, _DIFFERENCE.since_us)
    statement = (
        select(*columns, _SESSION.id, _SESSION.kind, _SESSION.name, _SESSION.host)
        .join(service_session, and_(_SESSION.id == _DIFFERENCE.session_id, _LIVE))
        .join(dag_file, and_(dag_file.c.path == _DIFFERENCE.path, dag_file.c.present == 1))
        .order_by(_DIFFERENCE.path, _SESSION.id)
    )
    return tuple(FileDifference(*row) for row in connection.execute(statement))


def build_overdue() -> Any:
    """Build the condition that a live worker has lacked a file since before `missing_us`."""
    late = and_(_IS_LACKED, _DIFFERENCE.since_us <= bindparam("missing_us"))
    return exists(select(_DIFFERENCE.path).join(service_session, _SESSION.id == _DIFFERENCE.session_id).where(late))


def find_unserved_files(connection: Connection) -> tuple[UnservedFile, ...]:
    """Return the files that no live worker of a queue has."""
    joined = select(_DIFFERENCE.session_id, _DIFFERENCE.path, _DIFFERENCE.since_us).join(
        service_session, _SESSION.id == _DIFFERENCE.session_id
    )
    lacked = [LackedFile(*row) for row in connection.execute(joined.where(_IS_LACKED))]
    if not lacked:
        return ()
    workers = connection.execute(select(_SESSION.id, _SESSION.queues).where(and_(_LIVE, _SESSION.kind == "worker")))
    return find_unserved({number: json.loads(queues) for number, queues in workers}, lacked)


def fail_unserved(
    connection: Connection, context: CallContext, by: str, limit_us: int, most: int, skip: Collection[int]
) -> int:
    """Fail the queued tasks and due callbacks whose files no live worker of their queue has had for too long.

    Args:
        connection: A connection inside a transaction that has locked no tasks.
        context: The transaction's context.
        by: The sender, for the journal.
        limit_us: How long is too long.
        most: The maximum number of tasks.
        skip: Runs whose tasks are skipped.
    """
    overdue = [one for one in find_unserved_files(connection) if context.now_us - one.since_us >= limit_us]
    if not overdue:
        return 0
    given: dict[str, Any] = {"most": most}
    given |= _UNSERVED.build_parameters(find_dialect(connection), [(one.queue, one.path) for one in overdue])
    _fail_callbacks(connection, given, context.now_us, limit_us / 1e6)
    tasks = [
        (
            run,
            (task, FileMissing(epoch, describe_missing_file(path, queue, limit_us / 1e6), draw_bits())),
        )
        for run, task, epoch, queue, path in _unserved_tasks.fetch(connection, given)
        if run not in skip
    ]

    def fail(rows: list[tuple[int, FileMissing]]) -> int:
        return sum(answer is not None for answer in move_tasks(connection, rows, context, by))

    return work_on_runs(connection, context, tasks, fail)


@Statement
def _unserved_tasks(dialect: str) -> Select[Any]:
    unserved = _UNSERVED.build_source(dialect)
    return (
        select(_TASK.run, _TASK.id, _TASK.epoch, _TASK.queue, dag_file.c.path)
        .join(dag_run, _RUN.id == _TASK.run)
        .join(dag, dag.c.id == _TASK.dag)
        .join(dag_file, dag_file.c.id == dag.c.file_id)
        .join(unserved, and_(unserved.c.queue == _TASK.queue, unserved.c.path == dag_file.c.path))
        .where(text("task_instance.state = 'queued'"))
        .order_by(_TASK.run, _TASK.id)
        .limit(bindparam("most"))
        .with_for_update(of=dag_run, skip_locked=True, key_share=True)
    )


def _fail_callbacks(connection: Connection, given: dict[str, Any], now_us: int, seconds: float) -> None:
    for number, queue, path in _unserved_callbacks.fetch(connection, given):
        error = describe_missing_file(path, queue, seconds)
        values = {"state": "failed", "error": error, "ended_us": now_us}
        connection.execute(update(task_callback).where(_CALLBACK.id == number).values(values))


@Statement
def _unserved_callbacks(dialect: str) -> Select[Any]:
    unserved = _UNSERVED.build_source(dialect)
    return (
        select(_CALLBACK.id, _CALLBACK.queue, dag_file.c.path)
        .join(dag_run, _RUN.id == _CALLBACK.run)
        .join(dag, dag.c.id == _RUN.dag)
        .join(dag_file, dag_file.c.id == dag.c.file_id)
        .join(unserved, and_(unserved.c.queue == _CALLBACK.queue, unserved.c.path == dag_file.c.path))
        .where(text("task_callback.state = 'due'"))
        .order_by(_CALLBACK.id)
        .limit(bindparam("most"))
        .with_for_update(of=task_callback, skip_locked=True)
    )
