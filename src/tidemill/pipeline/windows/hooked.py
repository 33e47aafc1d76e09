"""The hooks that return payloads, and what each of them is called for: a task, a message, or a window."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.handler.models import ExecutorError, ExecutorResult
from tidemill.pipeline.hooks import begin_hook
from tidemill.pipeline.reports.message_group import make_message_group
from tidemill.pipeline.reports.report import WindowTimes
from tidemill.pipeline.tasks.task_run import TaskRun
from tidemill.runtime.messages import SourceMessage

#: What a hook that returns payloads is called for: a task, a message by its index, or (None) the whole window.
Hooked = TaskRun | int | None
TASK_HOOK = "on_task_complete"


class HookedWindow(Protocol):
    """What a hook is told about its window; see `WindowRun`."""

    context: EngineContext
    messages: list[SourceMessage]
    results: list[ExecutorResult | ExecutorError]
    runs_of: list[list[TaskRun]]
    times: WindowTimes


def name_hook(of: Hooked) -> str:
    """Return the name of the hook that is called for something."""
    if isinstance(of, TaskRun):
        return TASK_HOOK
    return "on_window_complete" if of is None else "on_message_complete"


def call_hook_for(window: HookedWindow, of: Hooked) -> Awaitable[Any]:
    """Call the hook for something; return what it returned, which is to be awaited."""
    handler = window.context.handler
    if isinstance(of, TaskRun):
        assert of.result is not None
        return begin_hook(handler.on_task_complete, of.result)
    if of is None:  # it may change these
        return begin_hook(handler.on_window_complete, [*window.results], [*window.messages])
    group = make_message_group(window.messages[of], window.runs_of[of], window.times)
    return begin_hook(handler.on_message_complete, group)
