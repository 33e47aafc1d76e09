"""What hooks return, checked before anything of it is believed.

A value that is wrong is refused here, by name, while the hook that returned it can still be blamed: further in, it
would break the engine instead of the one message. Invariant: what passes cannot make the engine's own steps raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from tidemill.core.errors import sound
from tidemill.pipeline.models import ErrorAction, ExecutorTask, PrecomputedResult
from tidemill.sinks.payloads import CollectResult


def checked_tasks(hook: str, tasks: Any) -> list[ExecutorTask]:
    """Return the tasks that a hook returned.

    Raises:
        TypeError: It is no list of tasks, or a field of one has a type that cannot be used.
    """
    if not isinstance(tasks, (list, tuple)) or not all(isinstance(task, ExecutorTask) for task in tasks):
        raise TypeError(f"{hook} must return a list of ExecutorTask, not {type(tasks).__name__}: {repr(tasks)[:200]}")
    for task in tasks:
        _check(task)
    return list(tasks)


def _check(task: ExecutorTask) -> None:
    if not isinstance(task.task_id, str):
        raise _wrong(task, "task_id", "text")
    if not task.task_id.isascii():
        task.task_id = sound(task.task_id)
    if not _is_list(task.args):
        raise _wrong(task, "args", "a list of text")
    if not _is_list(task.source_offsets) or not _are_integers(task.source_offsets):
        raise _wrong(task, "source_offsets", "a list of integers")
    if not isinstance(task.labels, Mapping):
        raise _wrong(task, "labels", "a mapping")
    if task.labels:
        task.labels = {sound(str(name)): sound(str(value)) for name, value in task.labels.items()}
    known = task.precomputed
    if known is not None and not (
        isinstance(known, PrecomputedResult)
        and isinstance(known.stdout, (str, bytes))
        and isinstance(known.stderr, str)
        and isinstance(known.exit_code, int)
    ):
        raise _wrong(task, "precomputed", "None or a PrecomputedResult of stdout (text or bytes), stderr and exit code")


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, Sequence) and not isinstance(value, (str, bytes)))


def _are_integers(values: Iterable[object]) -> bool:
    return all(type(value) is int or isinstance(value, Integral) for value in values)


def _wrong(task: ExecutorTask, field: str, wanted: str) -> TypeError:
    return TypeError(f"{field} of task {task.task_id!r} must be {wanted}, not {repr(getattr(task, field))[:200]}")


def checked_action(action: Any) -> ErrorAction | list[ExecutorTask]:
    """Return what `on_error` decided.

    Raises:
        TypeError: It returned a list that is not one of tasks.
        ValueError: It returned something else that is no `ErrorAction`.
    """
    return checked_tasks("on_error", action) if isinstance(action, list) else ErrorAction(action)


def collected(value: Any) -> CollectResult | None:
    """Return what a hook collected, None where there is nothing to deliver.

    Raises:
        TypeError: It returned something else.
    """
    if value is None:
        return None
    if not isinstance(value, CollectResult):
        raise TypeError(f"a hook must return a CollectResult or None, not {type(value).__name__}")
    return value if value.has_outputs else None
