"""Decides which recordings of a worker are removed: the oldest periods as a whole, then the oldest segments and events
of the current period.

The caller provides the sizes and times from disk; this module reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SegmentSize:
    """A sealed segment, and the total size of its files."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PeriodSize:
    """A period.

    Attributes:
        name: The name of the period.
        ended_at: When it was last written to, in seconds since the epoch.
        size_bytes: Its total size.
        events: The number of its events.
    """

    name: str
    ended_at: float
    size_bytes: int
    events: int


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """The retention limits; 0 means no limit, except for the age."""

    max_age_seconds: float
    max_bytes: int
    max_events: int


@dataclass(frozen=True, slots=True)
class RetentionRemoval:
    """The recordings to remove.

    Attributes:
        periods: The names of periods that are removed as a whole.
        segments: The names of segments of the current period.
        events: The number of the current period's oldest events.
    """

    periods: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    events: int = 0


def choose_removal(
    now: float,
    limits: RetentionLimits,
    past: Sequence[PeriodSize],
    current: PeriodSize,
    segments: Sequence[SegmentSize],
) -> RetentionRemoval:
    """Return the recordings to remove.

    Args:
        now: Seconds since the epoch.
        limits: The retention limits.
        past: The periods that are no longer written to, the oldest first.
        current: The current period.
        segments: Its sealed segments, the oldest first; its size includes them.
    """
    size = current.size_bytes + sum(period.size_bytes for period in past)
    events = current.events + sum(period.events for period in past)
    removal = RetentionRemoval()
    for period in past:
        too_old = now - period.ended_at > limits.max_age_seconds
        if too_old or _exceeds(size, limits.max_bytes) or _exceeds(events, limits.max_events):
            removal.periods.append(period.name)
            size -= period.size_bytes
            events -= period.events
    for segment in segments:
        if not _exceeds(size, limits.max_bytes):
            break
        removal.segments.append(segment.name)
        size -= segment.size_bytes
    if _exceeds(events, limits.max_events):
        return RetentionRemoval(removal.periods, removal.segments, events - limits.max_events)
    return removal


def _exceeds(value: int, limit: int) -> bool:
    return limit > 0 and value > limit
