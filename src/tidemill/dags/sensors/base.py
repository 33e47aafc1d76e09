"""The base of sensors: tasks that check a condition repeatedly and occupy no worker between two checks.

Whatever its `mode`, a sensor defers until its next check. Invariant: the timeout counts from the first check of a try,
across all deferrals.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar, NoReturn

from tidemill.core.errors import describe_error
from tidemill.dags.arguments import check_bool, check_choice, check_duration
from tidemill.dags.exceptions import DagError, SensorTimeout, TaskDeferred, TaskFailed, TaskSkipped
from tidemill.dags.operator import BaseOperator
from tidemill.dags.sensors.attributes import find_changed, write_attributes
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.triggers.base import BaseTrigger, StartTriggerArgs
from tidemill.triggers.builtin.temporal import DateTimeTrigger

_MODES = ("poke", "reschedule")
#: A timeout of 0 means that the condition must already hold.
_LEAST_SECONDS = 0.001


class PokeReturnValue:
    """A return value of `poke`: whether the condition holds, and a value for other tasks.

    Args:
        is_done: Whether the condition holds.
        xcom_value: The value that the sensor returns when it is done.
    """

    def __init__(self, is_done: bool, xcom_value: Any = None) -> None:
        self.is_done = is_done
        self.xcom_value = xcom_value

    def __bool__(self) -> bool:
        """Return `is_done`."""
        return self.is_done


class BaseSensorOperator(BaseOperator):
    """Base of sensors; override `poke`, or `execute` to defer to a trigger of your own.

    Each poke runs in a new process, whatever the `mode`. Attributes that `poke` sets or changes survive until the next
    poke of the same try if they are plain data: numbers, strings, bytes, times, and lists, tuples, sets and dicts of
    these, up to 1 MiB. Everything else is reset to the state after the constructor and the import of the DAG file:
    clients, hooks and other objects, module globals, and variables of enclosing functions.

    Args:
        poke_interval: The time between two pokes, as a timedelta or in seconds.
        timeout: How long to wait in total, counted from the first poke.
        soft_fail: Whether to skip the task where it would fail.
        never_fail: Whether to skip the task if `poke` raises any exception; cannot be combined with `soft_fail`.
        mode: `poke` or `reschedule`; in both modes the sensor defers between two pokes.
        exponential_backoff: Whether the interval doubles after each poke.
        max_wait: The longest interval.
        kwargs: The arguments of `BaseOperator`.
    """

    is_sensor: ClassVar[bool] = True
    ui_color = "#e6f1f2"

    def __init__(
        self,
        *,
        poke_interval: timedelta | float = 60.0,
        timeout: timedelta | float = 604_800.0,
        soft_fail: bool = False,
        never_fail: bool = False,
        mode: str = "poke",
        exponential_backoff: bool = False,
        max_wait: timedelta | float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        owner = f"task {self.task_id!r}"
        self.poke_interval = check_duration(owner, "poke_interval", poke_interval).total_seconds()
        self.timeout = check_duration(owner, "timeout", timeout, zero=True).total_seconds()
        self.soft_fail = check_bool(owner, "soft_fail", soft_fail)
        self.never_fail = check_bool(owner, "never_fail", never_fail)
        if soft_fail and never_fail:
            raise DagError(f"{owner}: soft_fail and never_fail are both True; set only one of them")
        self.mode = check_choice(owner, "mode", mode, _MODES)
        self.exponential_backoff = check_bool(owner, "exponential_backoff", exponential_backoff)
        longest = None if max_wait is None else check_duration(owner, "max_wait", max_wait).total_seconds()
        self.max_wait = longest

    def poke(self, context: Any) -> bool | PokeReturnValue:
        """Return whether the condition holds.

        Args:
            context: The context, as `get_current_context` returns it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define poke")

    def execute(self, context: Any) -> Any:
        """Poke for the first time."""
        return self._look(context, STORE_CLOCK.now(), 1, {})

    def look_again(
        self,
        context: Any,
        started: datetime,
        looks: int,
        attributes: Mapping[str, Any] | None = None,
        event: Any = None,
    ) -> Any:
        """Poke again after an interval.

        Args:
            context: The context, as `get_current_context` returns it.
            started: The time of the first poke.
            looks: The number of pokes so far.
            attributes: The attributes that earlier pokes have set.
            event: The event of the trigger that ended the interval.
        """
        vars(self).update(attributes or {})
        return self._look(context, started, looks + 1, attributes or {})

    def _look(self, context: Any, started: datetime, looks: int, attributes: Mapping[str, Any]) -> Any:
        before = write_attributes(self)
        try:
            found = self.poke(context)
        except (TaskSkipped, TaskDeferred):
            raise
        except Exception as error:
            self._give_up(error)
        if inspect.isawaitable(found):
            raise TaskFailed(
                "poke returned a coroutine, which is never awaited; define poke with def instead of async def"
            )
        if found:
            return found.xcom_value if isinstance(found, PokeReturnValue) else None
        now = STORE_CLOCK.now()
        left = (started + timedelta(seconds=self.timeout) - now).total_seconds()
        if left <= 0:
            self.fail_timeout(now - started)
        pause, kept = self._find_pause(looks), {**attributes, **find_changed(self, before)}
        self.defer(
            trigger=DateTimeTrigger(now + timedelta(seconds=min(pause, left))),
            method_name="look_again",
            kwargs={"started": started, "looks": looks} | ({"attributes": kept} if kept else {}),
        )
        return None  # never reached: defer() raises

    def _find_pause(self, looks: int) -> float:
        pause = self.poke_interval
        if self.exponential_backoff:
            pause *= 2.0 ** min(looks - 1, 30)
        return pause if self.max_wait is None else min(pause, self.max_wait)

    def _give_up(self, error: Exception) -> NoReturn:
        """Fail or skip the task because `poke` raised an exception."""
        if self.never_fail or (self.soft_fail and isinstance(error, TaskFailed)):
            raise TaskSkipped(f"the sensor raised {describe_error(error)}") from error
        raise error

    def fail_timeout(self, waited: timedelta) -> NoReturn:
        """Fail or skip the task because it timed out."""
        message = f"the sensor waited for {waited}, longer than its timeout of {timedelta(seconds=self.timeout)}"
        if self.soft_fail or self.never_fail:
            raise TaskSkipped(message)
        raise SensorTimeout(message)

    def wait_for(self, trigger: BaseTrigger) -> NoReturn:
        """Defer to a trigger for at most the timeout; `complete` receives the event."""
        self.defer(trigger=trigger, method_name="complete", timeout=max(self.timeout, _LEAST_SECONDS))

    def start_with(self, trigger: type[BaseTrigger], kwargs: dict[str, Any], *, ends: bool = False) -> StartTriggerArgs:
        """Return how the sensor starts in a trigger, which waits for at most the timeout.

        Args:
            trigger: The trigger's class.
            kwargs: Its arguments.
            ends: Whether the trigger ends the task itself; otherwise `complete` receives its event.
        """
        classpath = f"{trigger.__module__}.{trigger.__qualname__}"
        return StartTriggerArgs(
            classpath, None if ends else "complete", kwargs, timeout=max(self.timeout, _LEAST_SECONDS)
        )

    def complete(self, context: Any, event: Any = None) -> Any:
        """Return the event that the trigger of `wait_for` fired."""
        self.log.info("the trigger fired: %s", event)
        return event
