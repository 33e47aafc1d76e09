"""Stores and reads XComs, the values that tasks pass to later tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Select, and_, or_, select

from tidemill.store.calls.call import CallRefusedError, Listed, RefusalKind
from tidemill.store.calls.task_calls import MAX_XCOM_BYTES, GetXCom
from tidemill.store.calls.xcom_calls import ListXComs, XComRecord
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag_run, task_instance, task_part, xcom
from tidemill.store.queries.dags.runs.runs import find_run, select_dag

_RUN, _TASK, _XCOM = dag_run.c, task_instance.c, xcom.c
#: What a cursor has instead of a key among the results of elements that run in one attempt.
_RESULTS = "\x1fresults"


def find_fault(values: Sequence[tuple[str, str]]) -> str | None:
    """Return why XComs cannot be stored; None if they can."""
    for key, value in values:
        size_bytes = len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
        if size_bytes > MAX_XCOM_BYTES:
            return (
                f"the XCom {key!r} is {size_bytes} bytes long; at most {MAX_XCOM_BYTES} are allowed; "
                "write the value to a file or a bucket, and return its path"
            )
        if "\0" in key + value or not _is_text(key + value):
            return f"the XCom {key!r} has characters that databases reject: a NUL character or a lone surrogate"
    return None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_xcom(key: str, value: str) -> None:
    """Check that an XCom can be stored.

    Raises:
        CallRefusedError: The value is too large, or the text has characters that databases reject.
    """
    fault = find_fault([(key, value)])
    if fault is not None:
        raise CallRefusedError(RefusalKind.INVALID, fault)


def get_xcoms(connection: Connection, request: GetXCom, context: CallContext) -> tuple[str | None, ...]:
    """Return XComs in the order of the tasks; see `GetXCom`."""
    run = find_read_run(connection, request.run, request.dag_id, request.run_id)
    if run is None:
        return (None,) * len(request.task_ids)
    found = _fetch(connection, [run.id], request, request.task_ids)
    missing = [name for name in request.task_ids if name not in found]
    if request.include_prior and missing:
        for name in missing:
            value = _find_prior(connection, run, request, name)
            if value is not None:
                found[name] = value
    return tuple(found.get(name) for name in request.task_ids)


def find_read_run(connection: Connection, number: int, dag_id: str | None, run_id: str | None) -> Any:
    """Return the row of the run to read values from: the run itself, or the one that DAG and name select, or None."""
    own = connection.execute(select(_RUN.id, _RUN.dag, _RUN.logical_us).where(_RUN.id == number)).first()
    if own is None or (dag_id is None and run_id is None):
        return own
    statement: Select[Any] = select(_RUN.id, _RUN.dag, _RUN.logical_us)
    if dag_id is None:
        statement = statement.where(_RUN.dag == own.dag)
    else:
        statement = statement.where(_RUN.dag == select_dag(dag_id))
    if run_id is not None:
        return connection.execute(statement.where(_RUN.run_id == run_id)).first()
    if own.logical_us is not None:
        statement = statement.where(or_(_RUN.logical_us <= own.logical_us, _RUN.logical_us.is_(None)))
    return connection.execute(statement.order_by(_RUN.id.desc()).limit(1)).first()


def _fetch(connection: Connection, runs: Sequence[int], request: GetXCom, names: Sequence[str]) -> dict[str, str]:
    statement = (
        select(_TASK.task_id, _XCOM.value)
        .join(xcom, and_(_XCOM.task == _TASK.id, _XCOM.key == request.key))
        .where(and_(_TASK.run.in_(runs), _TASK.task_id.in_(names), _TASK.map_index == request.map_index))
    )
    found: dict[str, str] = dict(connection.execute(statement).all())
    left = [name for name in names if name not in found]
    if request.map_index < 0 or not left or request.key != "return_value":
        return found
    # Elements that run in one attempt have one instance, with the index 0.
    parts = (
        select(_TASK.task_id, task_part.c.value)
        .join(task_part, task_part.c.task == _TASK.id)
        .where(and_(_TASK.run.in_(runs), _TASK.task_id.in_(left), _TASK.map_index == 0))
        .where(and_(task_part.c.number == request.map_index, task_part.c.state == "success"))
    )
    return {name: value for name, value in connection.execute(parts) if value is not None} | found


def _find_prior(connection: Connection, run: Any, request: GetXCom, name: str) -> str | None:
    earlier = [_RUN.dag == run.dag, _RUN.id != run.id]
    earlier.append(_RUN.logical_us < run.logical_us if run.logical_us is not None else _RUN.id < run.id)
    statement = (
        select(_XCOM.value)
        .join(task_instance, _TASK.id == _XCOM.task)
        .join(dag_run, _RUN.id == _TASK.run)
        .where(and_(*earlier, _TASK.task_id == name, _TASK.map_index == request.map_index, _XCOM.key == request.key))
        .order_by(_RUN.logical_us.desc(), _RUN.id.desc())
        .limit(1)
    )
    found = connection.execute(statement).scalar()
    return None if found is None else str(found)


def list_xcoms(connection: Connection, request: ListXComs, context: CallContext) -> Listed[XComRecord]:
    """Return a page of the XComs of a run; see `ListXComs`."""
    run = find_run(connection, request.dag_id, request.run_id)
    number, _, key = (request.after or "").partition(":")
    results: list[XComRecord] = []
    if request.task_id is not None and key in ("", _RESULTS):
        results = _list_results(connection, run, request, int(number or -1))
        if len(results) > request.limit:
            return Listed(tuple(results[: request.limit]), f"{results[request.limit - 1].map_index}:{_RESULTS}")
        number = ""
    statement = (
        select(_TASK.id, _TASK.task_id, _TASK.map_index, _XCOM.key, _XCOM.value, _XCOM.created_us)
        .join(xcom, _XCOM.task == _TASK.id)
        .where(_TASK.run == run)
        .order_by(_TASK.id, _XCOM.key)
        .limit(request.limit + 1 - len(results))
    )
    if request.task_id is not None:
        statement = statement.where(_TASK.task_id == request.task_id)
    if request.map_index is not None and request.last_index not in (None, request.map_index):
        statement = statement.where(_TASK.map_index.between(request.map_index, request.last_index))
    elif request.map_index is not None:
        statement = statement.where(_TASK.map_index == request.map_index)
    if number:
        statement = statement.where(or_(_TASK.id > int(number), and_(_TASK.id == int(number), _XCOM.key > key)))
    rows = connection.execute(statement).all()
    found = [XComRecord(row.task_id, row.map_index, row.key, row.value, row.created_us) for row in rows]
    room = request.limit - len(results)
    if len(rows) <= room:
        return Listed((*results, *found), None)
    after = f"{rows[room - 1].id}:{rows[room - 1].key}" if room else f"{results[-1].map_index}:{_RESULTS}"
    return Listed((*results, *found[:room]), after)


def _list_results(connection: Connection, run: int, request: ListXComs, after: int) -> list[XComRecord]:
    """Return a page of the results of elements that run in one attempt, and one more; none for other tasks."""
    part = task_part.c
    of_attempt = and_(_TASK.run == run, _TASK.task_id == request.task_id, _TASK.map_index == 0)
    wanted = [of_attempt, part.number > after, part.state == "success", part.value.is_not(None)]
    if request.map_index is not None:
        last = request.map_index if request.last_index is None else request.last_index
        wanted.append(part.number.between(request.map_index, last))
    statement = (
        select(part.number, part.value, part.ended_us)
        .join(task_instance, _TASK.id == part.task)
        .where(and_(*wanted))
        .order_by(part.number)
        .limit(request.limit + 1)
    )
    rows = connection.execute(statement)
    return [XComRecord(request.task_id or "", number, "return_value", value, at_us) for number, value, at_us in rows]
