"""Waits for a process to end."""

from __future__ import annotations

from typing import Any

from tidemill.dags.sensors.base import BaseSensorOperator
from tidemill.triggers.builtin.process import ProcessExitTrigger


class ProcessExitSensor(BaseSensorOperator):
    """Waits until a process on this host has ended.

    Args:
        pid: Its id.
        kwargs: The arguments of `BaseSensorOperator`; `poke_interval` counts where the system does not notify.
    """

    template_fields = ("pid",)

    def __init__(self, *, pid: int | str, poke_interval: float = 1.0, **kwargs: Any) -> None:
        """Keep it; a template of it is a text."""
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.pid: Any = pid

    def execute(self, context: Any) -> Any:
        """Defer until it has ended."""
        self.wait_for(ProcessExitTrigger(int(self.pid), poll_seconds=self.poke_interval))
