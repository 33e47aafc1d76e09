"""The inputs and effects of `core.supervision.slot`: values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EngineEnding(enum.StrEnum):
    """Why an engine ended, or why a slot is finished."""

    #: It did as requested: it stopped fetching, finished its messages, committed, and left the group.
    DRAINED = "drained"
    #: Another process took over its membership in the group.
    FENCED = "fenced"
    #: The configuration is invalid.
    CONFIG = "config"
    #: It ended with an error that it reported.
    FAILED = "failed"
    #: It ended without a summary, or its job was cancelled.
    CRASHED = "crashed"
    #: Only of slots: the engine did not drain in time and was killed.
    OVERDUE = "overdue"
    #: Only of slots: no engine ran when the drain was requested, but an earlier one had not left the group.
    ABSENT = "absent"


# -- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartSlot:
    """Submit the first job."""


@dataclass(frozen=True, slots=True)
class EngineConnected:
    """An engine connected, for the first time or again.

    Attributes:
        job_token: The token of its job.
        run_token: Its number in this slot, assigned at its first hello. It rises with every engine; an engine that
            reconnects keeps its own.
    """

    job_token: int
    run_token: int


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine finished `on_ready`."""

    run_token: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A message arrived from the engine."""

    run_token: int


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The link of an engine that had said hello was closed by either side."""

    run_token: int


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job returned its engine's summary (`ending`, `error`) or failed (`CRASHED`, Spark's error)."""

    job_token: int
    ending: EngineEnding
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The pipeline is to stop."""


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """A user wants another engine to replace this one, which has to drain first."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time `Slot.due` has come."""


Input = (
    StartSlot
    | EngineConnected
    | EngineReady
    | Heartbeat
    | LinkClosed
    | JobEnded
    | DrainRequested
    | RestartRequested
    | Tick
)


# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """Submit the slot's job with this token in it; `JobEnded` must follow eventually."""

    job_token: int


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Cancel the job; repeated until the job ends. Its `JobEnded` is still expected."""

    job_token: int


@dataclass(frozen=True, slots=True)
class AdmitEngine:
    """Accept this engine as the slot's engine, in place of any older one."""

    run_token: int


@dataclass(frozen=True, slots=True)
class RefuseEngine:
    """Tell this engine to stop, and why; its `LinkClosed` is still expected."""

    run_token: int
    text: str


@dataclass(frozen=True, slots=True)
class DrainEngine:
    """Send this engine the request to drain.

    Attributes:
        run_token: The engine.
        keep_membership: Whether it stays a member of the group, because another engine of the slot takes over its
            partitions.
    """

    run_token: int
    keep_membership: bool = False


@dataclass(frozen=True, slots=True)
class KillEngine:
    """Kill this engine's process, if it runs on the driver's host."""

    run_token: int


class ReportKind(enum.StrEnum):
    """The subject of a report."""

    NO_HELLO = "no_hello"
    SILENT = "silent"
    LINK_LOST = "link_lost"
    CANCELLED = "cancelled"
    RESTART = "restart"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """Log this for the operator."""

    kind: ReportKind
    text: str


@dataclass(frozen=True, slots=True)
class SlotFinished:
    """The slot is finished; it never runs another engine."""

    ending: EngineEnding
    error: str | None = None


Effect = SubmitJob | CancelJob | AdmitEngine | RefuseEngine | DrainEngine | KillEngine | OperatorReport | SlotFinished
