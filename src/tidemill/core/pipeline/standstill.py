"""Which lanes stand still: those with work whose oldest message is the same for too long.

The oldest message that is not committed is a lane's head; when the commit moves, another one is. So a lane stands still
if its head stays the same, whatever else of it is processed meanwhile.

Invariant: a lane is named once per standstill, at the first check at which its head has been the same for
`stall_seconds`; one without work never is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Standstills(Generic[LaneT]):
    """What a check found.

    Attributes:
        heads: All lanes with work, and since when the head of each has been the same, as far as checks saw it.
        since: The lanes that stand still, and since when.
        begun: Those that did not at the check before.
        over: Those that did then and no longer do.
    """

    heads: Mapping[LaneT, float]
    since: Mapping[LaneT, float]
    begun: tuple[LaneT, ...]
    over: tuple[LaneT, ...]


class StandstillWatch(Generic[LaneT]):
    """Watches the heads of lanes; all times are seconds of one monotonic clock.

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
        """Process the heads of all lanes with work that are not paused by a user.

        Args:
            now: The time.
            heads: What identifies the oldest message of each lane; never used again for another one.
        """
        before, self._heads = self._heads, {}
        for lane, head in heads.items():
            known = before.get(lane)
            self._heads[lane] = known if known is not None and known[0] == head else (head, now)
        same = {lane: since for lane, (_, since) in self._heads.items()}
        named = {lane: since for lane, since in same.items() if now - since >= self._stall_seconds}
        # A lane whose head moved while it stood still stands still again only after `stall_seconds`.
        begun = tuple(lane for lane in named if lane not in self._named)
        over = tuple(lane for lane in self._named if lane not in named)
        self._named = named
        return Standstills(same, named, begun, over)
