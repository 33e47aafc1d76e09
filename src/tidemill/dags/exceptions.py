"""Exceptions that end an attempt of a task, and errors in DAG files.

Exceptions that users raise or catch are also available under Airflow's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tidemill.core.errors import TidemillError


class DagError(TidemillError, ValueError):
    """A DAG file is invalid; the message names the DAG or task, and the argument."""


class DagCycleError(DagError):
    """The dependencies between tasks form a cycle."""


class DuplicateTaskIdError(DagError):
    """Two tasks or groups of a DAG have the same id."""


class TaskError(TidemillError):
    """Base of the exceptions with which a task ends its attempt."""


class TaskSkipped(TaskError):
    """Raise this in a task to skip it."""


class TaskFailed(TaskError):
    """Raise this in a task to fail it without retries."""


class TaskTimeout(BaseException):
    """Raised in a task that exceeds its `execution_timeout`; `except Exception` does not catch it."""


class SensorTimeout(TaskFailed):
    """A sensor exceeded its `timeout`; it fails without retries."""


class TaskDeferralError(TaskError):
    """The trigger of a deferred task raised an exception, or ended without an event."""


class TaskDeferralTimeout(TaskDeferralError):
    """The trigger of a deferred task did not fire before the deferral timed out."""


class ParamValidationError(DagError):
    """The value of a param violates its schema."""


class NotFoundError(TidemillError, KeyError):
    """A variable, a connection or another requested value does not exist."""

    def __str__(self) -> str:
        """Return the message without the quotes that `KeyError` adds."""
        return str(self.args[0])


class LeftOutError(TidemillError, KeyError):
    """A feature of Airflow that tidemill does not have; the message says why and what to use instead."""

    def __str__(self) -> str:
        """Return the message without the quotes that `KeyError` adds."""
        return str(self.args[0])


class TaskDeferred(BaseException):
    """Ends an attempt and hands its task to a trigger; `except Exception` does not catch it.

    Args:
        trigger: A `tidemill.triggers.base.BaseTrigger`.
        method_name: The operator's method that resumes the task with the trigger's event.
        kwargs: More arguments for that method.
        timeout: How long to wait for the trigger, as a timedelta or in seconds; None: no limit. For a stream, the limit
            of the whole stream.
        streaming: Whether all events of the trigger are delivered; None: if the operator defines
            `handle_trigger_events`.
        idle_timeout: How long each event of a stream may take; None: no limit.
    """

    def __init__(
        self,
        *,
        trigger: Any,
        method_name: str = "",
        kwargs: Mapping[str, Any] | None = None,
        timeout: timedelta | float | None = None,
        streaming: bool | None = None,
        idle_timeout: timedelta | float | None = None,
    ) -> None:
        """Store the arguments unchecked: invalid ones fail the attempt later, with a message of their own."""
        super().__init__()
        self.trigger = trigger
        self.method_name = method_name
        self.kwargs = dict(kwargs) if isinstance(kwargs, Mapping) else kwargs
        self.timeout = timeout
        self.streaming, self.idle_timeout = streaming, idle_timeout

    def __repr__(self) -> str:
        return f"<TaskDeferred trigger={self.trigger!r} method={self.method_name}>"


AirflowException = TaskError
AirflowSkipException = TaskSkipped
AirflowFailException = TaskFailed
AirflowTaskTimeout = TaskTimeout
AirflowSensorTimeout = SensorTimeout
