"""Leases on queue messages, which stay invisible to other consumers only while their visibility is extended in time.

All leases have the same duration, so the least recently renewed one expires first. They are kept in that order, and no
call examines more leases than it returns.

Invariants:
1. A lease is due for renewal after half of its time, so that a single failed renewal does no harm.
2. A lease is never renewed beyond `max_held_seconds` after it began: the queue would refuse.
3. A lease that was released is not due any more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

#: The fraction of its duration after which a lease is renewed.
_RENEW_AT = 0.5


@dataclass(slots=True)
class _Lease:
    began: float
    renewed: float


@dataclass(slots=True)
class Leases:
    """The leases that a consumer holds.

    Args:
        seconds: The duration of a lease, from its start or its last renewal.
        max_held_seconds: How long the queue allows a consumer to hold a message.
    """

    seconds: float
    max_held_seconds: float
    _held: OrderedDict[int, _Lease] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def hold(self, number: int, now: float) -> None:
        """Add a new lease.

        Args:
            number: Its number, which must be new.
            now: The time just before the message was requested from the queue.
        """
        self._held[number] = _Lease(now, now)

    def release(self, number: int) -> None:
        """Let a lease expire; an unknown one changes nothing."""
        self._held.pop(number, None)

    @property
    def due(self) -> float | None:
        """The time at which the next lease has to be renewed or given up; None without leases."""
        for lease in self._held.values():
            return lease.renewed + self.seconds * _RENEW_AT
        return None

    def list_due(self, now: float, limit: int) -> list[int]:
        """Return at most `limit` leases that have to be renewed, in order of expiry."""
        return [
            number
            for number, lease in islice(self._held.items(), limit)
            if now >= lease.renewed + self.seconds * _RENEW_AT
        ]

    def note_renewed(self, number: int, now: float) -> None:
        """Record that the queue renewed a lease; an unknown one changes nothing.

        Args:
            number: Its number.
            now: The time just before the renewal was requested.
        """
        lease = self._held.get(number)
        if lease is not None:
            lease.renewed = now
            self._held.move_to_end(number)

    def give_up(self, now: float) -> list[int]:
        """Release and return the leases that have expired, or that the queue would not renew any more."""
        gone = []
        for number, lease in self._held.items():
            if now < lease.renewed + self.seconds * _RENEW_AT:
                break
            if now - lease.began + self.seconds > self.max_held_seconds or now >= lease.renewed + self.seconds:
                gone.append(number)
        for number in gone:
            del self._held[number]
        return gone
