"""Counts of the shared streams of a process, for metrics, charts and pages, and single incidents.

Invariants: there is no work per event, only per advanced batch and per incident; lanes without a name are not counted
separately, and the number of counted lanes and streams is bounded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tidemill.triggers.stream_api import UpstreamCounts

#: The number of lanes of a stream that are counted separately; all further lanes are counted together.
MAX_LANES: Final = 256
OTHERS: Final = "(others)"
#: The number of streams that are counted; beyond it, the oldest stream is forgotten.
MAX_STREAMS: Final = 10_000
_MAX_NAME: Final = 200


class IncidentKind(enum.StrEnum):
    """Kinds of incidents in a stream."""

    ACK_TIMEOUT = "ack_timeout"
    OVERFLOW = "overflow"
    REJECTED = "rejected"
    SEAT_ENDED = "seat_ended"
    ADVANCE_FAILED = "advance_failed"
    STREAM_FAILED = "stream_failed"


class Incident(NamedTuple):
    """A single failure.

    Attributes:
        kind: The kind of the incident.
        key: The key of the stream.
        trigger: The affected trigger; None if all triggers are affected.
        lane: The affected lane; None if the incident does not concern a single lane.
        position: The number of the event in the stream; None if the incident does not concern a single event.
        text: The error or the reason; secrets are not masked.
    """

    kind: IncidentKind
    key: Hashable
    trigger: Any = None
    lane: Hashable = None
    position: int | None = None
    text: str = ""


@dataclass(slots=True)
class LaneTally:
    """Counts of a lane.

    Attributes:
        advanced: Events that were advanced.
        given_up: Events that were fanned out but not advanced when their stream ended.
        given_up_resolved: Those of `given_up` that every subscriber had resolved.
    """

    advanced: int = 0
    given_up: int = 0
    given_up_resolved: int = 0


@dataclass(slots=True)
class StreamTally:
    """Counts of the streams of one key.

    Attributes:
        advanced: Events that were advanced.
        failed: Advanced events that a subscriber failed.
        rejected: Advanced events that a subscriber rejected.
        forced: How often a subscriber was forced to fail.
        ended: How often the stream failed.
        lanes: Counts of the lanes, by name.
    """

    advanced: int = 0
    failed: int = 0
    rejected: int = 0
    forced: int = 0
    ended: int = 0
    lanes: dict[str, LaneTally] = field(default_factory=dict)

    def find_name(self, lane: Hashable) -> str:
        """Return the name under which a lane is counted."""
        name = name_lane(lane)
        return name if name in self.lanes or len(self.lanes) < MAX_LANES else OTHERS

    def find_lane(self, lane: Hashable) -> LaneTally:
        """Return the counts of a lane."""
        return self.lanes.setdefault(self.find_name(lane), LaneTally())


def _ignore_incident(incident: Incident) -> None:
    pass


@dataclass(slots=True)
class StreamCounts:
    """Counts of all shared streams of a process.

    Attributes:
        advanced: Events that were advanced.
        upstream: Counts of the producers.
        tallies: Counts of each stream, by key.
        tell: Called on the loop with each incident; it must neither block nor raise.
    """

    advanced: int = 0
    upstream: UpstreamCounts = field(default_factory=UpstreamCounts)
    tallies: dict[Hashable, StreamTally] = field(default_factory=dict)
    tell: Callable[[Incident], None] = _ignore_incident

    def find_tally(self, key: Hashable) -> StreamTally:
        """Return the counts of a key."""
        if key not in self.tallies and len(self.tallies) >= MAX_STREAMS:
            del self.tallies[next(iter(self.tallies))]
        return self.tallies.setdefault(key, StreamTally())


def name_lane(lane: Hashable) -> str:
    """Return a short name for a lane; '' for numbers, which are lanes of single events.

    Example:
        >>> name_lane(("orders", 3)), name_lane("group-a"), name_lane(17), name_lane(None)
        ('orders/3', 'group-a', '', '')
    """
    match lane:
        case (str(topic), int(partition)):
            return f"{topic}/{partition}"
        case str():
            return lane[:_MAX_NAME]
        case _:
            return ""
