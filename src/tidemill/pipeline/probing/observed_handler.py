"""A copy of the engine's handler whose hooks record their calls and results.

The copy shares the handler's attributes by reference. A hook that changes a shared object changes it for the engine,
too; an assignment to `self` affects only the copy.
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from tidemill.core.errors import describe_error
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorResult, ExecutorTask
from tidemill.runtime.log.tracebacks import CodePaths, rearrange

#: The hooks that process a message.
OBSERVED = (
    "deserialize_message",
    "arrange",
    "transform",
    "on_task_complete",
    "on_error",
    "on_message_complete",
    "on_window_complete",
)
#: More calls than this are only counted.
MOST_STAGES = 500
_MOST_FRAMES = 20


class HookCall:
    """A call of a hook.

    Attributes:
        hook: The hook's name.
        about: The id of the task that it is called for; '' if there is none.
        at: When it was called, by the loop's clock.
        ended_at: When it ended, by the loop's clock; None: it has not returned.
        trace: The traceback of its exception; '' if there is none.
    """

    __slots__ = ("_awaited", "about", "at", "ended_at", "hook", "trace")

    def __init__(self, hook: str, about: str) -> None:
        self.hook = hook
        self.about = about
        self.at = time.monotonic()
        self.ended_at: float | None = None
        self.trace = ""
        self._awaited: object = None

    def end(self, error: BaseException | None = None) -> None:
        """Record the end, and the exception if there is one."""
        self.ended_at = time.monotonic()
        self._awaited = None
        if error is not None:
            self.trace = format_trace(error)

    async def follow(self, awaited: Awaitable[Any]) -> Any:
        """Await a hook's result and record the end."""
        self._awaited = awaited
        try:
            returned = await awaited
        except BaseException as error:
            self.end(error)
            raise
        self.end()
        return returned

    def describe_wait(self) -> str:
        """Return where an unfinished hook is waiting, the innermost frame first."""
        lines, waiting = [], self._awaited
        for _ in range(_MOST_FRAMES):
            frame = getattr(waiting, "cr_frame", None)
            if frame is None:
                break
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            waiting = getattr(waiting, "cr_await", None)
        return "\n".join(f"waits in {line}" if not index else f"  {line}" for index, line in enumerate(lines[::-1]))


class Stages:
    """The calls of hooks.

    Attributes:
        calls: The first calls, in order.
        count: How many calls there were.
    """

    def __init__(self) -> None:
        self.calls: list[HookCall] = []
        self.count = 0

    def observe(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a hook so that its calls are recorded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            stage = HookCall(name, _find_task(args))
            self.count += 1
            if len(self.calls) < MOST_STAGES:
                self.calls.append(stage)
            try:
                returned = hook(*args, **kwargs)
            except BaseException as error:
                stage.end(error)
                raise
            # The caller refuses a result that cannot be awaited.
            if inspect.isawaitable(returned):
                return stage.follow(returned)
            stage.end()
            return returned

        return call


def copy_handler(handler: Handler[Any, Any], stages: Stages, cache: object, offload: object) -> Handler[Any, Any]:
    """Return a copy of a handler.

    Args:
        handler: The engine's handler.
        stages: Where calls are recorded.
        cache: The copy's cache; None: the cache of the engine's handler.
        offload: Runs the copy's blocking calls.
    """
    copied: Handler[Any, Any] = object.__new__(type(handler))
    attributes = copied.__dict__
    attributes.update(handler.__dict__)
    for kind in type(handler).__mro__:
        for name in vars(kind).get("__slots__", ()):
            if name not in ("__dict__", "__weakref__") and hasattr(handler, name):
                object.__setattr__(copied, name, getattr(handler, name))
    attributes["_offload"] = offload
    if cache is not None:
        attributes["cache"] = cache
    for name in OBSERVED:
        attributes[name] = stages.observe(name, getattr(copied, name))
    return copied


def _find_task(args: tuple[Any, ...]) -> str:
    first = args[0] if args else None
    task = first.task if isinstance(first, ExecutorResult) else first
    return task.task_id if isinstance(task, ExecutorTask) else ""


def format_trace(error: BaseException) -> str:
    """Return the traceback of an error, with the error and the user's own lines first; never raises."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # a user's exception class can raise any exception
        return describe_error(error)
    return rearrange(text, CodePaths())
