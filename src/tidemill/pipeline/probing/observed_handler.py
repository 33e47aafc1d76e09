"""A copy of the engine's handler whose hooks say when they are called, and how they end.

The copy has the handler's own attributes, by reference: what a hook changes inside of a shared object is changed for
the engine, too; what it assigns to `self` stays with the copy.
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
from tidemill.runtime.tracebacks import CodePlaces, rearrange

#: The hooks that a message passes.
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


class Stage:
    """A call of a hook.

    Attributes:
        hook: The hook's name.
        about: The task that it is called for; ''.
        at: The loop's time of the call.
        ended_at: That of its end; None: it has not returned.
        trace: What it raised; ''.
    """

    __slots__ = ("_awaited", "about", "at", "ended_at", "hook", "trace")

    def __init__(self, hook: str, about: str) -> None:
        """Begin."""
        self.hook = hook
        self.about = about
        self.at = time.monotonic()
        self.ended_at: float | None = None
        self.trace = ""
        self._awaited: object = None

    def end(self, error: BaseException | None = None) -> None:
        """Note the end, and what was raised."""
        self.ended_at = time.monotonic()
        self._awaited = None
        if error is not None:
            self.trace = format_trace(error)

    async def follow(self, awaited: Awaitable[Any]) -> Any:
        """Await what a hook returned."""
        self._awaited = awaited
        try:
            returned = await awaited
        except BaseException as error:
            self.end(error)
            raise
        self.end()
        return returned

    def describe_wait(self) -> str:
        """Return where a hook waits that has not returned, the innermost place first."""
        places, waiting = [], self._awaited
        for _ in range(_MOST_FRAMES):
            frame = getattr(waiting, "cr_frame", None)
            if frame is None:
                break
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            waiting = getattr(waiting, "cr_await", None)
        return "\n".join(f"waits in {place}" if not index else f"  {place}" for index, place in enumerate(places[::-1]))


class Stages:
    """The calls of hooks.

    Attributes:
        calls: The first of them, in order.
        count: How many there were.
    """

    def __init__(self) -> None:
        """Start without calls."""
        self.calls: list[Stage] = []
        self.count = 0

    def observe(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that is noted when it is called."""

        def call(*args: Any, **kwargs: Any) -> Any:
            stage = Stage(name, _find_task(args))
            self.count += 1
            if len(self.calls) < MOST_STAGES:
                self.calls.append(stage)
            try:
                returned = hook(*args, **kwargs)
            except BaseException as error:
                stage.end(error)
                raise
            # What cannot be awaited is refused by who called it.
            if inspect.isawaitable(returned):
                return stage.follow(returned)
            stage.end()
            return returned

        return call


def copy_handler(handler: Handler[Any, Any], stages: Stages, cache: object, offload: object) -> Handler[Any, Any]:
    """Return a copy of a handler.

    Args:
        handler: The engine's.
        stages: Where calls are noted.
        cache: What it finds as its cache; None: what the engine's handler has.
        offload: Runs its blocking calls.
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
    """Return the traceback of an error, the error and the user's own lines first; never raises."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # a user's error can be anything
        return describe_error(error)
    return rearrange(text, CodePlaces())
