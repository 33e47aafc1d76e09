"""Retrying: whether to try again, and how long to wait first.

Exponential backoff with full jitter: the delay is uniform between 0 and a bound that grows with each attempt, so that
clients that failed together do not all retry together. Randomness comes in as bits.

Invariants: a delay is never negative and never above the maximum; after `max_retries` retries, or beyond the time
budget, the decision is to give up.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

#: The number of random bits that `Backoff.compute_delay` takes.
JITTER_BITS = 32


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delays after failed attempts.

    Attributes:
        initial_seconds: The bound after the first attempt.
        maximum_seconds: The largest bound.
        multiplier: The growth per attempt, at least 1.
    """

    initial_seconds: float
    maximum_seconds: float
    multiplier: float = 2.0

    def compute_bound(self, attempt: int) -> float:
        """Return the longest delay in seconds after a failed attempt; attempts count from 1."""
        try:
            return min(self.maximum_seconds, self.initial_seconds * self.multiplier ** (max(attempt, 1) - 1))
        except OverflowError:  # floats end at 1e308; the maximum is far below
            return self.maximum_seconds

    def compute_delay(self, attempt: int, bits: int) -> float:
        """Return the delay in seconds after a failed attempt.

        Args:
            attempt: The number of the attempt, from 1.
            bits: 32 random bits.
        """
        return self.compute_bound(attempt) * (bits / (1 << JITTER_BITS))


class Limit(enum.Enum):
    """The limit that ended the retries."""

    ATTEMPTS = "attempts"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after `delay_seconds`."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not try again: `limit` is reached."""

    limit: Limit


Decision = Retry | GiveUp


def decide(
    attempt: int,
    max_retries: int,
    backoff: Backoff,
    bits: int,
    *,
    elapsed_seconds: float = 0.0,
    budget_seconds: float = math.inf,
) -> Decision:
    """Decide what follows a failed attempt.

    Args:
        attempt: The number of the attempt, from 1.
        max_retries: The number of attempts that may follow the first one.
        backoff: The delays between attempts.
        bits: 32 random bits.
        elapsed_seconds: The time since the first attempt began.
        budget_seconds: How long after the first attempt another one may begin.

    Example:
        >>> decide(1, 3, Backoff(0.5, 30.0), bits=1 << 31)
        Retry(delay_seconds=0.25)
        >>> decide(4, 3, Backoff(0.5, 30.0), bits=0)
        GiveUp(limit=<Limit.ATTEMPTS: 'attempts'>)
    """
    if attempt > max_retries:
        return GiveUp(Limit.ATTEMPTS)
    delay_seconds = backoff.compute_delay(attempt, bits)
    if elapsed_seconds + delay_seconds > budget_seconds:
        return GiveUp(Limit.TIME)
    return Retry(delay_seconds)
