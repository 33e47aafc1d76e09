"""Checks of the values that hooks return, before any of them is used.

A wrong value is refused here, by name, while the hook that returned it can still be blamed; further in, it would break
the engine instead of one message. Invariants: a value that passes cannot make the engine's own steps raise; ids and
labels that pass can be encoded and shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from tidemill.core.errors import escape_surrogates
from tidemill.pipeline.handler.models import ErrorAction, ExecutorTask, PrecomputedResult
from tidemill.sinks.payloads import CollectResult

_PROGRAM = frozenset({str, type(None)})
_INPUT = frozenset({str, bytes, type(None)})
_LISTS = frozenset({list, tuple})


def check_tasks(hook: str, tasks: Any) -> list[ExecutorTask]:
    """Return the tasks that a hook returned.

    Raises:
        TypeError: The value is not a list of tasks, or a field of a task has an unusable type.
        ValueError: A time limit is not above 0.
    """
    if not isinstance(tasks, (list, tuple)):
        raise TypeError(f"{hook} must return a list of ExecutorTask, not {_describe(tasks)}")
    for index, task in enumerate(tasks):
        if not isinstance(task, ExecutorTask):
            raise TypeError(f"{hook} must return a list of ExecutorTask; item {index} is {_describe(task)}")
        _check(task)
    return list(tasks)


def _check(task: ExecutorTask) -> None:
    """Refuse unusable types; the exact-type comparisons before the `isinstance` calls are there for speed."""
    task_id = task.task_id
    if type(task_id) is not str:
        if not isinstance(task_id, str):
            raise _make_error(task, "task_id", "a string", task_id)
        # a subclass of str, numpy's for example, cannot be encoded into a beat
        task_id = task.task_id = str.__str__(task_id)
    if not task_id.isascii():
        task.task_id = escape_surrogates(task_id)
    args = task.args
    if type(args) not in _LISTS:
        _check_list(task, "args", "strings", args)
    for arg in args:
        if type(arg) is not str:
            _check_argument(task, arg)
    offsets = task.source_offsets
    if type(offsets) not in _LISTS:
        _check_list(task, "source_offsets", "whole numbers", offsets)
    for offset in offsets:
        if type(offset) is not int and not isinstance(offset, Integral):
            raise _make_error(task, "source_offsets", "a list of whole numbers", offset, "one with ")
    if type(task.binary_path) not in _PROGRAM and not isinstance(task.binary_path, str):
        raise _make_error(task, "binary_path", "a string or None", task.binary_path)
    if type(task.stdin) not in _INPUT and not isinstance(task.stdin, (str, bytes)):
        raise _make_error(task, "stdin", "a string, bytes or None", task.stdin)
    if task.timeout_seconds is not None:
        _check_limit(task)
    if task.env or not isinstance(task.env, dict):
        _check_texts(task, "env", task.env)
    if task.labels or not isinstance(task.labels, dict):
        _check_texts(task, "labels", task.labels)
        for name, value in task.labels.items():
            if not (name.isascii() and value.isascii()):
                task.labels = {escape_surrogates(name): escape_surrogates(value) for name, value in task.labels.items()}
                break
    if task.precomputed is not None:
        check_known(task, task.precomputed)


def _check_list(task: ExecutorTask, field: str, of: str, value: object) -> None:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise _make_error(task, field, f"a list of {of}", value)


def _check_argument(task: ExecutorTask, arg: object) -> None:
    if not isinstance(arg, (str, bytes, os.PathLike)):
        raise _make_error(task, "args", "a list of strings", arg, "one with ")


def _check_limit(task: ExecutorTask) -> None:
    limit = task.timeout_seconds
    if isinstance(limit, bool) or not isinstance(limit, Real):
        raise _make_error(task, "timeout_seconds", "a number of seconds or None", limit)
    if not limit > 0:
        raise ValueError(f"timeout_seconds of task {task.task_id!r} must be more than 0, not {limit!r}")


def _check_texts(task: ExecutorTask, field: str, value: object) -> None:
    if type(value) is not dict and not isinstance(value, Mapping):
        raise _make_error(task, field, "a mapping of strings to strings", value)
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise _make_error(
                task, field, "a mapping of strings to strings", text if isinstance(name, str) else name, "one with "
            )


def check_known(task: ExecutorTask, known: object) -> None:
    """Refuse a precomputed result with unusable types.

    Raises:
        TypeError: A field has an unusable type.
    """
    if not isinstance(known, PrecomputedResult):
        raise _make_error(task, "precomputed", "a PrecomputedResult or None", known)
    if not isinstance(known.stdout, (str, bytes)):
        raise _make_error(task, "precomputed.stdout", "a string or bytes", known.stdout)
    if not isinstance(known.stderr, str):
        raise _make_error(task, "precomputed.stderr", "a string", known.stderr)
    if not isinstance(known.exit_code, int):
        raise _make_error(task, "precomputed.exit_code", "a whole number", known.exit_code)


def _make_error(task: ExecutorTask, field: str, wanted: str, given: object, within: str = "") -> TypeError:
    of = "" if field == "task_id" else f" of task {repr(task.task_id)[:200]}"
    return TypeError(f"{field}{of} must be {wanted}, not {within}{_describe(given)}")


def _describe(value: object) -> str:
    return f"{type(value).__name__} ({repr(value)[:200]})"


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
        raise TypeError(f"on_error must return {wanted}, not {_describe(action)}") from None


def check_collect_result(value: Any) -> CollectResult | None:
    """Return a hook's CollectResult; None: there is nothing to deliver.

    Raises:
        TypeError: The hook returned neither a CollectResult nor None.
    """
    if value is None:
        return None
    if not isinstance(value, CollectResult):
        raise TypeError(f"a hook must return a CollectResult or None, not {_describe(value)}")
    return value if value.has_outputs else None
