"""What happened in the shared streams of a process: counts for metrics, charts and pages, and incidents one by one.

Invariants: nothing is done per event, only per batch that is advanced and per incident; lanes that are no names have
no place of their own, and the number of lanes and streams that are counted is bounded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tidemill.triggers.stream_api import UpstreamCounts

#: So many lanes of a stream are counted one by one, the rest together.
MAX_LANES: Final = 256
OTHERS: Final = "(others)"
#: Of so many streams it is known what happened in them; of more, the oldest is forgotten.
MAX_STREAMS: Final = 10_000
_MAX_NAME: Final = 200


class IncidentKind(enum.StrEnum):
    """What may go wrong in a stream."""

    ACK_TIMEOUT = "ack_timeout"
    OVERFLOW = "overflow"
    REJECTED = "rejected"
    SEAT_ENDED = "seat_ended"
    ADVANCE_FAILED = "advance_failed"
    STREAM_FAILED = "stream_failed"


class Incident(NamedTuple):
    """One thing that went wrong.

    Attributes:
        kind: What.
        key: The key of the stream.
        trigger: The trigger that it happened to; None: it happened to all of them.
        lane: Where; None: not in one lane.
        position: The event, as numbered by the stream; None: not at one event.
        text: The error or the reason; not masked.
    """

    kind: IncidentKind
    key: Hashable
    trigger: Any = None
    lane: Hashable = None
    position: int | None = None
    text: str = ""


@dataclass(slots=True)
class LaneTally:
    """What happened in a lane.

    Attributes:
        advanced: Events that the producer was told about.
        given_up: Events that were fanned out and not advanced when their stream ended.
        given_up_resolved: Of these, those that every subscriber had dealt with.
    """

    advanced: int = 0
    given_up: int = 0
    given_up_resolved: int = 0


@dataclass(slots=True)
class StreamTally:
    """What happened in the streams of one key.

    Attributes:
        advanced: Events that the producer was told about.
        failed: Of these, those that a subscriber failed.
        rejected: Of these, those that a subscriber rejected.
        forced: How often a subscriber was forced to fail.
        ended: How often the stream failed.
        lanes: By the name of the lane.
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
        """Return the tally of a lane."""
        return self.lanes.setdefault(self.find_name(lane), LaneTally())


def _tell_nobody(incident: Incident) -> None:
    pass


@dataclass(slots=True)
class StreamCounts:
    """What happened in all shared streams of a process.

    Attributes:
        advanced: Events that producers were told about.
        upstream: What the producers did.
        tallies: What happened in each stream, by its key.
        tell: Called with each incident, on the loop; it must neither block nor raise.
    """

    advanced: int = 0
    upstream: UpstreamCounts = field(default_factory=UpstreamCounts)
    tallies: dict[Hashable, StreamTally] = field(default_factory=dict)
    tell: Callable[[Incident], None] = _tell_nobody

    def find_tally(self, key: Hashable) -> StreamTally:
        """Return the tally of a key."""
        if key not in self.tallies and len(self.tallies) >= MAX_STREAMS:
            del self.tallies[next(iter(self.tallies))]
        return self.tallies.setdefault(key, StreamTally())


def name_lane(lane: Hashable) -> str:
    """Return a short name of a lane; numbers, which are lanes of single events, have none.

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
