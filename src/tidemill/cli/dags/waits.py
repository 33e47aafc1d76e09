"""Explains why the tasks of a run wait, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.cli.dags.views import format_clock

if TYPE_CHECKING:
    from tidemill.cli.dags.asking import StoreAsker
    from tidemill.core.tasks.alive import AliveServices
    from tidemill.store.calls.instance_calls import TaskRecord
    from tidemill.store.calls.run_calls import RunRecord
    from tidemill.web.dags.models import TaskWaitView

#: The number of triggers that one call describes.
_MANY = 500


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
    from tidemill.store.calls.instance_calls import DescribeTriggers
    from tidemill.store.calls.setting_calls import ListPools
    from tidemill.web.dags.waiting import ENDED, Around, describe_wait

    if all(task.state in ENDED for task in tasks):
        return {}
    found = store.ask(GetDag(run.dag_id, run.version))
    structure = None if found is None else msgspec.json.decode(found.structure, type=DagStructure)
    plans = {} if structure is None else {task.id: task for task in structure.tasks}
    groups = {} if structure is None else structure.list_groups()
    pools = {pool.name: pool for pool in store.ask(ListPools())}
    numbers = [task.trigger for task in tasks if task.state == "deferred" and task.trigger is not None]
    triggers = {
        each.id: each
        for start in range(0, len(numbers), _MANY)
        for each in store.ask(DescribeTriggers(tuple(numbers[start : start + _MANY])))
    }
    around = Around(pools, triggers, find_services(store))
    states = {task.task_id: task.state for task in tasks if task.map_index == UNMAPPED}
    waits: dict[int, str] = {}
    for task in tasks:
        plan = plans.get(task.task_id)
        inside = () if plan is None else groups.get(plan.mapped_group, ())
        wait = describe_wait(task, plan, states, run, around, inside)
        if wait is not None:
            waits[task.id] = _format_wait(wait)
    return waits


def _format_wait(wait: TaskWaitView) -> str:
    text = wait.text if wait.at is None else f"{wait.text} {format_clock(round(wait.at * 1e6))}"
    if wait.times_out_at is not None:
        text += f"; times out at {format_clock(round(wait.times_out_at * 1e6))}"
    return f"{text}; {wait.missing}" if wait.missing else text


def find_services(store: StoreAsker) -> AliveServices:
    """Return the services that are alive."""
    from tidemill.store.calls.service_calls import ListSessions
    from tidemill.web.dags.waiting import list_alive

    return list_alive(store.ask(ListSessions()))
