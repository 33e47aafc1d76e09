"""Lets a running task choose which downstream tasks are skipped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tidemill.dags.arguments import suggest
from tidemill.dags.exceptions import TaskFailed


def skip_all_except(context: Any, chosen: Any) -> None:
    """Skip the direct downstream tasks, except chosen ones and those downstream of a chosen one.

    Args:
        context: The context of the task.
        chosen: The id of a task or group, several ids, or None.

    Raises:
        TaskFailed: An id is not in the DAG, or is not a string.
    """
    ids = [] if chosen is None else [chosen] if isinstance(chosen, str) else chosen
    if not isinstance(ids, Iterable) or not all(isinstance(one, str) for one in ids):
        raise TaskFailed(f"a branch must return the id of a task, a list of them, or None; got {chosen!r}")
    task = context["task"]
    dag = task.dag
    followed: set[str] = set()
    for one in ids:
        if one in dag.groups:
            followed.update(root.task_id for root in dag.groups[one].find_roots())
        elif one in dag.task_dict:
            followed.add(one)
        else:
            after = sorted(task.downstream_task_ids)
            known = suggest(one, after) if after else "the task has no downstream tasks"
            raise TaskFailed(
                f"the branch returned {one!r}, which is not a task or group of DAG {dag.dag_id!r}; {known}"
            )
    for one in list(followed):
        followed |= dag.find_relatives(one)
    skip(context, task.downstream_task_ids - followed)


def skip(context: Any, task_ids: Iterable[str]) -> None:
    """Skip direct downstream tasks once this task has succeeded."""
    context["ti"].skipped.update(task_ids)


def skip_all_downstream(context: Any) -> None:
    """Skip all downstream tasks except teardowns, regardless of their trigger rules."""
    context["ti"].skips_all = True
