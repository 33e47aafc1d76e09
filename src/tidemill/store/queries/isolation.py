"""Isolates failures: a run or DAG that raises in a step of the store does not fail the step for the others.

Invariants: the work of a failing run or DAG is rolled back alone, logged, and leaves the run or DAG unchanged. Failures
of the database itself are raised.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import structlog
from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from tidemill.core.errors import InvariantError, describe_error
from tidemill.runtime.log.setup import ThrottledLogger, throttle
from tidemill.store.calls.call import CallRefusedError
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag, dag_run
from tidemill.store.database import build_remote_error
from tidemill.store.statements import NeedsIsolationError, savepoint

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: The minimum interval between log entries about the same run or DAG.
_LOG_SECONDS = 60.0


def work_on_runs(
    connection: Connection, context: CallContext, given: Sequence[tuple[int, T]], work: Callable[[list[T]], int]
) -> int:
    """Process many runs together; if that fails, process them one by one and skip those that fail.

    Args:
        connection: A connection inside a transaction.
        context: Records the runs that failed.
        given: Pairs of a run and an item of its work.
        work: Called with items inside a savepoint; returns how many it processed.

    Returns:
        The number of processed items.
    """

    def note(number: int, error: Exception) -> None:
        note_broken_run(connection, context, number, error)

    return _work(connection, context, given, work, note)


def work_on_dags(
    connection: Connection, context: CallContext, dags: Sequence[int], work: Callable[[list[int]], int]
) -> int:
    """Process many DAGs; see `work_on_runs`."""

    def note(number: int, error: Exception) -> None:
        context.broken_dags.add(number)
        name = connection.execute(select(dag.c.dag_id).where(dag.c.id == number)).scalar()
        _log(number).error("cannot schedule a DAG; it stays unchanged", dag=name, **_describe(error))

    return _work(connection, context, [(number, number) for number in dags], work, note)


def note_broken_run(connection: Connection, context: CallContext, number: int, error: Exception) -> None:
    """Record and log a run that failed and stays unchanged."""
    context.broken_runs.add(number)
    names = select(dag.c.dag_id, dag_run.c.run_id).join(dag, dag.c.id == dag_run.c.dag)
    row = connection.execute(names.where(dag_run.c.id == number)).first()
    found = {} if row is None else {"dag": row.dag_id, "run": row.run_id}
    _log(number).error("cannot advance a run; it stays unchanged", **found, **_describe(error))


def is_fault_of_content(error: Exception) -> bool:
    """Return whether stored or reported content caused the error, rather than the database as a whole."""
    if isinstance(error, NeedsIsolationError):
        return False
    if isinstance(error, (SQLAlchemyError, sqlite3.Error, OSError)):
        return not build_remote_error("", error).retryable
    return True


@contextmanager
def isolate(connection: Connection, context: CallContext) -> Iterator[None]:
    """Roll back the statements inside the block if it raises.

    Only if the transaction `isolates`: nearly all steps succeed, and a savepoint costs two round trips. Otherwise a
    step that fails fails the transaction, which is then repeated and isolates its steps.

    Raises:
        NeedsIsolationError: The transaction has to be repeated.
    """
    if context.isolates:
        untold = len(context.untold or ())
        try:
            with savepoint(connection):
                yield
        except BaseException:
            del (context.untold or [])[untold:]
            raise
        return
    try:
        yield
    except Exception as error:
        if is_fault_of_content(error):
            raise NeedsIsolationError("a step failed") from error
        raise


def _work(
    connection: Connection,
    context: CallContext,
    given: Sequence[tuple[int, T]],
    work: Callable[[list[T]], int],
    note: Callable[[int, Exception], None],
) -> int:
    if not given:
        return 0
    numbers = dict.fromkeys(number for number, _ in given)
    try:
        with isolate(connection, context):
            return work([one for _, one in given])
    except Exception as error:
        if not is_fault_of_content(error):
            raise
        if len(numbers) == 1:
            note(next(iter(numbers)), error)
            return 0
    return sum(_work(connection, context, [one for one in given if one[0] == number], work, note) for number in numbers)


def _log(number: int) -> ThrottledLogger:
    return throttle(log, _LOG_SECONDS, about=number)


def _describe(error: Exception) -> dict[str, object]:
    known = isinstance(error, (CallRefusedError, InvariantError))
    return {"error": describe_error(error)} | ({} if known else {"exc_info": error})
