"""A sensor that waits for a process to exit."""

from __future__ import annotations

from typing import Any

from tidemill.dags.sensors.base import BaseSensorOperator
from tidemill.triggers.builtin.process import ProcessExitTrigger


class ProcessExitSensor(BaseSensorOperator):
    """Waits until a process on the triggerer's host has exited.

    Args:
        pid: The process id.
        kwargs: The arguments of `BaseSensorOperator`; `poke_interval` applies only where the system does not notify.
    """

    template_fields = ("pid",)

    def __init__(self, *, pid: int | str, poke_interval: float = 1.0, **kwargs: Any) -> None:
        """Store the process id; a template renders it to a string."""
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.pid: Any = pid

    def execute(self, context: Any) -> Any:
        """Defer until the process has exited."""
        self.wait_for(ProcessExitTrigger(int(self.pid), poll_seconds=self.poke_interval))
