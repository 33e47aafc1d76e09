"""When a periodic hook runs: it sleeps first, runs, and sleeps again, so that two runs never overlap.

Invariants: there is a full sleep before every run; after an error the hook continues or stops, as declared, and a hook
that has stopped is not started again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class OnError(enum.StrEnum):
    """What happens to a hook after it raised."""

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
    """Sleep for this long, then run."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Do not run again."""


@dataclass(frozen=True, slots=True)
class Periodic:
    """How a periodic hook was declared.

    Attributes:
        seconds: The sleep before each run.
        on_error: What happens after an exception.
        scope: Whether it runs in every engine, or only in that of slot 0.
    """

    seconds: float
    on_error: OnError = OnError.CONTINUE
    scope: Scope = Scope.ENGINE

    def decide_first(self, slot: int) -> Sleep | Stop:
        """Return what the engine of a slot does at its start.

        Example:
            >>> Periodic(60.0, scope=Scope.PIPELINE).decide_first(slot=1)
            Stop()
        """
        if self.scope is Scope.PIPELINE and slot != 0:
            return Stop()
        return Sleep(self.seconds)

    def decide_next(self, outcome: PeriodicOutcome) -> Sleep | Stop:
        """Return what follows a run."""
        if outcome is PeriodicOutcome.RAISED and self.on_error is OnError.STOP:
            return Stop()
        return Sleep(self.seconds)
