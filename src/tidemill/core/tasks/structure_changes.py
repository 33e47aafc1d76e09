"""Describes the differences between two structures of a DAG."""

from __future__ import annotations

from dataclasses import fields

from tidemill.core.tasks.structure import DagStructure, TaskStructure

#: The maximum number of differences to list.
_MAX_NAMED = 5


def describe_changes(before: DagStructure, now: DagStructure) -> str:
    """Return the differences between two structures, in words; empty if there are none.

    Example:
        >>> describe_changes(DagStructure("d", tags=("a",)), DagStructure("d", (TaskStructure("t"),)))
        "tags, new task 't'"
    """
    found = [
        field.name for field in fields(DagStructure) if field.name != "tasks" and _differs(field.name, before, now)
    ]
    old, new = ({task.id: task for task in each.tasks} for each in (before, now))
    found += [f"new task {name!r}" for name in new if name not in old]
    found += [f"no task {name!r}" for name in old if name not in new]
    for name in new:
        if name in old and old[name] != new[name]:
            what = [field.name for field in fields(TaskStructure) if _differs(field.name, old[name], new[name])]
            found.append(f"{' and '.join(what)} of task {name!r}")
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(found[:_MAX_NAMED]) + more


def _differs(name: str, before: object, now: object) -> bool:
    return bool(getattr(before, name) != getattr(now, name))
