"""An operator whose trigger gives elements to maps, without any worker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tidemill.dags.exceptions import DagError
from tidemill.dags.operator import BaseOperator
from tidemill.dags.triggers.trigger_text import write_trigger
from tidemill.runtime.json.codec import decode
from tidemill.triggers.base import BaseTrigger, StartTriggerArgs


class StreamOperator(BaseOperator):
    """Runs a trigger whose events are elements: a task that is mapped over `output` runs for each of them.

    No worker takes part. The triggerer stores each event as an element, in one transaction. The task succeeds when the
    trigger returns, and fails when it raises.

    Args:
        trigger: The trigger. Texts in its arguments are templates that see values of the run.
        timeout: How long the trigger may take, as a timedelta or in seconds; None: no limit.
        kwargs: The arguments of `BaseOperator`.
    """

    ui_color = "#f4e7f7"

    def __init__(self, *, trigger: BaseTrigger, timeout: timedelta | float | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("start_from_trigger", True)
        super().__init__(**kwargs)
        if not self.start_from_trigger:
            raise DagError(f"task {self.task_id!r}: a StreamOperator always starts from its trigger")
        self.trigger = trigger
        self.timeout = timeout

    @property
    def is_generator(self) -> bool:
        return True

    @property
    def feeds_maps(self) -> bool:
        return True

    def make_start_args(self) -> StartTriggerArgs:
        """Return how the task starts in its trigger; see `BaseOperator.make_start_args`."""
        classpath, kwargs = write_trigger(self.trigger)
        return StartTriggerArgs(classpath, None, decode(kwargs), timeout=self.timeout, feeds=True)
