"""How failures of tasks and hooks are told: one line of the log for equal ones, and the words for their letters.

What a program or a hook said is masked before it is cut, so that no half of a secret is left over. Equal failures of
many messages are logged once per ten seconds, with their count; every one has its letter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidemill.core.errors import describe_error, sound
from tidemill.deadletters.letter import summarize_stderr
from tidemill.pipeline.handler.models import ExecutorError
from tidemill.runtime.log import kind_of, limited

if TYPE_CHECKING:
    from tidemill.pipeline.tasks.pool import TaskRun

#: Equal failures are logged once in so many seconds.
LOG_SECONDS = 10.0


def task_text(error: ExecutorError, why: str = "") -> str:
    """Return how a task failed, in words.

    Args:
        error: How it failed.
        why: Why it is not tried again, if that is not the number of its tries.
    """
    if error.exception is not None:
        return why + sound(error.exception)
    return why + (summarize_stderr(error.stderr) or f"exit code {error.exit_code}")


def log_task(log: Any, run: TaskRun, error: ExecutorError, why: str = "") -> None:
    """Log that a task failed for good; see `task_text`."""
    stderr = summarize_stderr(error.stderr)
    exception = None if error.exception is None else why + sound(error.exception)
    alike = (error.kind, error.exit_code, why, kind_of(exception), kind_of(stderr.rpartition("\n")[2]))
    limited(log, LOG_SECONDS, about=alike).warning(
        "a task failed for good",
        task_id=run.task.task_id,
        kind=error.kind.value,
        exit_code=error.exit_code,
        exception=exception or why or None,
        stderr=stderr,
        attempts=run.attempts,
        partition=run.window.lane.name,
    )


def hook_raised(log: Any, hook: str, error: Exception, event: str = "a hook raised", **details: object) -> str:
    """Log what a hook raised, and return it in words."""
    text = describe_error(error)
    limited(log, LOG_SECONDS, about=(hook, kind_of(text))).warning(event, hook=hook, exc_info=error, **details)
    return f"{hook}: {text}"
