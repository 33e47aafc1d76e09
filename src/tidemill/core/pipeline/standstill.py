"""Finds stalled lanes: lanes with work whose oldest message has been the same for too long.

The oldest uncommitted message of a lane is its head; a commit moves the head. A lane is stalled if its head does not
change, however many other messages are processed meanwhile.

Invariant: a lane is named once per stall, at the first check at which its head has been the same for `stall_seconds`; a
lane without work is never named.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Standstills(Generic[LaneT]):
    """The result of a check.

    Attributes:
        heads: All lanes with work, and the time of the first check that saw the current head.
        since: The stalled lanes, and since when.
        begun: The lanes that have stalled since the previous check.
        over: The lanes that were stalled at the previous check and no longer are.
    """

    heads: Mapping[LaneT, float]
    since: Mapping[LaneT, float]
    begun: tuple[LaneT, ...]
    over: tuple[LaneT, ...]


class StandstillWatch(Generic[LaneT]):
    """Watches the heads of lanes. All times are seconds of one monotonic clock.

    Args:
        stall_seconds: How long a head may stay the same.

    Example:
        >>> watch: StandstillWatch[str] = StandstillWatch(60.0)
        >>> watch.check(0.0, {"a": 7, "b": 1}).begun, watch.check(60.0, {"a": 7, "b": 2}).begun
        ((), ('a',))
    """

    __slots__ = ("_heads", "_named", "_stall_seconds")

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._heads: dict[LaneT, tuple[int, float]] = {}
        self._named: dict[LaneT, float] = {}

    def check(self, now: float, heads: Mapping[LaneT, int]) -> Standstills[LaneT]:
        """Check the heads of all lanes that have work and are not paused by a user.

        Args:
            now: The current time.
            heads: An identifier of the oldest message of each lane; it is never reused for another message.
        """
        before, self._heads = self._heads, {}
        for lane, head in heads.items():
            known = before.get(lane)
            self._heads[lane] = known if known is not None and known[0] == head else (head, now)
        same = {lane: since for lane, (_, since) in self._heads.items()}
        named = {lane: since for lane, since in same.items() if now - since >= self._stall_seconds}
        # A stalled lane whose head moves is over its stall; it can stall again only after another `stall_seconds`.
        begun = tuple(lane for lane in named if lane not in self._named)
        over = tuple(lane for lane in self._named if lane not in named)
        self._named = named
        return Standstills(same, named, begun, over)
