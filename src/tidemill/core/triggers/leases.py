"""Leases: messages of a queue that stay invisible to others only while their visibility is extended in time.

Every lease is for the same time, so those that were made or renewed first run out first: all is kept in that order, and
nothing here looks at more leases than it returns.

Invariants:
1. A lease is due from half of its time on, so that one renewal that does not get through costs nothing.
2. A lease is never renewed beyond `max_held_seconds` after it was made: the queue would refuse.
3. A lease that was released is not due any more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

#: From which part of its time on a lease is to be renewed.
_RENEW_AT = 0.5


@dataclass(slots=True)
class _Lease:
    made: float
    renewed: float


@dataclass(slots=True)
class Leases:
    """The leases that are held.

    Args:
        seconds: How long a lease is, from its beginning or its renewal on.
        max_held_seconds: How long the queue lets anybody hold a message.
    """

    seconds: float
    max_held_seconds: float
    _held: OrderedDict[int, _Lease] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        """Return how many are held."""
        return len(self._held)

    def __contains__(self, number: int) -> bool:
        """Tell whether this one is held."""
        return number in self._held

    def hold(self, number: int, now: float) -> None:
        """Note that a lease began.

        Args:
            number: Which; new.
            now: Seconds, from before the queue was asked for it.
        """
        self._held[number] = _Lease(now, now)

    def release(self, number: int) -> None:
        """Let it run out; unknown ones change nothing."""
        self._held.pop(number, None)

    def due(self) -> float | None:
        """Return when the next lease has to be renewed or given up; None: there is none."""
        for lease in self._held.values():
            return lease.renewed + self.seconds * _RENEW_AT
        return None

    def to_renew(self, now: float, limit: int) -> list[int]:
        """Return leases that are due, those first that run out first, at most `limit`; given up ones are not."""
        return [
            number
            for number, lease in islice(self._held.items(), limit)
            if now >= lease.renewed + self.seconds * _RENEW_AT
        ]

    def renewed(self, number: int, now: float) -> None:
        """Note that the queue renewed a lease; unknown ones change nothing.

        Args:
            number: Which.
            now: Seconds, from before the queue was asked.
        """
        lease = self._held.get(number)
        if lease is not None:
            lease.renewed = now
            self._held.move_to_end(number)

    def give_up(self, now: float) -> list[int]:
        """Release and return the leases that the queue would not renew any more, or that ran out."""
        gone = []
        for number, lease in self._held.items():
            if now < lease.renewed + self.seconds * _RENEW_AT:
                break
            if now - lease.made + self.seconds > self.max_held_seconds or now >= lease.renewed + self.seconds:
                gone.append(number)
        for number in gone:
            del self._held[number]
        return gone
