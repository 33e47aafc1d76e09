"""The hooks that return payloads, and the subject of each call: a task, a message, or a window."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.handler.models import ExecutorError, ExecutorResult
from tidemill.pipeline.hooks import begin_hook
from tidemill.pipeline.reports.message_group import make_message_group
from tidemill.pipeline.reports.report import WindowTimes
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.runtime.kafka.source_message import SourceMessage

#: The subject of a hook that returns payloads: a task, a message by its index, or (None) the whole window.
Hooked = TaskInFlight | int | None
TASK_HOOK = "on_task_complete"


class HookedWindow(Protocol):
    """The part of a window that hooks are called with; see `WindowInFlight`."""

    context: EngineContext
    messages: list[SourceMessage]
    results: list[ExecutorResult | ExecutorError]
    flights_of: list[list[TaskInFlight]]
    times: WindowTimes


def name_hook(of: Hooked) -> str:
    """Return the name of the hook for a subject."""
    if isinstance(of, TaskInFlight):
        return TASK_HOOK
    return "on_window_complete" if of is None else "on_message_complete"


def call_hook_for(window: HookedWindow, of: Hooked) -> Awaitable[Any]:
    """Call the hook for a subject; return the awaitable that it returned."""
    handler = window.context.handler
    if isinstance(of, TaskInFlight):
        assert of.result is not None
        return begin_hook(handler.on_task_complete, of.result)
    if of is None:  # copies, because the hook may modify its lists
        return begin_hook(handler.on_window_complete, [*window.results], [*window.messages])
    group = make_message_group(window.messages[of], window.flights_of[of], window.times)
    return begin_hook(handler.on_message_complete, group)
