"""Checks and serializes the deferral of a task."""

from __future__ import annotations

from typing import Any, Final

from tidemill.core.errors import describe_error
from tidemill.core.tasks.endings import AttemptEnding, Deferral, Failure
from tidemill.dags.arguments import check_duration
from tidemill.dags.attempt.continuation import check_continuation
from tidemill.dags.attempt.streaming import StreamPlan
from tidemill.dags.exceptions import (
    DagError,
    TaskDeferred,
)
from tidemill.dags.execution.endings import classify, make_storable
from tidemill.dags.triggers.stream_key import write_key
from tidemill.dags.triggers.trigger_text import write_trigger
from tidemill.runtime.json.codec import encode
from tidemill.triggers.base import is_acknowledged

_MICROSECONDS: Final = 1_000_000


def defer(task: Any, deferral: TaskDeferred) -> AttemptEnding:
    """Check and serialize a deferral."""
    try:
        given = {} if deferral.kwargs is None else deferral.kwargs
        streams = task.handles_streams if deferral.streaming is None else deferral.streaming
        if deferral.method_name or not (streams and task.handles_streams):
            _check_deferral(task, deferral.method_name, given)
        idle_us = _read_duration(task, "idle_timeout", deferral.idle_timeout)
        kwargs = (
            StreamPlan(deferral.method_name, given, idle_us).write()
            if streams
            else encode(given, "kwargs of the deferral")
        )
        timeout = deferral.timeout
        timeout_us = _read_duration(task, "timeout", timeout)
        classpath, trigger_kwargs = write_trigger(deferral.trigger)
    except Exception as error:
        return classify(error, task)
    try:
        find_key = getattr(deferral.trigger, "shared_stream_key", None)
        key = None if find_key is None else find_key()
        stream_key = None if key is None else write_key(key)
    except Exception as error:
        return Failure(make_storable(f"shared_stream_key() of the trigger failed: {describe_error(error)}"))
    return Deferral(
        classpath,
        trigger_kwargs,
        deferral.method_name,
        kwargs,
        timeout_us,
        stream_key,
        streams=streams,
        idle_us=idle_us,
        acked=streams and stream_key is not None and is_acknowledged(type(deferral.trigger)),
    )


def _read_duration(task: Any, name: str, value: Any) -> int | None:
    """Return a duration in microseconds."""
    if value is None:
        return None
    duration = check_duration(f"task {task.task_id!r}", f"{name} of the deferral", value)
    return int(duration.total_seconds() * _MICROSECONDS)


def _check_deferral(task: Any, name: object, kwargs: object) -> None:
    """Check the method that a deferral names, and its arguments.

    Raises:
        DagError: There is no such method, or it does not accept the arguments.
    """
    if not name:
        raise DagError(
            f"task {task.task_id!r}: defer needs method_name, the method that resumes the task; only an operator with "
            "handle_trigger_events may leave it out"
        )
    check_continuation(task, name, kwargs)
