"""Checks of the values that hooks return, before any of them is used.

A wrong value is refused here, by name, while the hook that returned it can still be blamed; further in, it would break
the engine instead of one message. Invariant: a value that passes cannot make the engine's own steps raise. Fields of
tasks are checked when a task is created; see `handler.task_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.pipeline.handler.models import ErrorAction, ExecutorTask
from tidemill.pipeline.handler.task_fields import describe_value
from tidemill.sinks.payloads import CollectResult


def check_tasks(hook: str, tasks: Any) -> list[ExecutorTask]:
    """Return the tasks that a hook returned; each was checked when it was created.

    Raises:
        TypeError: The value is not a list of tasks, or a field of a subclass of `ExecutorTask` has an unusable type.
        ValueError: A time limit of a subclass is not above 0.
    """
    if not isinstance(tasks, (list, tuple)):
        raise TypeError(f"{hook} must return a list of ExecutorTask, not {describe_value(tasks)}")
    for index, task in enumerate(tasks):
        if type(task) is not ExecutorTask:
            if not isinstance(task, ExecutorTask):
                raise TypeError(f"{hook} must return a list of ExecutorTask; item {index} is {describe_value(task)}")
            ExecutorTask.__post_init__(task)  # the subclass may have replaced it
    return list(tasks)


def find_source_indexes(
    offsets: Sequence[int], indexes_by_offset: Mapping[int, int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the messages of its window that a task works for.

    Args:
        offsets: The task's `source_offsets`.
        indexes_by_offset: The index of each message of the window, by offset.

    Returns:
        The indexes, () for the whole window; and the sorted offsets that are outside the window.
    """
    if not offsets:
        return (), ()
    try:
        if len(offsets) == 1:
            return (indexes_by_offset[offsets[0]],), ()
        return sorted({indexes_by_offset[offset] for offset in offsets}), ()
    except KeyError:
        own = sorted({indexes_by_offset[offset] for offset in offsets if offset in indexes_by_offset})
        return own, sorted(set(offsets) - set(indexes_by_offset))


def check_action(action: Any) -> ErrorAction | list[ExecutorTask]:
    """Return what `on_error` decided.

    Raises:
        TypeError: It returned neither an `ErrorAction` nor a list of tasks.
    """
    if isinstance(action, list):
        return check_tasks("on_error", action)
    try:
        return ErrorAction(action)
    except ValueError:
        known = ", ".join(each.name for each in ErrorAction)
        wanted = f"an ErrorAction ({known}) or a list of ExecutorTask"
        raise TypeError(f"on_error must return {wanted}, not {describe_value(action)}") from None


def check_collect_result(value: Any) -> CollectResult | None:
    """Return a hook's CollectResult; None: there is nothing to deliver.

    Raises:
        TypeError: The hook returned neither a CollectResult nor None.
    """
    if value is None:
        return None
    if not isinstance(value, CollectResult):
        raise TypeError(f"a hook must return a CollectResult or None, not {describe_value(value)}")
    return value if value.has_outputs else None
