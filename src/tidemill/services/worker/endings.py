"""What is said of an attempt whose process ended without a result, and of a callback."""

from __future__ import annotations

import signal

import structlog

from tidemill.core.tasks.worker_slots import InterruptReason, WorkerLimits
from tidemill.services.zygote.messages import Exited
from tidemill.store.calls.worker_calls import (
    CallbackReport,
    ClaimedAttempt,
    ClaimedCallback,
    Failure,
    LogPart,
    Loss,
    Result,
)

log = structlog.get_logger(__name__)

#: What the kernel sends to a program that does something impossible.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


def explain_end(
    why: InterruptReason, exited: Exited | None, file: str, limits: WorkerLimits, *, broke_off: bool = False
) -> Result | None:
    """Return what to report.

    Args:
        why: Why it ended.
        exited: How the process ended; None: it was never there, or what starts processes died.
        file: The DAG file of the attempt.
        limits: Of the worker.
        broke_off: Whether it closed its connection, and was killed for that.

    Returns:
        None if nobody wants to know.
    """
    match why:
        case InterruptReason.REPLACED:
            return None
        case InterruptReason.DRAIN | InterruptReason.LOST:
            return Loss()
        case InterruptReason.TIMEOUT:
            return Failure(
                "TaskTimeout: the attempt took longer than it may, and did not end within "
                f"{limits.grace_seconds:g} s; it was killed"
            )
        case InterruptReason.IMPORT:
            return Failure(
                f"importing {file} took longer than {limits.import_seconds:g} s, twice dags.parse_timeout_seconds, so "
                "its process was killed; move slow work into tasks, or raise dags.parse_timeout_seconds"
            )
        case InterruptReason.CRASH:
            return Loss() if exited is None else Failure(_explain_status(exited.status, broke_off))


def report_callback(
    claim: ClaimedAttempt, callback: ClaimedCallback, result: Result, log_end: LogPart | None
) -> CallbackReport:
    """Return what to report of a callback that has ended, and log that it failed."""
    error = result.error if isinstance(result, Failure) else None
    if error is not None:
        where = {"task": claim.task_id} if claim.task_id else {}
        log.warning(
            "a callback failed", dag=claim.dag_id, run=claim.run_id, **where, callback=callback.name, error=error
        )
    return CallbackReport(callback.id, error, isinstance(result, Loss), log_end)


def _explain_status(status: int, broke_off: bool) -> str:
    if broke_off:
        return "the task closed the connection of its process to the worker; the process was killed"
    if status >= 0:
        return f"the task ended its process with exit code {status} (os._exit, or a program that took its place)"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    if -status in _CRASHES:
        return f"the process of the task crashed ({name}): a fault in compiled code, or recursion that is too deep"
    if -status == signal.SIGKILL:
        return f"the process of the task was killed ({name}), not by tidemill; the machine may have run out of memory"
    return f"the process of the task was ended by {name}, which tidemill did not send"
