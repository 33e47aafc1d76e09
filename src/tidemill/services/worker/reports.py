"""The reports of a worker to the store: how attempts and callbacks ended.

Invariants: a report is kept until the store has it. A report that the store cannot store is separated from the others,
and becomes the failure of its own attempt.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from tidemill.core.errors import describe_error
from tidemill.core.tasks.endings import Failure
from tidemill.store.calls.worker_calls import AttemptReport, CallbackReport

log = structlog.get_logger(__name__)

#: Maximum number of reports per turn.
_MOST = 64


class Reports:
    """The reports that are not stored yet.

    Args:
        mask: Masks secrets, because a database error may quote the report.
    """

    def __init__(self, mask: Callable[[str], str]) -> None:
        self._mask = mask
        self._waiting: list[AttemptReport | CallbackReport] = []
        self._taken: list[AttemptReport | CallbackReport] = []
        # How many of the first reports are sent one by one, because one of them cannot be stored.
        self._alone = 0

    def __len__(self) -> int:
        """Return the number of reports, including those being sent."""
        return len(self._taken) + len(self._waiting)

    def add(self, report: AttemptReport | CallbackReport) -> None:
        self._waiting.append(report)

    def take(self) -> tuple[tuple[AttemptReport, ...], tuple[CallbackReport, ...]]:
        """Return the reports to send now."""
        count = 1 if self._alone else _MOST
        self._taken, self._waiting = self._waiting[:count], self._waiting[count:]
        reports = tuple(one for one in self._taken if isinstance(one, AttemptReport))
        return reports, tuple(one for one in self._taken if isinstance(one, CallbackReport))

    @property
    def more(self) -> bool:
        """Whether reports are waiting beyond the taken ones."""
        return bool(self._waiting)

    def note_stored(self) -> None:
        """Remove the taken reports, because the store has them."""
        self._alone = max(0, self._alone - len(self._taken))
        self._taken = []

    def note_refused(self, error: Exception) -> None:
        """Handle that the store cannot store the taken reports: send each alone, or fail the attempt of the only one.

        Raises:
            Exception: The error, if no report was taken, or only one that already reports this error.
        """
        taken, self._taken = self._taken, []
        if len(taken) > 1:
            self._alone = len(taken)
            self._waiting[:0] = taken
            return
        said = Failure(self._mask(f"the result cannot be stored: {describe_error(error)}"))
        match taken:
            case [AttemptReport(result=result) as report] if result != said:
                log.error("cannot store the result of an attempt; it fails", task=report.task, error=str(error))
                self._waiting.insert(0, AttemptReport(report.task, report.epoch, said, map_index=report.map_index))
            case [CallbackReport(error=was) as callback] if was != said.error:
                log.error("cannot store the result of a callback; it fails", callback=callback.id, error=str(error))
                self._waiting.insert(0, CallbackReport(callback.id, said.error))
            case _:
                raise error
        self._alone = max(1, self._alone)
