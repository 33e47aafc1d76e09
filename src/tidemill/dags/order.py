"""What comes before and after the tasks of a DAG, over any number of edges."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Protocol

from tidemill.dags.exceptions import DagCycleError

#: A longer circle is cut in the message.
_MAX_SHOWN = 12


class Linked(Protocol):
    """A task, as far as its edges are concerned."""

    upstream_task_ids: set[str]
    downstream_task_ids: set[str]


def sort_tasks(tasks: Mapping[str, Linked]) -> list[str]:
    """Return the ids so that each comes after those before it; those in a circle, and behind one, are missing.

    The order does not depend on that of sets.
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
    """Make sure that no task waits for itself.

    Raises:
        DagCycleError: There is a circle; the message shows it.
    """
    sorted_ids = set(sort_tasks(tasks))
    left = sorted(name for name in tasks if name not in sorted_ids)
    if not left:
        return
    # Each task that is left has one before it that is left: going back ends in a circle.
    path, place = [left[0]], {left[0]: 0}
    while True:
        before = min(name for name in tasks[path[-1]].upstream_task_ids if name not in sorted_ids)
        if before in place:
            break
        place[before] = len(path)
        path.append(before)
    circle = [before, *reversed(path[place[before] :])]
    shown = " >> ".join(circle[:_MAX_SHOWN]) + (" >> ..." if len(circle) > _MAX_SHOWN else "")
    raise DagCycleError(f"DAG {dag_id!r}: tasks wait for each other in a circle: {shown}; remove one of the edges")


def find_relatives(tasks: Mapping[str, Linked], task_id: str, *, upstream: bool) -> set[str]:
    """Return the ids of all tasks after one; `upstream`: before it."""
    found: set[str] = set()
    waiting = [task_id]
    while waiting:
        task = tasks[waiting.pop()]
        new = (task.upstream_task_ids if upstream else task.downstream_task_ids) - found
        found |= new
        waiting.extend(new)
    found.discard(task_id)
    return found
