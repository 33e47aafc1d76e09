"""What runs in this process now: the attempt, its context, and whom it asks for variables and connections.

A process makes one attempt at a time, so threads that the task starts see the same; triggers that run beside each other
in one event loop have services of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tidemill.core.errors import TidemillError
from tidemill.dags.task_services import TaskServices


class NotRunningError(TidemillError, RuntimeError):
    """Something is asked for that exists only while a task runs."""


class _Attempt:
    """The attempt that this process makes."""

    def __init__(self) -> None:
        self.context: dict[str, Any] | None = None
        self.operator: Any = None
        self.services: TaskServices | None = None
        #: It was told to end, whether or not its code let it.
        self.interrupted = False
        #: The operator whose `on_kill` was called, or is being called.
        self.killed: Any = None
        self.kill_lock = threading.Lock()


_attempt = _Attempt()
_services: ContextVar[TaskServices | None] = ContextVar("services", default=None)


@contextmanager
def running(operator: Any, context: dict[str, Any], services: TaskServices) -> Iterator[None]:
    """Let a context be the current one."""
    before = _attempt.context, _attempt.operator, _attempt.services
    _attempt.interrupted = False
    _attempt.context, _attempt.operator, _attempt.services = context, operator, services
    try:
        yield
    finally:
        _attempt.context, _attempt.operator, _attempt.services = before


@contextmanager
def serving(services: TaskServices) -> Iterator[None]:
    """Let variables and connections come from these services in this asyncio task, for triggers."""
    token = _services.set(services)
    try:
        yield
    finally:
        _services.reset(token)


def get_current_context() -> dict[str, Any]:
    """Return the context of the task that runs.

    Raises:
        NotRunningError: No task runs.
    """
    if _attempt.context is None:
        raise NotRunningError("get_current_context() was called while no task runs; call it inside a task")
    return _attempt.context


def get_current_operator() -> Any:
    """Return the operator that is being executed, for `on_kill`; None: there is none."""
    return _attempt.operator


def note_interrupted() -> None:
    """Note that the attempt is to end: `on_kill` is called at the latest when it does."""
    _attempt.interrupted = True


def is_interrupted() -> bool:
    """Return whether the attempt was told to end."""
    return _attempt.interrupted


@contextmanager
def killing(operator: Any) -> Iterator[bool]:
    """Yield whether `on_kill` of an operator is to be called: once, and another thread waits until that is over."""
    with _attempt.kill_lock:
        first, _attempt.killed = _attempt.killed is not operator, operator
        yield first


def find_services(what: str) -> TaskServices:
    """Return whom to ask.

    Args:
        what: What is asked for, for the message.

    Raises:
        NotRunningError: No task runs: DAG files are read where there is no store.
    """
    services = _services.get() or _attempt.services
    if services is None:
        raise NotRunningError(
            f"{what} is available only while a task or trigger runs; use a template, like {{{{ var.value.name }}}}, or "
            "read it inside the task"
        )
    return services
