"""The circuit breaker in front of one sink: whether anything is sent at all, and how much.

Theory of operation. *Closed*: everything may be sent. After a number of failures in a row it is *open*: nothing is sent
until a cool-down is over. Then it is *half-open*: one probe may be sent, whose failure opens it again and whose
success closes it. What happens to the items that wait meanwhile is decided by the caller.

Invariants: it opens only after the configured number of failures in a row, or after a failed probe; one success closes
it; a cool-down is between half of `open_seconds` and all of it, so that breakers that opened together do not all probe
together.
"""

from __future__ import annotations

import enum

from tidemill.core.retry import JITTER_BITS


class BreakerState(enum.Enum):
    """What may be sent."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """One breaker; all times are seconds of one monotonic clock.

    Args:
        failures: After how many failures in a row it opens.
        open_seconds: The longest cool-down.

    Example:
        >>> breaker = Breaker(2, 10.0)
        >>> breaker.note_failure(0.0, 0), breaker.note_failure(1.0, 0)
        (<BreakerState.CLOSED: 'closed'>, <BreakerState.OPEN: 'open'>)
        >>> breaker.until, breaker.find_state(5.0), breaker.find_state(6.0)
        (6.0, <BreakerState.OPEN: 'open'>, <BreakerState.HALF_OPEN: 'half-open'>)
    """

    __slots__ = ("_failed", "_failures", "_open_seconds", "opened", "until")

    def __init__(self, failures: int, open_seconds: float) -> None:
        self._failures = failures
        self._open_seconds = open_seconds
        self._failed = 0
        #: How often it opened, failed probes not counted.
        self.opened = 0
        #: When the cool-down is over; None while it is closed.
        self.until: float | None = None

    def find_state(self, now: float) -> BreakerState:
        """Return what may be sent at this time."""
        if self.until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.until else BreakerState.HALF_OPEN

    def note_failure(self, now: float, bits: int) -> BreakerState:
        """Count a failure and return what may be sent after it.

        Args:
            now: The time.
            bits: 32 random bits.
        """
        self._failed += 1
        if self.until is None and self._failed < self._failures:
            return BreakerState.CLOSED
        if self.until is None:
            self.opened += 1
        self.until = now + self._open_seconds * (1 + bits / (1 << JITTER_BITS)) / 2
        return self.find_state(now)

    def note_success(self) -> None:
        """Note a success: the breaker closes, and failures are counted from zero."""
        self._failed = 0
        self.until = None
