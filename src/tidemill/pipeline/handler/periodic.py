"""Periodic hooks: the decorator that declares them, and their runner in an engine.

`core.pipeline.periodic` decides when a hook runs next. Invariants: runs of one hook never overlap. An exception ends at
most the hook that raised it, and only if the hook was declared so. After `stop` none runs or starts.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import structlog

from tidemill.core.errors import HandlerError, describe_error
from tidemill.core.pipeline.periodic import OnError, Periodic, PeriodicOutcome, Scope, Sleep
from tidemill.pipeline.hooks import HookCalls, call_hook
from tidemill.runtime.loop.engine_tasks import EngineTasks

log = structlog.get_logger(__name__)

#: The attribute that the decorator sets.
MARK = "__tidemill_periodic__"
#: How long a run may take to end after it is cancelled.
CANCEL_SECONDS = 5.0

F = TypeVar("F", bound=Callable[..., Any])


def periodic(seconds: float, on_error: str = "continue", scope: str = "engine") -> Callable[[F], F]:
    """Run an async method of a handler periodically in the engines.

    Each cycle sleeps first and then runs the method. The first begins once the engine may take messages; stopping the
    engine cancels the hook.

    Args:
        seconds: The sleep before each run.
        on_error: After an exception, which is logged, 'continue' sleeps and runs again, and 'stop' ends the hook.
        scope: 'engine' runs it in every engine, 'pipeline' only in the engine of slot 0.

    Raises:
        HandlerError: An argument is invalid, or the decorated object is not an async method without arguments.

    Example:
        >>> class Rates:
        ...     @periodic(60)
        ...     async def refresh(self) -> None: ...
    """
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < math.inf:
        hint = "; write @periodic(60)" if callable(seconds) else ""
        raise HandlerError(f"@periodic needs a positive number of seconds, not {seconds!r}{hint}")
    hook = Periodic(
        float(seconds),
        _check_choice(OnError, "on_error", on_error),
        _check_choice(Scope, "scope", scope),
    )

    def declare(method: F) -> F:
        name = getattr(method, "__qualname__", repr(method))
        if not inspect.iscoroutinefunction(method):
            raise HandlerError(f"@periodic: {name} must be an async def")
        try:
            inspect.signature(method).bind(None)
        except TypeError:
            raise HandlerError(f"@periodic: {name} must take no arguments except self") from None
        setattr(method, MARK, hook)
        return method

    return declare


E = TypeVar("E", OnError, Scope)


def _check_choice(kind: type[E], name: str, value: Any) -> E:
    try:
        return kind(value)
    except ValueError:
        known = " or ".join(repr(each.value) for each in kind)
        raise HandlerError(f"@periodic: {name} must be {known}, not {value!r}") from None


def find_periodic_hooks(handler: object) -> dict[str, Periodic]:
    """Return the periodic hooks that a handler's class declares, by name."""
    found = {}
    for name in dir(type(handler)):
        hook = getattr(inspect.getattr_static(type(handler), name), MARK, None)
        if isinstance(hook, Periodic):
            found[name] = hook
    return found


class PeriodicStatistics(msgspec.Struct, frozen=True):
    """Counts of periodic hooks.

    Attributes:
        runs: Runs that started.
        errors: Runs that raised.
    """

    runs: int
    errors: int


class PeriodicRunner:
    """Runs a handler's periodic hooks in one engine.

    Args:
        handler: The handler.
        slot: The engine's slot.
        tasks: Runs the hooks.
        calls: Registers running hooks.
    """

    def __init__(
        self, handler: object, slot: int, tasks: EngineTasks | None = None, calls: HookCalls | None = None
    ) -> None:
        self._calls = calls
        self._engine_tasks = tasks or EngineTasks()
        self._handler = handler
        self._slot = slot
        self._hooks = find_periodic_hooks(handler)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Hooks that an exception ended for good, and its text.
        self.stopped: dict[str, str] = {}
        self._runs = 0
        self._errors = 0
        #: Called after each run with the hook, its duration in seconds, and its exception as text.
        self.on_run: Callable[[str, float, str | None], None] | None = None

    def statistics(self) -> PeriodicStatistics:
        return PeriodicStatistics(self._runs, self._errors)

    def start(self) -> None:
        """Start the first sleep of each hook."""
        for name, hook in self._hooks.items():
            step = hook.decide_first(self._slot)
            if isinstance(step, Sleep):
                self._tasks[name] = self._engine_tasks.run(f"periodic {name}", self._repeat(name, hook, step))

    async def stop(self) -> None:
        """Cancel the hooks."""
        for task in self._tasks.values():
            self._engine_tasks.cancel(task)
        if not self._tasks:
            return
        _, left = await asyncio.wait(self._tasks.values(), timeout=CANCEL_SECONDS)
        if left:
            log.warning("cancelled periodic hooks have not ended", hooks=[t.get_name() for t in left])

    async def _repeat(self, name: str, hook: Periodic, step: Sleep) -> None:
        while True:
            await asyncio.sleep(step.seconds)
            self._runs += 1
            begun, raised = time.monotonic(), None
            try:
                await call_hook(getattr(self._handler, name)(), self._calls, name)
                outcome = PeriodicOutcome.RETURNED
            except Exception as error:
                outcome = PeriodicOutcome.RAISED
                self._errors += 1
                raised = describe_error(error)
                log.exception("a periodic hook raised", hook=name, then=hook.on_error.value)
                if hook.on_error is OnError.STOP:
                    self.stopped[name] = raised
            if self.on_run is not None:
                self.on_run(name, time.monotonic() - begun, raised)
            after = hook.decide_next(outcome)
            if not isinstance(after, Sleep):
                return
            step = after
