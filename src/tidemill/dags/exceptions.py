"""What ends the attempt of a task otherwise than by returning, and what is wrong with a DAG.

The names of Airflow are accepted for those that users raise or catch.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tidemill.core.errors import TidemillError


class DagError(TidemillError, ValueError):
    """A DAG file is wrong; the message names the DAG or the task, and the argument."""


class DagCycleError(DagError):
    """Tasks wait for each other in a circle."""


class DuplicateTaskIdError(DagError):
    """Two tasks or groups of a DAG have the same id."""


class TaskError(TidemillError):
    """Base of what a task may raise to say how its attempt ends."""


class TaskSkipped(TaskError):
    """Raise it in a task to have it skipped."""


class TaskFailed(TaskError):
    """Raise it in a task to have it fail without retries."""


class TaskTimeout(BaseException):
    """Raised in a task that takes longer than its `execution_timeout`; not caught by `except Exception`."""


class SensorTimeout(TaskFailed):
    """A sensor waited for longer than its `timeout`: it fails without retries."""


class TaskDeferralError(TaskError):
    """The trigger of a deferred task raised, or ended without an event."""


class TaskDeferralTimeout(TaskDeferralError):
    """The trigger of a deferred task did not fire before the timeout of the deferral."""


class ParamValidationError(DagError):
    """A param has a value that its schema does not allow."""


class NotFoundError(TidemillError, KeyError):
    """A variable or connection does not exist."""

    def __str__(self) -> str:
        """Return the message; a `KeyError` would show it in quotes."""
        return str(self.args[0])


class LeftOutError(TidemillError, KeyError):
    """Something that Airflow has, and tidemill has not; the message says why, and what to use instead."""

    def __str__(self) -> str:
        """Return the message; a `KeyError` would show it in quotes."""
        return str(self.args[0])


class TaskDeferred(BaseException):
    """Ends an attempt that hands its task to a trigger; `except Exception` does not catch it.

    Args:
        trigger: A `tidemill.triggers.base.BaseTrigger`.
        method_name: The method of the operator that continues with the event.
        kwargs: More arguments of that method.
        timeout: How long the trigger may take, as a timedelta or in seconds; None: any time.
    """

    def __init__(
        self,
        *,
        trigger: Any,
        method_name: str,
        kwargs: Mapping[str, Any] | None = None,
        timeout: timedelta | float | None = None,
    ) -> None:
        """Check nothing: what is wrong fails the attempt, with its own message."""
        super().__init__()
        self.trigger = trigger
        self.method_name = method_name
        self.kwargs = dict(kwargs) if isinstance(kwargs, Mapping) else kwargs
        self.timeout = timeout

    def __repr__(self) -> str:
        """Show the trigger and the method."""
        return f"<TaskDeferred trigger={self.trigger!r} method={self.method_name}>"


AirflowException = TaskError
AirflowSkipException = TaskSkipped
AirflowFailException = TaskFailed
AirflowTaskTimeout = TaskTimeout
AirflowSensorTimeout = SensorTimeout
