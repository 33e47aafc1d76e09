"""The attempt that this process runs: its context, and its access to variables and connections.

A process runs one attempt at a time, so threads that the task starts share its state. Triggers run concurrently in one
event loop, so each has its services in a context variable.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tidemill.core.errors import TidemillError
from tidemill.dags.attempt.task_services import SharedValues, TaskServices


class NotRunningError(TidemillError, RuntimeError):
    """A function that needs a running task was called outside of one."""


class _Attempt:
    """The state of the attempt that this process runs."""

    def __init__(self) -> None:
        self.context: dict[str, Any] | None = None
        self.operator: Any = None
        self.services: TaskServices | None = None
        #: The attempt was asked to stop, whether or not its code has obeyed.
        self.interrupted = False
        #: The operator whose `on_kill` has been called or is being called.
        self.killed: Any = None
        self.kill_lock = threading.Lock()


_attempt = _Attempt()
_shared_values: ContextVar[SharedValues | None] = ContextVar("shared_values", default=None)
_element: ContextVar[dict[str, Any] | None] = ContextVar("element", default=None)


@contextmanager
def running(operator: Any, context: dict[str, Any], services: TaskServices) -> Iterator[None]:
    """Make `context` the current one inside the block."""
    before = _attempt.context, _attempt.operator, _attempt.services
    _attempt.interrupted = False
    _attempt.context, _attempt.operator, _attempt.services = context, operator, services
    try:
        yield
    finally:
        _attempt.context, _attempt.operator, _attempt.services = before


@contextmanager
def telling(context: dict[str, Any]) -> Iterator[None]:
    """Make `context` the current one of this thread or asyncio task, which runs one of many elements."""
    token = _element.set(context)
    try:
        yield
    finally:
        _element.reset(token)


@contextmanager
def serving(values: SharedValues) -> Iterator[None]:
    """Serve variables and connections from `values` in this asyncio task; used for triggers."""
    token = _shared_values.set(values)
    try:
        yield
    finally:
        _shared_values.reset(token)


def get_current_context() -> dict[str, Any]:
    """Return the context of the running task.

    Raises:
        NotRunningError: No task is running.
    """
    element = _element.get()
    if element is not None:
        return element
    if _attempt.context is None:
        raise NotRunningError("get_current_context() was called while no task runs; call it inside a task")
    return _attempt.context


def get_current_operator() -> Any:
    """Return the operator that is being executed, for `on_kill`; None if there is none."""
    return _attempt.operator


def note_interrupted() -> None:
    """Record that the attempt was asked to stop; `on_kill` is called when the attempt ends, if not before."""
    _attempt.interrupted = True


def is_interrupted() -> bool:
    """Return whether the attempt was asked to stop."""
    return _attempt.interrupted


@contextmanager
def killing(operator: Any) -> Iterator[bool]:
    """Yield whether to call `on_kill` of an operator: True once. Other threads wait until that call has returned."""
    with _attempt.kill_lock:
        first, _attempt.killed = _attempt.killed is not operator, operator
        yield first


def get_services() -> TaskServices:
    """Return the services of the running task.

    Raises:
        NotRunningError: No task is running.
    """
    if _attempt.services is None:
        raise NotRunningError("a function that needs a running task was called outside of one; call it inside a task")
    return _attempt.services


def find_shared_values(what: str) -> SharedValues:
    """Return the access of the running task or trigger to variables and connections.

    Args:
        what: The value that is requested, for the message.

    Raises:
        NotRunningError: No task is running; DAG files are parsed without access to the store.
    """
    values = _shared_values.get() or _attempt.services
    if values is None:
        raise NotRunningError(
            f"{what} is available only while a task or trigger runs; use a template, like {{{{ var.value.name }}}}, or "
            "read it inside the task"
        )
    return values
