"""When a periodic hook runs: it sleeps first, runs, and sleeps again, so that two runs never overlap.

Invariants: before every run there is a whole sleep; after an error the hook goes on or stops for good, as it was
declared, and nothing starts it again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class OnError(enum.StrEnum):
    """What an exception means for the runs that would follow."""

    CONTINUE = "continue"
    STOP = "stop"


class Scope(enum.StrEnum):
    """Where a periodic hook runs."""

    ENGINE = "engine"
    PIPELINE = "pipeline"


class PeriodicOutcome(enum.Enum):
    """How a run ended."""

    RETURNED = "returned"
    RAISED = "raised"


@dataclass(frozen=True, slots=True)
class Sleep:
    """Sleep so long, then run."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Do not run again."""


@dataclass(frozen=True, slots=True)
class Periodic:
    """How a periodic hook was declared.

    Attributes:
        seconds: The sleep before each run.
        on_error: What follows an exception.
        scope: In every engine, or in that of slot 0 only.
    """

    seconds: float
    on_error: OnError = OnError.CONTINUE
    scope: Scope = Scope.ENGINE

    def first(self, slot: int) -> Sleep | Stop:
        """Return what an engine does at its start.

        Example:
            >>> Periodic(60.0, scope=Scope.PIPELINE).first(slot=1)
            Stop()
        """
        if self.scope is Scope.PIPELINE and slot != 0:
            return Stop()
        return Sleep(self.seconds)

    def after(self, outcome: PeriodicOutcome) -> Sleep | Stop:
        """Return what follows a run."""
        if outcome is PeriodicOutcome.RAISED and self.on_error is OnError.STOP:
            return Stop()
        return Sleep(self.seconds)
