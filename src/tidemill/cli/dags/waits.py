"""What the tasks of a run wait for, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.cli.dags.views import format_clock

if TYPE_CHECKING:
    from tidemill.cli.dags.asking import Asker
    from tidemill.store.people_calls import RunRecord, TaskRecord


def describe_waits(store: Asker, run: RunRecord, tasks: Sequence[TaskRecord]) -> dict[int, str]:
    """Return what tasks wait for, by their numbers; one that runs or has ended is left out.

    Args:
        store: The store.
        run: The run.
        tasks: All its tasks.
    """
    import msgspec

    from tidemill.core.tasks.structure import DagStructure
    from tidemill.store.people_calls import GetDag
    from tidemill.store.setting_calls import ListPools
    from tidemill.web.dags.waiting import ENDED, describe_wait

    if all(task.state in ENDED for task in tasks):
        return {}
    found = store.ask(GetDag(run.dag_id, run.version))
    structure = None if found is None else msgspec.json.decode(found.structure, type=DagStructure)
    plans = {} if structure is None else {task.id: task for task in structure.tasks}
    pools = {pool.name: pool for pool in store.ask(ListPools())}
    states = {task.task_id: task.state for task in tasks}
    waits: dict[int, str] = {}
    for task in tasks:
        wait = describe_wait(task, plans.get(task.task_id), states, run, pools.get(task.pool))
        if wait is not None:
            waits[task.id] = wait.text if wait.at is None else f"{wait.text} {format_clock(round(wait.at * 1e6))}"
    return waits
