"""The method that resumes a deferred task, and the arguments that it accepts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from tidemill.dags.exceptions import (
    DagError,
    TaskFailed,
)

log = logging.getLogger(__name__)


def find_method(task: Any, name: object) -> Callable[..., Any]:
    method = getattr(task, name, None) if isinstance(name, str) else None
    if name == "":
        raise TaskFailed("the trigger fired an event that does not end the task, and next_method is not set; set it")
    if not callable(method):
        raise DagError(f"task {task.task_id!r}: {type(task).__name__} has no method {name!r} to resume with")
    found: Callable[..., Any] = method
    return found


def accepts_event(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters
    return "event" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def check_continuation(task: Any, name: object, kwargs: object) -> None:
    """Check that a method can resume the task with these arguments, before anything waits for the trigger.

    Raises:
        DagError: The method does not exist, or does not accept the arguments.
    """
    method = find_method(task, name)
    owner = f"task {task.task_id!r}: the kwargs of the deferral"
    if not isinstance(kwargs, Mapping):
        raise DagError(f"{owner} must be a dict with the arguments of {name}, not {type(kwargs).__name__}")
    for key in kwargs:
        if not isinstance(key, str):
            raise DagError(f"{owner} have the key {key!r}; argument names must be strings")
        if key in ("context", "event"):
            raise DagError(f"{owner} have {key!r}, which tidemill passes to {name} itself; use another name")
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return  # the method has no signature, for example because it is written in C
    event = {} if name == "execute" and not accepts_event(method) else {"event": None}
    try:
        signature.bind(None, **kwargs, **event)
    except TypeError as error:
        raise DagError(
            f"task {task.task_id!r}: {type(task).__name__}.{name} does not accept the arguments of the deferral "
            f"(context, {', '.join([*kwargs, *event])}): {error}"
        ) from None
