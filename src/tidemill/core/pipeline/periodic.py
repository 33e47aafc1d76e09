"""Schedules a periodic hook: sleep, run, sleep again, so that two calls never overlap.

Invariants: there is a full sleep before every call; after an error the hook continues or stops, as declared; a hook
that has stopped is not started again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class OnError(enum.StrEnum):
    """The reaction to a periodic hook that raised."""

    CONTINUE = "continue"
    STOP = "stop"


class Scope(enum.StrEnum):
    """The engines that run a periodic hook."""

    ENGINE = "engine"
    PIPELINE = "pipeline"


class PeriodicOutcome(enum.Enum):
    """The outcome of a call."""

    RETURNED = "returned"
    RAISED = "raised"


@dataclass(frozen=True, slots=True)
class Sleep:
    """Sleep for this long, then call the hook."""

    seconds: float


@dataclass(frozen=True, slots=True)
class StopPeriodic:
    """Do not call the hook again."""


@dataclass(frozen=True, slots=True)
class Periodic:
    """The declaration of a periodic hook.

    Attributes:
        seconds: The sleep before each call.
        on_error: What to do after an exception.
        scope: Whether the hook runs in every engine, or only in the engine of slot 0.
    """

    seconds: float
    on_error: OnError = OnError.CONTINUE
    scope: Scope = Scope.ENGINE

    def decide_first(self, slot: int) -> Sleep | StopPeriodic:
        """Return the first step in the engine of a slot.

        Example:
            >>> Periodic(60.0, scope=Scope.PIPELINE).decide_first(slot=1)
            StopPeriodic()
        """
        if self.scope is Scope.PIPELINE and slot != 0:
            return StopPeriodic()
        return Sleep(self.seconds)

    def decide_next(self, outcome: PeriodicOutcome) -> Sleep | StopPeriodic:
        """Return the step after a call."""
        if outcome is PeriodicOutcome.RAISED and self.on_error is OnError.STOP:
            return StopPeriodic()
        return Sleep(self.seconds)
