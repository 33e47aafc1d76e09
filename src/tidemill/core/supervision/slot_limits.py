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
        healthy_seconds: An engine that was ready for this long resets the backoff.
        hello_seconds: A slot without a connected engine is reported each time this long has passed.
        silent_seconds: An engine that is silent for this long is considered dead.
        lost_seconds: An engine that cannot reconnect stops by itself within 10 s plus the drain timeout; one that has
            not stopped after this time is considered dead.
        first_crashes: After this many engines that died before any was ready, the slot is given up.
        look_seconds: The longest time between two ticks while the slot waits for something.
        drain_seconds: An engine that has not ended this long after the request to drain is killed.
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
