"""Decides whether other sessions are alive, from nothing but the counters that they raise.

Theory of operation. An observer looks at the beats of all sessions now and then. A beat that has moved between two
looks proves that its session was alive in between. One that stands still proves nothing at once: the session may be
slow, and so may the observer. So the silence of a session is counted in the observer's own time, from look to look, and
what the observer did not see is left out: of an interval between two looks that lasted longer than it should (the
observer was stopped, or starved) only a part counts, and of one in which a look failed (the store was away, for the
session as well) nothing does.

Invariants:
1. A session is dead only after looks that found the same beat for `lease_seconds` of counted time.
2. An interval counts for twice `look_seconds` at most, so a pause of the observer ends nobody's lease.
3. A beat that differs from the last one starts over, also for a session that was thought dead.
4. Only sessions of the last look are remembered.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Life(enum.Enum):
    """What is known of a session.

    UNKNOWN: its beat has not moved yet, and its lease has not passed. LIVE: its beat was seen to move, and its lease
    has not passed since. DEAD: its lease has passed.
    """

    UNKNOWN = "unknown"
    LIVE = "live"
    DEAD = "dead"


@dataclass(slots=True)
class _Seen:
    beat: int
    silent_seconds: float = 0.0
    moved: bool = False


class SessionWatch:
    """What one observer knows of the sessions of others.

    Args:
        lease_seconds: How long a beat may stand still.
        look_seconds: How often the observer means to look.

    Example:
        >>> watch = SessionWatch(lease_seconds=3.0, look_seconds=1.0)
        >>> for now in range(4):
        ...     watch.look({7: 1}, float(now))
        >>> watch.life(7)
        <Life.DEAD: 'dead'>
    """

    __slots__ = ("_counted_seconds", "_last", "_lease_seconds", "_seen")

    def __init__(self, lease_seconds: float, look_seconds: float) -> None:
        """Start without sessions."""
        self._lease_seconds = lease_seconds
        self._counted_seconds = 2 * look_seconds
        # When the last look took place; None: there was none, or one has failed since.
        self._last: float | None = None
        self._seen: dict[int, _Seen] = {}

    def look(self, beats: Mapping[int, int], now: float) -> None:
        """Note the beats that a look found.

        Args:
            beats: The beat of each session that has not ended, by its id.
            now: When the observer asked, in seconds of its own monotonic clock.
        """
        passed = 0.0 if self._last is None else min(max(0.0, now - self._last), self._counted_seconds)
        self._last = now
        seen, self._seen = self._seen, {}
        for session, beat in beats.items():
            known = seen.get(session)
            if known is None:
                known = _Seen(beat)
            elif known.beat != beat:
                known = _Seen(beat, moved=True)
            else:
                known.silent_seconds += passed
            self._seen[session] = known

    def missed(self) -> None:
        """Note that a look failed: the time from the look before it to the one after it does not count."""
        self._last = None

    def life(self, session: int) -> Life:
        """Return what is known of a session; one that the last look did not find is unknown."""
        known = self._seen.get(session)
        if known is None:
            return Life.UNKNOWN
        if known.silent_seconds >= self._lease_seconds:
            return Life.DEAD
        return Life.LIVE if known.moved else Life.UNKNOWN
