"""Explains why the tasks of a run wait, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.cli.dags.views import TASK_COLUMNS, Listing, build_task_row, encode_task, format_clock, show_rows
from tidemill.cli.terminal.tables import Column

if TYPE_CHECKING:
    from tidemill.cli.dags.asking import StoreAsker
    from tidemill.core.tasks.alive import AliveServices
    from tidemill.store.calls.instance_calls import TaskRecord
    from tidemill.store.calls.run_calls import RunRecord
    from tidemill.web.dags.models import TaskWaitView


def describe_waits(store: StoreAsker, run: RunRecord, tasks: Sequence[TaskRecord]) -> dict[int, str]:
    """Return the reasons why tasks wait, by task number; running and ended tasks are left out.

    Args:
        store: The store.
        run: The run.
        tasks: All tasks of the run.
    """
    import msgspec

    from tidemill.core.tasks.instance import UNMAPPED
    from tidemill.core.tasks.structure import DagStructure
    from tidemill.store.calls.dag_calls import GetDag
    from tidemill.web.dags.waiting import ENDED, describe_wait, look_around

    if all(task.state in ENDED for task in tasks):
        return {}
    found = store.ask(GetDag(run.dag_id, run.version))
    structure = None if found is None else msgspec.json.decode(found.structure, type=DagStructure)
    plans = {} if structure is None else {task.id: task for task in structure.tasks}
    groups = {} if structure is None else structure.list_groups()
    file, paused = ("", False) if found is None else (found.dag.file, found.dag.paused)
    around = look_around(store.ask, structure, tasks, file, paused=paused)
    states = {task.task_id: task.state for task in tasks if task.map_index == UNMAPPED}
    waits: dict[int, str] = {}
    for task in tasks:
        plan = plans.get(task.task_id)
        inside = () if plan is None else groups.get(plan.mapped_group, ())
        wait = describe_wait(task, plan, states, run, around, inside)
        if wait is not None:
            waits[task.id] = _format_wait(wait)
    return waits


def show_tasks(tasks: Sequence[TaskRecord], waits: Mapping[int, str], *, as_json: bool, nothing: str) -> None:
    """Print tasks with the reasons why they wait.

    Args:
        tasks: The tasks.
        waits: The reasons, by task number.
        as_json: Whether to print JSON.
        nothing: The text for an empty list, unless JSON is printed.
    """
    columns = (*TASK_COLUMNS[:-1], Column("ELEMENTS; WAITS FOR, OR ERROR", detail=True))

    def build_row(task: TaskRecord) -> tuple[str, ...]:
        *row, error = build_task_row(task)
        return (*row, "; ".join(text for text in (waits.get(task.id), error) if text))

    def encode(task: TaskRecord) -> dict[str, Any]:
        return encode_waiting_task(task, waits)

    show_rows([tasks], Listing(columns, build_row, encode), as_json=as_json, nothing=nothing)


def encode_waiting_task(task: TaskRecord, waits: Mapping[int, str]) -> dict[str, Any]:
    """Return a task as a document, with the reason why it waits."""
    return {**encode_task(task), "waits_for": waits.get(task.id)}


def _format_wait(wait: TaskWaitView) -> str:
    text = wait.text if wait.at is None else f"{wait.text} {format_clock(round(wait.at * 1e6))}"
    text += f"; {wait.where}" if wait.where else ""
    text += f"; since {format_clock(round(wait.since * 1e6))}" if wait.since is not None else ""
    if wait.times_out_at is not None:
        text += f"; times out at {format_clock(round(wait.times_out_at * 1e6))}"
    return f"{text}; {wait.missing}" if wait.missing else text


def find_services(store: StoreAsker) -> AliveServices:
    """Return the services that are alive."""
    from tidemill.store.calls.service_calls import DescribeServices
    from tidemill.web.dags.waiting import list_alive

    return list_alive(store.ask(DescribeServices()))
