"""The name of a task instance within its run: the task, and the index if it is an element of a mapped task.

A task that is not mapped has one instance, with the index UNMAPPED. The elements of a mapped task are numbered from 0.
"""

from __future__ import annotations

#: The index of an instance that is not an element of a mapped task.
UNMAPPED = -1
#: The largest index of an element.
MAX_INDEX = 2**31 - 1


def format_instance(task_id: str, map_index: int) -> str:
    """Return the name to display.

    Example:
        >>> format_instance("load", UNMAPPED), format_instance("load", 3)
        ('load', 'load[3]')
    """
    return task_id if map_index == UNMAPPED else f"{task_id}[{map_index}]"
