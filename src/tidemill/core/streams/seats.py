"""The seats of a shared stream, which are kept for members that are away.

A seat is a member like any other, but does not read: new events wait for it. It is exempt from the limits on how much a
member may leave unread and how long it may hold an event. A member that comes back to its seat stays exempt until it
has caught up; from then on the ack timeout counts from its return.

Invariants: a seat ends when its time is over, or when seats alone have kept the group full for too long, and not
before; a member that came back has no seat. The cost of every call is proportional to what it returns or changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tidemill.core.streams.members import Member, SeatEndCause

AnyMember = Member[Any, Any, Any]


@dataclass(frozen=True, slots=True)
class _Return:
    caught_up_at: int
    since: float


class Seats:
    """The seats of one group.

    Args:
        full_seconds: How long seats alone may keep the group full.
    """

    __slots__ = ("_alone_since", "_full_seconds", "_returns", "_until")

    def __init__(self, full_seconds: float) -> None:
        self._full_seconds: Final = full_seconds
        self._until: dict[AnyMember, float] = {}
        self._returns: dict[AnyMember, _Return] = {}
        self._alone_since: float | None = None

    def __contains__(self, member: object) -> bool:
        return member in self._until

    def __bool__(self) -> bool:
        """Return whether there is a seat, or a member that has not caught up."""
        return bool(self._until or self._returns)

    def list_all(self) -> dict[AnyMember, float]:
        """Return all seats, and until when they are kept."""
        return dict(self._until)

    def keep(self, member: AnyMember, until: float) -> None:
        """Turn a member into a seat, or extend its seat."""
        if not self._until:
            self._alone_since = None
        self._until[member] = until

    def take(self, member: AnyMember, end: int, now: float) -> bool:
        """Turn a seat into a member that came back.

        Args:
            member: The seat.
            end: The position after the last event that waits for it.
            now: The current time.

        Returns:
            Whether it has to catch up first.
        """
        del self._until[member]
        if member.position >= end:
            return False
        self._returns[member] = _Return(end, now)
        return True

    def take_caught_up(self, member: AnyMember) -> float | None:
        """Return, once, when a member came back, if it has caught up; None otherwise."""
        back = self._returns.get(member)
        if back is None or member.position < back.caught_up_at:
            return None
        del self._returns[member]
        return back.since

    def drop(self, member: AnyMember) -> None:
        """Forget a member that has left."""
        self._until.pop(member, None)
        self._returns.pop(member, None)

    def clear(self) -> None:
        """Forget all seats, and all members that came back."""
        self._until.clear()
        self._returns.clear()

    def find_late(self, now: float, timeout_seconds: float) -> list[AnyMember]:
        """Return the members that came back and have held an event for longer than the timeout since then."""
        return [
            member
            for member, back in self._returns.items()
            if (sent := member.find_next_held()) is not None and now - max(sent.at, back.since) >= timeout_seconds
        ]

    def find_ended(self, now: float, *, alone: bool) -> list[tuple[AnyMember, SeatEndCause]]:
        """Return the seats that end now, and why.

        Args:
            now: The current time.
            alone: Whether the group is full and waits only for seats.
        """
        ended = [(member, SeatEndCause.SEAT_TIMEOUT) for member, until in self._until.items() if until <= now]
        return ended or [(member, SeatEndCause.SEAT_FULL) for member in self._find_overfull(now, alone=alone)]

    @property
    def any_catching_up(self) -> bool:
        """Whether any member has come back and not caught up."""
        return bool(self._returns)

    def _find_overfull(self, now: float, *, alone: bool) -> list[AnyMember]:
        """Return the seats that are last in the log, if seats alone have kept the group full for too long."""
        if not alone or not self._until:
            self._alone_since = None
            return []
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since < self._full_seconds:
            return []
        self._alone_since = None
        last = min(member.position for member in self._until)
        return [member for member in self._until if member.position == last]
