"""What a worker has to tell the store: how attempts and callbacks ended.

Invariants: a report is kept until the store has it; one that the store cannot store is told apart from the others, and
becomes the failure of its own attempt.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from tidemill.core.errors import describe_error
from tidemill.store.calls.worker_calls import AttemptReport, CallbackReport, Failure

log = structlog.get_logger(__name__)

#: The most of each kind in one turn.
_MOST = 64


class Reports:
    """The reports that the store does not have yet.

    Args:
        mask: Masks secrets: what a database says of a report may quote it.
    """

    def __init__(self, mask: Callable[[str], str]) -> None:
        self._mask = mask
        self._waiting: list[AttemptReport | CallbackReport] = []
        self._taken: list[AttemptReport | CallbackReport] = []
        # How many of the first ones are told alone: one of them cannot be stored.
        self._alone = 0

    def __len__(self) -> int:
        """Return how many there are, with those that are being told."""
        return len(self._taken) + len(self._waiting)

    def add(self, report: AttemptReport | CallbackReport) -> None:
        """Add one."""
        self._waiting.append(report)

    def take(self) -> tuple[tuple[AttemptReport, ...], tuple[CallbackReport, ...]]:
        """Return what is to be told now."""
        count = 1 if self._alone else _MOST
        self._taken, self._waiting = self._waiting[:count], self._waiting[count:]
        reports = tuple(one for one in self._taken if isinstance(one, AttemptReport))
        return reports, tuple(one for one in self._taken if isinstance(one, CallbackReport))

    @property
    def more(self) -> bool:
        """Whether more wait than were taken."""
        return bool(self._waiting)

    def note_stored(self) -> None:
        """Note that the store has what was taken."""
        self._alone = max(0, self._alone - len(self._taken))
        self._taken = []

    def note_refused(self, error: Exception) -> None:
        """Note that the store could not store what was taken, and will not: tell each alone, or blame the only one.

        Raises:
            Exception: The error, if nothing was taken, or only what says that a report cannot be stored.
        """
        taken, self._taken = self._taken, []
        if len(taken) > 1:
            self._alone = len(taken)
            self._waiting[:0] = taken
            return
        said = Failure(self._mask(f"how it ended cannot be stored: {describe_error(error)}"))
        match taken:
            case [AttemptReport(result=result) as report] if result != said:
                log.error("how an attempt ended cannot be stored; it fails", task=report.task, error=str(error))
                self._waiting.insert(0, AttemptReport(report.task, report.epoch, said))
            case [CallbackReport(error=was) as callback] if was != said.error:
                log.error("how a callback ended cannot be stored; it fails", callback=callback.id, error=str(error))
                self._waiting.insert(0, CallbackReport(callback.id, said.error))
            case _:
                raise error
        self._alone = max(1, self._alone)
