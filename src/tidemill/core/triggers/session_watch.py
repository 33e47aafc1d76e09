"""Decides whether other sessions are alive, using only the beat counters that they increment.

Theory of operation. An observer reads the beats of all sessions at intervals. A beat that changed between two reads
proves that its session was alive in between. An unchanged beat proves nothing at once: the session may be slow, or the
observer may be. The silence of a session is therefore counted in the observer's own time, from read to read, and time
in which the observer could not see is left out. Of an interval that took longer than intended (the observer was
suspended or starved) only a part counts. An interval in which a read failed does not count at all, because the store
was unreachable for the session as well.

Invariants:
1. A session is dead only after reads that found the same beat for `lease_seconds` of counted time.
2. An interval counts for at most twice `look_seconds`, so a pause of the observer never ends a lease.
3. A changed beat resets the count, even for a session that was considered dead.
4. Only sessions found by the last read are remembered.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class SessionLife(enum.Enum):
    """The knowledge about a session.

    UNKNOWN: its beat has not changed yet, and its lease has not expired. LIVE: its beat has changed, and its lease has
    not expired since. DEAD: its lease has expired.
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
    """The knowledge of one observer about other sessions.

    Args:
        lease_seconds: How long a beat may stay unchanged.
        look_seconds: The intended interval between reads.

    Example:
        >>> watch = SessionWatch(lease_seconds=3.0, look_seconds=1.0)
        >>> for now in range(4):
        ...     watch.note_beats({7: 1}, float(now))
        >>> watch.judge(7)
        <SessionLife.DEAD: 'dead'>
    """

    __slots__ = ("_counted_seconds", "_last", "_lease_seconds", "_seen")

    def __init__(self, lease_seconds: float, look_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._counted_seconds = 2 * look_seconds
        # The time of the last read; None: there was no read, or one has failed since.
        self._last: float | None = None
        self._seen: dict[int, _Seen] = {}

    def note_beats(self, beats: Mapping[int, int], now: float) -> None:
        """Process the beats that a read found.

        Args:
            beats: The beat of each session that has not ended, by its id.
            now: When the read began, in seconds of the observer's monotonic clock.
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

    def note_failure(self) -> None:
        """Record that a read failed: the time between the reads before and after it does not count."""
        self._last = None

    def judge(self, session: int) -> SessionLife:
        """Return the knowledge about a session; a session that the last read did not find is unknown."""
        known = self._seen.get(session)
        if known is None:
            return SessionLife.UNKNOWN
        if known.silent_seconds >= self._lease_seconds:
            return SessionLife.DEAD
        return SessionLife.LIVE if known.moved else SessionLife.UNKNOWN
