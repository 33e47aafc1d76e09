"""Says what a task waits for, from its record, the structure of its DAG and the states of its run. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.core.tasks.structure import TaskStructure
from tidemill.core.wording import format_count
from tidemill.store.people_calls import RunRecord, TaskRecord
from tidemill.store.setting_calls import PoolRecord
from tidemill.web.dags.models import Wait

ENDED = frozenset({"success", "failed", "skipped", "upstream_failed"})
_SHOWN = 5


def describe_wait(
    task: TaskRecord,
    structure: TaskStructure | None,
    states: Mapping[str, str],
    run: RunRecord,
    pool: PoolRecord | None,
) -> Wait | None:
    """Return what a task waits for; None: it runs, or has ended.

    Args:
        task: The task.
        structure: What its DAG says of it; None: nothing.
        states: The states of all tasks of the run.
        run: The run.
        pool: The pool of the task; None: it does not exist.
    """
    due = None if task.due_us is None else task.due_us / 1e6
    match task.state:
        case "none":
            return _describe_upstream(structure, states, run)
        case "scheduled":
            return Wait(kind="slots", text=_describe_pool(task, pool), names=[task.pool])
        case "queued":
            return Wait(kind="worker", text=f"a free worker of queue {task.queue}", names=[task.queue])
        case "deferred":
            number = "" if task.trigger is None else f" {task.trigger}"
            text = f"an event of its trigger{number}"
            return Wait(kind="trigger", text=text if due is None else f"{text}, until", at=due)
        case "up_for_retry":
            return Wait(kind="retry", text=f"try {task.tries + 1} of {task.max_tries}, at", at=due)
        case "ending":
            return Wait(kind="ending", text="its last attempt to clean up and end")
        case _:
            return None


def _describe_upstream(structure: TaskStructure | None, states: Mapping[str, str], run: RunRecord) -> Wait:
    if run.state == "queued":
        return Wait(kind="run", text="the run to begin: its DAG is paused, or has enough active runs")
    names = [name for name in (structure.upstream if structure else ()) if states.get(name) not in ENDED]
    if not names:
        past = structure is not None and (structure.depends_on_past or structure.wait_for_downstream)
        text = "its instance in the run before" if past else "the scheduler"
        return Wait(kind="past" if past else "scheduler", text=text)
    more = len(names) - _SHOWN
    shown = ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return Wait(kind="upstream", text=f"upstream {shown}", names=names)


def _describe_pool(task: TaskRecord, pool: PoolRecord | None) -> str:
    if pool is None:
        return f"pool {task.pool}, which does not exist; create it"
    wanted = format_count(task.pool_slots, "slot")
    if pool.used + task.pool_slots > pool.slots:
        return f"{wanted} of pool {pool.name}, where {pool.used} of {pool.slots} are held"
    return f"{wanted} of pool {pool.name}, or a limit on active tasks"
