"""Formats the structure of a DAG, with its tasks in an order in which they can run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.cli.dags.views import build_dag_row
from tidemill.cli.terminal.tables import Column, find_width, format_table
from tidemill.core.tasks.structure import DagStructure, ParamStructure, TaskStructure

if TYPE_CHECKING:
    from tidemill.store.calls.dag_calls import DagDetails

#: The fields of `StartStructure` that have no values of users.
_SHOWN = ("classpath", "method", "timeout_us")
_COLUMNS = (
    Column("TASK", cut=True),
    Column("OPERATOR", cut=True),
    Column("RETRIES", right=True, optional=True),
    Column("POOL", optional=True),
    Column("RULE", optional=True),
    Column("AFTER", detail=True),
)
_PARAM_COLUMNS = (
    Column("PARAM", cut=True),
    Column("DEFAULT", cut=True),
    Column("SCHEMA", cut=True, optional=True),
    Column("DESCRIPTION", optional=True),
)


def show_structure(text: bytes) -> Any:
    """Return a stored structure as JSON values, without the arguments of triggers."""
    found = json.loads(text)
    for task in found.get("tasks", ()):
        if "start" in task:
            task["start"] = {name: task["start"][name] for name in _SHOWN if name in task["start"]}
    return found


def format_structure(found: DagDetails) -> Iterator[str]:
    """Yield the lines that describe a DAG."""
    import msgspec

    structure = msgspec.json.decode(found.structure, type=DagStructure)
    name, state, schedule, following, file, tags = build_dag_row(found.dag)
    yield f"{name} ({state}, version {found.dag.version}), from {file}"
    yield f"schedule: {schedule}{f', next run {following} UTC' if following else ''}"
    if tags:
        yield f"tags: {tags}"
    if found.unshared:
        yield f"each attempt imports {file} again; the file {found.unshared}, which forked processes cannot share"
    if structure.doc:
        yield ""
        yield from structure.doc.strip().splitlines()
    if structure.params:
        yield ""
        yield from format_table(_PARAM_COLUMNS, [_build_param_row(param) for param in structure.params], find_width())
    yield ""
    upstream = structure.list_upstream()
    rows = [_build_row(task, upstream[task.id]) for task in sort_tasks(structure)]
    yield from format_table(_COLUMNS, rows, find_width())


def _build_row(task: TaskStructure, upstream: Sequence[str]) -> tuple[str, ...]:
    retries = str(task.retries) if task.retries else ""
    pool = "" if task.pool == "default_pool" else task.pool
    rule = "" if task.rule == "all_success" else task.rule
    return task.id, task.operator, retries, pool, rule, ", ".join(upstream)


def _build_param_row(param: ParamStructure) -> tuple[str, ...]:
    default = "(required)" if param.default is None else param.default
    return param.name, default, "" if param.schema == "{}" else param.schema, param.description


def sort_tasks(structure: DagStructure) -> list[TaskStructure]:
    """Return the tasks of a DAG with upstream tasks first, otherwise by id.

    Example:
        >>> dag = DagStructure("d", (TaskStructure("a", upstream=("b",)), TaskStructure("b")))
        >>> [task.id for task in sort_tasks(dag)]
        ['b', 'a']
    """
    from graphlib import TopologicalSorter

    by_id = {task.id: task for task in structure.tasks}
    sorter = TopologicalSorter(structure.list_upstream())
    sorter.prepare()
    found: list[TaskStructure] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        found += [by_id[name] for name in ready]
        sorter.done(*ready)
    return found
