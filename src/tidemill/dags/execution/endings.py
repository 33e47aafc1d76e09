"""The endings of attempts: what an exception or an event of a stream means for the task."""

from __future__ import annotations

import logging
from types import FrameType
from typing import Any, Final

from tidemill.core.errors import describe_error, escape_surrogates
from tidemill.core.tasks.endings import AttemptEnding, Failure, Skip, Success
from tidemill.core.wording import shorten
from tidemill.dags.attempt.current import killing
from tidemill.dags.attempt.exception_text import write_origin
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.attempt.task_services import AttemptClaim, EndingEvent, TaskServices
from tidemill.dags.exceptions import (
    SensorTimeout,
    TaskDeferralError,
    TaskDeferralTimeout,
    TaskFailed,
    TaskSkipped,
    TaskTimeout,
)

log = logging.getLogger(__name__)
#: Longer errors are cut here, before secrets are masked; the text shown to people is cut much shorter later.
_MAX_ERROR: Final = 1_000_000


def end_late_stream(error: BaseException, task: Any, claim: AttemptClaim) -> AttemptEnding | None:
    """Return the ending of an attempt whose stream has exceeded its time limit; None: it was interrupted for another
    reason.
    """
    stream = claim.stream
    if type(error) is not TaskTimeout or stream is None or stream.due_us is None or stream.due_us != claim.deadline_us:
        return None
    kill(task)
    # As if it had been too late while no attempt ran.
    text = f"the stream did not end before the timeout of the {'sensor' if task.is_sensor else 'deferral'}"
    if task.soft_fail or task.never_fail:
        return classify(TaskSkipped(text), task)
    return classify(SensorTimeout(text) if task.is_sensor else TaskDeferralTimeout(text), task)


def end_by_event(ending: EndingEvent, task: Any, services: TaskServices) -> AttemptResult:
    """Return the result of an attempt that an event of its stream ends."""
    if ending.state == "success":
        return AttemptResult(Success(), ending.xcoms)
    for key, value in ending.xcoms:
        services.push_xcom(key, value)
    if ending.state == "skipped":
        return AttemptResult(Skip())
    error = ending.error.strip() or "the trigger fired a TaskFailedEvent"
    return AttemptResult(classify(TaskDeferralError(error), task))


def classify(error: BaseException, task: Any = None) -> AttemptEnding:
    """Return the ending for an exception, and log the exception with its traceback."""
    if isinstance(error, TaskSkipped):
        reason = str(error)
        log.info("skipped: %s", reason or "TaskSkipped was raised")
        return Skip(make_storable(reason))
    if isinstance(error, TaskTimeout) and task is not None:
        kill(task)
    # The frames of this package would only distract in the traceback.
    shown = error.with_traceback(skip_own_frames(error))
    log.error("the attempt failed: %s", describe_error(error), exc_info=(type(error), shown, shown.__traceback__))
    if isinstance(error, SystemExit):
        return Failure(make_storable(f"the task called sys.exit({error.code!r})"))
    return Failure(make_storable(describe_error(error)), not isinstance(error, TaskFailed), write_origin(shown))


def make_storable(text: str, limit: int = _MAX_ERROR) -> str:
    """Return a text that every database accepts: without NUL and lone surrogates, and cut at the limit."""
    return shorten(escape_surrogates(text).replace("\0", "\\x00"), limit)


def skip_own_frames(error: BaseException) -> Any:
    """Return the traceback of an error without the leading frames of this package."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None and _is_own(frame.tb_frame):
        frame = frame.tb_next
    return frame


def _is_own(frame: FrameType) -> bool:
    return bool(frame.f_globals.get("__package__") == __package__)


def kill(task: Any) -> None:
    """Call `on_kill` of a task that is stopped from outside, at most once; exceptions are logged."""
    try:
        with killing(task) as first:
            if first:
                task.on_kill()
    except KeyboardInterrupt:
        raise
    except BaseException:  # including `SystemExit`: the cause of the kill decides the ending
        log.exception("on_kill of task %r failed", task.task_id)
