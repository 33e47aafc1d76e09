"""Waits for a file."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tidemill.dags.arguments import check_duration
from tidemill.dags.exceptions import TaskFailed
from tidemill.dags.sensors.base import BaseSensorOperator
from tidemill.triggers.builtin.file import FileTrigger


class FileSensor(BaseSensorOperator):
    """Waits until a file exists; returns its path, size and time.

    Args:
        filepath: The file, on the host of the triggerer.
        settle: How long it has to be unchanged, for writers that do not move a complete file into place.
        kwargs: The arguments of `BaseSensorOperator`; `poke_interval` is 5 s.
    """

    template_fields = ("filepath",)

    def __init__(
        self, *, filepath: str, settle: timedelta | float = 0.0, poke_interval: timedelta | float = 5.0, **kwargs: Any
    ) -> None:
        """Check the arguments."""
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.filepath = filepath
        self.settle = check_duration(f"task {self.task_id!r}", "settle", settle, zero=True).total_seconds()

    def execute(self, context: Any) -> Any:
        """Defer until it exists."""
        if not self.filepath:
            raise TaskFailed("filepath is empty; give the file to wait for")
        self.wait_for(FileTrigger(str(self.filepath), poll_seconds=self.poke_interval, settle_seconds=self.settle))
