"""Builds the reports of attempts whose process ended without a result, and of callbacks."""

from __future__ import annotations

import signal

import structlog

from tidemill.core.tasks.endings import AttemptEnding, Failure, Loss
from tidemill.core.tasks.instance import format_instance
from tidemill.core.tasks.worker_slots import InterruptReason, WorkerLimits
from tidemill.services.zygote.messages import Exited
from tidemill.store.calls.worker_calls import CallbackReport, ClaimedAttempt, ClaimedCallback, LogPart

log = structlog.get_logger(__name__)

#: The signals by which the kernel ends a crashing program.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


def explain_end(
    why: InterruptReason, exited: Exited | None, file: str, limits: WorkerLimits, *, broke_off: bool = False
) -> AttemptEnding | None:
    """Return the result to report.

    Args:
        why: Why the process ended.
        exited: How the process ended; None: it never existed, or the zygote died.
        file: The DAG file of the attempt.
        limits: The limits of the worker.
        broke_off: Whether the process closed its connection, and was killed for that.

    Returns:
        The result; None: there is nothing to report.
    """
    match why:
        case InterruptReason.REPLACED:
            return None
        case InterruptReason.DRAIN:
            return Loss(is_return=True)
        case InterruptReason.LOST:
            return Loss()
        case InterruptReason.TIMEOUT:
            return Failure(
                "TaskTimeout: the attempt exceeded its time limit, did not end within "
                f"{limits.grace_seconds:g} s, and was killed"
            )
        case InterruptReason.IMPORT:
            return Failure(
                f"importing {file} took longer than {limits.import_seconds:g} s, twice dags.parse_timeout_seconds, so "
                "its process was killed; move slow work into tasks, or raise dags.parse_timeout_seconds"
            )
        case InterruptReason.CRASH:
            return Loss() if exited is None else Failure(_explain_status(exited.status, broke_off))


def report_callback(
    claim: ClaimedAttempt, callback: ClaimedCallback, result: AttemptEnding, log_end: LogPart | None
) -> CallbackReport:
    """Return the report of a callback that has ended; log its error."""
    error = result.error if isinstance(result, Failure) else None
    if error is not None:
        where = {"task": format_instance(claim.task_id, claim.map_index)} if claim.task_id else {}
        log.warning(
            "a callback failed", dag=claim.dag_id, run=claim.run_id, **where, callback=callback.name, error=error
        )
    is_return = isinstance(result, Loss) and result.is_return
    return CallbackReport(callback.id, error, isinstance(result, Loss), log_end, is_return)


def _explain_status(status: int, broke_off: bool) -> str:
    if broke_off:
        return (
            "the task closed the connection of its process to the worker, so the process was killed; close only "
            "descriptors that the task has opened"
        )
    if status >= 0:
        return f"the task ended its process with exit code {status} (os._exit, or an exec of another program)"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    if -status in _CRASHES:
        return f"the process of the task crashed ({name}): a fault in compiled code, or too deep a recursion"
    if -status == signal.SIGKILL:
        return f"the process of the task was killed ({name}), not by tidemill; the machine may have run out of memory"
    return f"the process of the task was ended by {name}, which tidemill did not send"
