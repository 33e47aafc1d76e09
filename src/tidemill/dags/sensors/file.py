"""A sensor that waits for a file."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tidemill.dags.arguments import check_bool, check_duration
from tidemill.dags.exceptions import TaskFailed
from tidemill.dags.sensors.base import BaseSensorOperator
from tidemill.triggers.builtin.file import FileTrigger


class FileSensor(BaseSensorOperator):
    """Waits until a file exists; returns its path, size and modification time.

    Args:
        filepath: The file, on the triggerer's host; or a folder, for any file below it; or a pattern such as
            `in/*.csv`, for any matching file.
        settle: How long the file must be unchanged, for writers that do not move a complete file into the folder.
        recursive: Whether `**` in a pattern matches any number of folders.
        kwargs: The arguments of `BaseSensorOperator`; `poke_interval` defaults to 5 s.
    """

    template_fields = ("filepath",)

    def __init__(
        self,
        *,
        filepath: str,
        settle: timedelta | float = 0.0,
        recursive: bool = False,
        poke_interval: timedelta | float = 5.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        owner = f"task {self.task_id!r}"
        self.filepath = filepath
        self.settle = check_duration(owner, "settle", settle, zero=True).total_seconds()
        self.recursive = check_bool(owner, "recursive", recursive)

    def execute(self, context: Any) -> Any:
        """Defer until the file exists."""
        try:
            trigger = FileTrigger(
                str(self.filepath),
                poll_seconds=self.poke_interval,
                settle_seconds=self.settle,
                recursive=self.recursive,
            )
        except ValueError as error:
            raise TaskFailed(f"filepath: {error}") from error
        self.wait_for(trigger)
