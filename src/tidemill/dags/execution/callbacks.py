"""Runs the callbacks of tasks and runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tidemill.core.errors import describe_error
from tidemill.core.tasks.endings import Failure, Success
from tidemill.dags.attempt.exception_text import rebuild_exception
from tidemill.dags.attempt.lazy_context import Context
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.attempt.task_services import CallbackClaim
from tidemill.dags.exceptions import (
    TaskTimeout,
)
from tidemill.dags.execution.endings import make_storable

log = logging.getLogger(__name__)


def explain_callback(callback: CallbackClaim) -> dict[str, Any]:
    """Return the context keys that describe the event to a callback."""
    error = callback.error
    return {"exception": None if error is None else rebuild_exception(error, callback.origin), "reason": error}


def run_callbacks(task: Any, callback: CallbackClaim, context: Context) -> AttemptResult:
    context = context.extend(explain_callback(callback))
    failed = call_all(getattr(task, f"{callback.name}_callback", ()), context, callback.name)
    return AttemptResult(Failure(failed, may_retry=False) if failed else Success())


def call_all(callbacks: tuple[Callable[..., Any], ...], context: Context, name: str) -> str:
    """Call all callbacks in order; return the first error, or an empty string."""
    failed = ""
    for callback in callbacks:
        try:
            callback(context)
        except (KeyboardInterrupt, TaskTimeout):
            raise
        except BaseException as error:  # including `SystemExit`
            log.exception("the %s callback failed", name)
            failed = failed or make_storable(f"the {name} callback failed: {describe_error(error)}")
    return failed
