"""What is removed of the recordings of one worker: whole periods, the oldest first; in the current one its oldest
segments and events.

Sizes and times are what the caller found on disk; nothing here looks anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SegmentSize:
    """A sealed segment: its name, and the bytes of its files."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PeriodSize:
    """A period.

    Attributes:
        name: Its name.
        ended_at: Seconds since the epoch at which something was last written to it.
        size_bytes: All of it.
        events: How many events it has.
    """

    name: str
    ended_at: float
    size_bytes: int
    events: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept; 0 is no limit, except for the age."""

    max_age_seconds: float
    max_bytes: int
    max_events: int


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be removed.

    Attributes:
        periods: Names of periods that go as a whole.
        segments: Names of segments of the current period.
        events: How many of the current period's oldest events.
    """

    periods: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    events: int = 0


def choose_removal(
    now: float, limits: Limits, past: Sequence[PeriodSize], current: PeriodSize, segments: Sequence[SegmentSize]
) -> Removal:
    """Return what has to go.

    Args:
        now: Seconds since the epoch.
        limits: How much is kept.
        past: The periods that are no longer written to, the oldest first.
        current: The one that is.
        segments: Its sealed segments, the oldest first; they are part of its size.
    """
    size = current.size_bytes + sum(period.size_bytes for period in past)
    events = current.events + sum(period.events for period in past)
    removal = Removal()
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
        return Removal(removal.periods, removal.segments, events - limits.max_events)
    return removal


def _exceeds(value: int, limit: int) -> bool:
    return limit > 0 and value > limit
