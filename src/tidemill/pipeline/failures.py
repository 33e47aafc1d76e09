"""What goes wrong with the messages of a window, and what becomes of it: a dead letter, unless the brake holds it.

Invariants: a failure is written once or held; what comes after it (a task is terminal, a message is over) happens when
its letter is handed over, never while it is held; only the step that failed is run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tidemill.core.errors import describe_error
from tidemill.deadletters.letter import LetterKind
from tidemill.pipeline.brake import Case
from tidemill.pipeline.handler.models import ErrorKind, ExecutorError
from tidemill.pipeline.reports.failure_log import LOG_SECONDS, hook_raised, log_task, task_text
from tidemill.runtime.log import kind_of, limited

if TYPE_CHECKING:
    from tidemill.pipeline.tasks.pool import TaskRun
    from tidemill.pipeline.window import WindowRun


def parsed(window: WindowRun) -> bool:
    """Set the payload of a window's only message; return whether that went well."""
    message = window.messages[0]
    try:
        message.payload = window.engine.handler.deserialize_message(message)
    except (Exception, SystemExit) as error:
        _refuse(window, LetterKind.PARSE, error)
        return False
    window.is_parsed = True
    return True


def arrange_failed(window: WindowRun, error: Exception) -> None:
    """Refuse a single message; split a window so that its other messages go on."""
    engine, messages = window.engine, window.messages
    if len(messages) == 1:
        text = describe_error(error)
        limited(engine.log, LOG_SECONDS, about=kind_of(text)).warning(
            "arrange raised", message=_label(window), error=text, partition=window.lane.name
        )
        _refuse(window, LetterKind.ARRANGE, error)
        return
    half = len(messages) // 2
    for part in (slice(half, None), slice(0, half)):
        window.lane.waiting.appendleft(
            type(window)(engine, window.lane, messages[part], window.entries[part], window.arrived)
        )


def task_failed(window: WindowRun, run: TaskRun, error: ExecutorError, why: str = "") -> None:
    """Take a task that failed for good; `why`: the reason, if that is not the number of its tries."""
    text = task_text(error, why)
    cause = f"exit code {error.exit_code}" if error.kind is ErrorKind.EXIT else error.kind.value

    def again() -> None:
        run.attempts = 0
        window.engine.pool.submit(run)

    def write() -> None:
        log_task(window.engine.log, run, error, why)
        _letter(window, LetterKind.TASK, text, window.indexes_of(run), run, error)
        window.give_up(run, error)

    _fail(window, f"task: {cause}", text, window.indexes_of(run), again, write)


def hook_failed(
    window: WindowRun,
    hook: str,
    error: Exception,
    indexes: Sequence[int],
    run: TaskRun | None,
    returned: object,
    again: Callable[[], None],
    then: Callable[[], None],
) -> None:
    """Take a hook that raised.

    Args:
        window: The window.
        hook: Its name.
        error: What it raised.
        indexes: The messages that it was called for.
        run: The task that it was called for, if there is one.
        returned: What it returned, if that is what was wrong.
        again: Calls it again.
        then: Goes on as after any other end of the hook.
    """
    if window.lane.closed:
        return
    text = hook_raised(window.engine.log, hook, error, partition=window.lane.name)

    def write() -> None:
        _letter(window, LetterKind.HOOK, text, indexes, run, None, returned)
        then()

    _fail(window, f"{hook}: {type(error).__name__}", describe_error(error), indexes, again, write)


def window_hook_failed(window: WindowRun, error: Exception, returned: object) -> None:
    """Take an `on_window_complete` that raised: it is dead-lettered with all messages of its window."""
    hook, engine, messages = "on_window_complete", window.engine, window.messages
    text = hook_raised(engine.log, hook, error, partition=window.lane.name)
    well = sum(index not in window.causes for index in range(len(messages)))

    def write() -> None:
        engine.dead_letter(LetterKind.HOOK, text, messages, window.window_done, None, None, returned)
        if engine.brake is not None:
            engine.brake.window_failed(window, well)

    again = functools.partial(engine.hooks.submit, window.window_hook)
    cause = f"{hook}: {type(error).__name__}"
    _fail(window, cause, describe_error(error), range(len(messages)), again, write, is_window=True)


def _refuse(window: WindowRun, kind: LetterKind, error: BaseException) -> None:
    """Take a message that gets no task, the only one of its window."""
    engine, order, text = window.engine, window.lane.order, describe_error(error)
    if engine.brake is not None and order is not None:
        order.keep(window)

    def write() -> None:
        engine.reject(window.lane, window.messages[0], window.entries[0], kind, text)
        if engine.brake is not None:
            engine.brake.ended(window, 0)
        if order is not None:
            order.give_up(window)

    again = functools.partial(engine.intake.arrange_soon, window)
    _fail(window, f"{kind.value}: {type(error).__name__}", text, (0,), again, write)


def _fail(
    window: WindowRun,
    cause: str,
    text: str,
    indexes: Sequence[int],
    again: Callable[[], None],
    write: Callable[[], None],
    *,
    is_window: bool = False,
) -> None:
    """Write a dead letter, or let the brake decide; see `EngineBrake.failed`."""
    brake = window.engine.brake
    if brake is None:
        write()
    else:
        brake.failed(cause, text, Case(window, indexes, again, write, is_window=is_window))


def _letter(
    window: WindowRun,
    kind: LetterKind,
    text: str,
    indexes: Sequence[int],
    run: TaskRun | None,
    error: ExecutorError | None,
    refused: object = None,
) -> None:
    window.graph.hold(indexes)
    messages = [window.messages[index] for index in indexes]
    window.engine.dead_letter(kind, text, messages, functools.partial(window.released, indexes), run, error, refused)


def _label(window: WindowRun) -> str:
    message = window.messages[0]
    try:
        return window.engine.handler.message_label(message)
    except Exception as error:
        return f"{message.topic}/{message.partition}/{message.offset} (message_label raised {describe_error(error)})"
