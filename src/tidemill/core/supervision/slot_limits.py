"""The states of a slot and its times."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tidemill.core.retry import Backoff


class SlotState(enum.StrEnum):
    """The state of a slot, as a status line shows it."""

    IDLE = "idle"
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    LINK_LOST = "link lost"
    CANCELLED = "cancelled"
    RESTARTING = "restarting"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """The times of a slot, in seconds.

    Attributes:
        backoff: The delays between restarts; used without jitter, because slots do not compete.
        healthy_seconds: How long an engine must have been ready to reset the backoff.
        hello_seconds: The interval at which a slot without a connected engine is reported.
        silent_seconds: The silence after which an engine is considered dead.
        lost_seconds: An engine that cannot reconnect stops by itself within 10 s plus the drain timeout; one that has
            not stopped after this time is considered dead.
        first_crashes: The number of engines that may die before any is ready; then the slot is given up.
        look_seconds: The longest time between two ticks while the slot waits.
        drain_seconds: How long an engine may take to end after the request to drain; then it is killed.
        late_seconds: A tick that is later than this means that this process was not running.
    """

    backoff: Backoff = field(default_factory=lambda: Backoff(0.2, 30.0, 2.0))
    healthy_seconds: float = 60.0
    hello_seconds: float = 60.0
    silent_seconds: float = 15.0
    lost_seconds: float = 55.0
    first_crashes: int = 3
    look_seconds: float = 1.0
    drain_seconds: float = 33.0
    late_seconds: float = 0.5
