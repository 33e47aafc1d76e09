"""The circuit breaker of one sink. It decides whether the sink may be called now, and whether only for a single probe.

Theory of operation. *Closed*: everything may be sent. After a number of consecutive failures the breaker *opens*:
nothing is sent until the cool-down is over. Then it is *half-open* and lets one probe through. A failed probe opens the
breaker again; a successful one closes it. The caller decides what to do with items that wait meanwhile.

Invariants: the breaker opens only after the configured number of consecutive failures, or after a failed probe; one
success closes it; a cool-down takes between half of `open_seconds` and all of it, so that breakers that opened together
do not all probe together.
"""

from __future__ import annotations

import enum

from tidemill.core.retry import JITTER_BITS


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """A circuit breaker. All times are seconds of one monotonic clock.

    Args:
        failures: The number of consecutive failures that opens the breaker.
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
        #: How many times the breaker opened; failed probes do not count.
        self.opened = 0
        #: When the cool-down ends; None while the breaker is closed.
        self.until: float | None = None

    def find_state(self, now: float) -> BreakerState:
        if self.until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.until else BreakerState.HALF_OPEN

    def note_failure(self, now: float, bits: int) -> BreakerState:
        """Count a failure and return the state that follows.

        Args:
            now: The current time.
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
        """Close the breaker and reset the count of failures."""
        self._failed = 0
        self.until = None
