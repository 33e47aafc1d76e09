"""Graph algorithms over the tasks of a DAG: topological order, cycles, and transitive relatives."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from tidemill.dags.exceptions import DagCycleError

#: Longer cycles are cut in the message.
_MAX_SHOWN = 12


class Linked(Protocol):
    """The edges of a task."""

    upstream_task_ids: set[str]
    downstream_task_ids: set[str]


@dataclass(slots=True)
class NodeEdges:
    """The edges of a node that is not a task, or that has more edges than its task."""

    upstream_task_ids: set[str]
    downstream_task_ids: set[str]


def add_groups(
    tasks: Mapping[str, Linked], groups: Mapping[str, tuple[Collection[str], Collection[str]]]
) -> dict[str, Linked]:
    """Return the edges of tasks with those of mapped groups.

    Args:
        tasks: The tasks.
        groups: For each group the tasks that give its values, which it depends on, and its own, which depend on it.
    """
    found: dict[str, Linked] = {
        name: NodeEdges(set(task.upstream_task_ids), set(task.downstream_task_ids)) for name, task in tasks.items()
    }
    for name, (before, after) in groups.items():
        found[name] = NodeEdges(set(before), set(after))
        for one in before:
            found[one].downstream_task_ids.add(name)
        for one in after:
            found[one].upstream_task_ids.add(name)
    return found


def sort_tasks(tasks: Mapping[str, Linked]) -> list[str]:
    """Return the ids in topological order; tasks on a cycle or downstream of one are missing.

    The order does not depend on set order.
    """
    missing = {name: len(task.upstream_task_ids) for name, task in tasks.items()}
    ready = deque(sorted(name for name, count in missing.items() if not count))
    found = []
    while ready:
        name = ready.popleft()
        found.append(name)
        for after in sorted(tasks[name].downstream_task_ids):
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    return found


def check_cycles(dag_id: str, tasks: Mapping[str, Linked]) -> None:
    """Check that the tasks have no cycle.

    Raises:
        DagCycleError: There is a cycle; the message shows it.
    """
    sorted_ids = set(sort_tasks(tasks))
    left = sorted(name for name in tasks if name not in sorted_ids)
    if not left:
        return
    # Each remaining task has a remaining upstream task, so walking upstream must reach a cycle.
    path, index = [left[0]], {left[0]: 0}
    while True:
        before = min(name for name in tasks[path[-1]].upstream_task_ids if name not in sorted_ids)
        if before in index:
            break
        index[before] = len(path)
        path.append(before)
    circle = [before, *reversed(path[index[before] :])]
    shown = " >> ".join(circle[:_MAX_SHOWN]) + (" >> ..." if len(circle) > _MAX_SHOWN else "")
    raise DagCycleError(f"DAG {dag_id!r}: the dependencies form a cycle: {shown}; remove one of the edges")


def find_relatives(tasks: Mapping[str, Linked], task_id: str, *, upstream: bool) -> set[str]:
    """Return the ids of all tasks downstream of a task, or upstream of it if `upstream` is True."""
    found: set[str] = set()
    waiting = [task_id]
    while waiting:
        task = tasks[waiting.pop()]
        new = (task.upstream_task_ids if upstream else task.downstream_task_ids) - found
        found |= new
        waiting.extend(new)
    found.discard(task_id)
    return found
