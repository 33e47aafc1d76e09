"""Turns failures of a window's tasks and hooks into retries or dead letters, unless the brake holds them.

Invariants: a failure is dead-lettered once, or held. Its consequences (the task is terminal, the message is done)
follow when its letter is handed over, never while it is held. Only the failed step is repeated.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

from tidemill.core.errors import escape_surrogates
from tidemill.core.retry import Retry, decide
from tidemill.deadletters.letter import LetterKind, summarize_stderr
from tidemill.pipeline.brake import Case
from tidemill.pipeline.checks import check_action
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.handler.models import ErrorAction, ErrorKind, ExecutorError, ExecutorTask
from tidemill.pipeline.hooks import LOG_SECONDS, begin_hook, call_hook, check_returned, log_hook_error
from tidemill.pipeline.partition import OwnedPartition
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.pipeline.windows.hooked import Hooked
from tidemill.runtime.kafka.source_message import MessageSpan, SourceMessage
from tidemill.runtime.log.setup import kind_of, throttle
from tidemill.runtime.log.user_code import explain_error


class FailingWindow(Protocol):
    """The interface of a window with a failure; see `WindowInFlight`."""

    context: EngineContext
    partition: OwnedPartition
    messages: list[SourceMessage]
    causes: dict[int, str]
    held_for_window: bool

    def find_indexes(self, of: Hooked) -> Sequence[int]:
        """Return the indexes of the messages that a step concerns."""
        ...

    def hold(self, of: Hooked) -> Callable[[], None]:
        """Hold the messages of a step; return the callback that releases them."""
        ...

    def end(self, of: Hooked, error: ExecutorError | None) -> None:
        """Continue after a failed step; `error` is the failure of the task itself, if that was it."""

    async def collect(self, of: Hooked) -> None:
        """Call a hook again."""


async def ask_on_error(
    context: EngineContext, flight: TaskInFlight, error: ExecutorError, locate: Callable[[Hooked], MessageSpan]
) -> ErrorAction | list[ExecutorTask]:
    """Return the decision of `on_error` about a failed attempt; DLQ if the hook raises or returns an invalid value."""
    try:
        hook = begin_hook(context.handler.on_error, flight.task, error)
        returned = await call_hook(hook, context.hooks.calls, "on_error", locate, flight)
        return check_returned(check_action, returned)
    except Exception as raised:
        log_hook_error(
            context.log,
            "on_error",
            raised,
            "on_error raised, or returned neither an ErrorAction nor tasks; the task is dead-lettered",
            task_id=flight.task.task_id,
        )
        return ErrorAction.DLQ


def retry_or_fail(window: FailingWindow, flight: TaskInFlight, error: ExecutorError) -> None:
    """Retry a task after its backoff, unless its attempts are used up or it can never start."""
    context = window.context
    decision = decide(flight.attempts, context.settings.executor.max_retries, context.backoff, random.getrandbits(32))
    if isinstance(decision, Retry) and not error.never_starts:
        if context.recorder is not None:
            seconds = round(decision.delay_seconds, 3)
            context.recorder.note_failure("task_retry", flight, error, delay_seconds=seconds)
        context.pool.retry(flight, decision.delay_seconds)
    else:
        handle_task_failure(window, flight, error)


def handle_task_failure(window: FailingWindow, flight: TaskInFlight, error: ExecutorError, why: str = "") -> None:
    """Handle a task that failed for good; `why` is the reason if its attempts are not used up."""
    context, text = window.context, _describe_task_error(error, why)
    flight.failure = text
    cause = f"exit code {error.exit_code}" if error.kind is ErrorKind.EXIT else error.kind.value

    def again() -> None:
        flight.attempts = 0
        context.pool.submit(flight)

    def write() -> None:
        _log_task_error(window, flight, error, why)
        _dead_letter(window, LetterKind.TASK, text, flight, error)

    write_or_hold(context, f"task: {cause}", text, _make_case(window, flight, again, write))


def handle_hook_failure(window: FailingWindow, hook: str, error: Exception, of: Hooked, returned: object) -> None:
    """Handle a hook that raised, or returned a value that cannot be delivered.

    Args:
        window: The window.
        hook: The hook's name.
        error: The hook's exception, or the reason why its value was refused.
        of: The task, message or window that the hook was called for.
        returned: The refused value, if that is the failure.
    """
    context = window.context
    text = log_hook_error(context.log, hook, error, partition=window.partition.name)
    well = sum(index not in window.causes for index in range(len(window.messages))) if of is None else 0

    def write() -> None:
        _dead_letter(window, LetterKind.HOOK, text, of, None, returned)
        if of is None and context.brake is not None:
            context.brake.window_failed(window.causes[0], well)

    again = functools.partial(context.hooks.submit, window.collect, of)
    cause = f"{hook}: {type(error).__name__}"
    write_or_hold(context, cause, explain_error(error, hook), _make_case(window, of, again, write))


def write_or_hold(context: EngineContext, cause: str, text: str, case: Case) -> None:
    """Write a dead letter, or let the brake decide; see `EngineBrake.failed`."""
    if context.brake is None:
        case.write()
    else:
        context.brake.failed(cause, text, case)


def _make_case(window: FailingWindow, of: Hooked, again: Callable[[], None], write: Callable[[], None]) -> Case:
    indexes = window.find_indexes(of) or range(len(window.messages))
    offsets = [window.messages[index].offset for index in indexes]
    stuck: Sequence[int] = () if of is None else offsets
    if window.held_for_window:  # no message of the window is resolved before all of them are
        stuck = [message.offset for message in window.messages]
    causes: MutableMapping[int, str] = window.causes
    return Case(window.partition, offsets, stuck, causes, indexes, again, write, is_window=of is None)


def _dead_letter(
    window: FailingWindow,
    kind: LetterKind,
    text: str,
    of: Hooked,
    error: ExecutorError | None,
    refused: object = None,
) -> None:
    # A window's own hook is dead-lettered with all its messages, some of which may already be committed.
    messages = [window.messages[index] for index in window.find_indexes(of)]
    flight = of if isinstance(of, TaskInFlight) else None
    window.partition.dead_letter(kind, text, messages, window.hold(of), flight, error, refused)
    window.end(of, error)


def _describe_task_error(error: ExecutorError, why: str = "") -> str:
    """Return the failure of a task in words.

    Args:
        error: The failure.
        why: Why the task is not retried, if its attempts are not used up.
    """
    if error.exception is not None:
        return why + escape_surrogates(error.exception)
    return why + (summarize_stderr(error.stderr) or f"exit code {error.exit_code}")


def _log_task_error(window: FailingWindow, flight: TaskInFlight, error: ExecutorError, why: str = "") -> None:
    """Log that a task failed for good, with the end of its stderr; equal failures are logged once in `LOG_SECONDS`.

    The program's output is masked before it is cut, so that no part of a secret remains.
    """
    log: Any = window.context.log
    stderr = summarize_stderr(error.stderr)
    exception = None if error.exception is None else why + escape_surrogates(error.exception)
    alike = (error.kind, error.exit_code, why, kind_of(exception), kind_of(stderr.rpartition("\n")[2]))
    throttle(log, LOG_SECONDS, about=alike).warning(
        "a task failed for good",
        task_id=flight.task.task_id,
        kind=error.kind.value,
        exit_code=error.exit_code,
        exception=exception or why or None,
        stderr=stderr,
        attempts=flight.attempts,
        partition=window.partition.name,
    )
