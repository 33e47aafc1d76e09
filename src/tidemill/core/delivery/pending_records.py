"""Results that wait to be committed in one transaction with the offsets of their messages.

Theory of operation. A result is *staged* in its lane, for the span of its messages' offsets. A lane's resolved prefix
is committed only up to a *cut* that no staged result straddles: if some messages of a result lie behind the prefix, the
result waits, and so do its messages within the prefix, because a crash would otherwise lose the result. A result that
awaits a decision is *undecided* and blocks everything from its first message on. Results that were taken are in flight
until they are settled or offered again.

Invariants: a result and the offsets of its span are either all at or before a cut, or all behind it; nothing is taken
twice unless it was offered again; results taken together from a lane are ordered by their last messages, and those of
one message by when they were staged; an abandoned lane holds nothing. Memory is O(staged).
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)
ResultT = TypeVar("ResultT")


class StagedState(enum.Enum):
    """Whether a result may be committed."""

    READY = "ready"
    UNDECIDED = "undecided"
    GONE = "gone"


class Staged(Generic[LaneT, ResultT]):
    """A result and its span. Only `PendingRecords` changes it.

    Attributes:
        lane: The lane of the result.
        first: The first position of its messages.
        last: The last position of its messages.
        result: The result; opaque.
        state: Whether the result may be committed.
    """

    __slots__ = ("first", "lane", "last", "result", "state")

    def __init__(self, lane: LaneT, first: int, last: int, result: ResultT) -> None:
        self.lane = lane
        self.first = first
        self.last = last
        self.result = result
        self.state = StagedState.READY


_get_last = operator.attrgetter("last")


class _LaneRecords(Generic[LaneT, ResultT]):
    """The staged results of one lane."""

    __slots__ = ("in_flight", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Staged[LaneT, ResultT]] = []
        self.in_flight: list[Staged[LaneT, ResultT]] = []


class PendingRecords(Generic[LaneT, ResultT]):
    """Staged results by lane.

    Example:
        >>> staging: PendingRecords[str, str] = PendingRecords()
        >>> _ = staging.stage("a", 10, 10, "one"), staging.stage("a", 11, 14, "of two")
        >>> staging.find_cut("a", [10, 11, 12])
        1
        >>> [staged.result for staged in staging.take("a", 10)]
        ['one']
    """

    __slots__ = ("_lanes",)

    def __init__(self) -> None:
        self._lanes: dict[LaneT, _LaneRecords[LaneT, ResultT]] = {}

    def stage(self, lane: LaneT, first: int, last: int, result: ResultT) -> Staged[LaneT, ResultT]:
        """Append a result to its lane."""
        staged = Staged(lane, first, last, result)
        self._find_records(lane).waiting.append(staged)
        return staged

    def stage_all(self, lane: LaneT, positions: Sequence[int], results: Sequence[ResultT]) -> None:
        """Append results to a lane, in order, each for a single position."""
        self._find_records(lane).waiting += [
            Staged(lane, position, position, result) for position, result in zip(positions, results, strict=True)
        ]

    def _find_records(self, lane: LaneT) -> _LaneRecords[LaneT, ResultT]:
        records = self._lanes.get(lane)
        if records is None:
            records = self._lanes[lane] = _LaneRecords()
        return records

    def find_cut(self, lane: LaneT, positions: Sequence[int]) -> int:
        """Return how many resolved positions of a lane may be committed now.

        Args:
            lane: The lane.
            positions: Its contiguous resolved prefix, in ascending order.
        """
        records = self._lanes.get(lane)
        reach: dict[int, float] = {}
        for staged in records.waiting if records is not None else ():
            if staged.state is StagedState.UNDECIDED:
                reach[staged.first] = float("inf")
            elif staged.last > staged.first:
                reach[staged.first] = max(staged.last, reach.get(staged.first, 0))
        if not reach:
            return len(positions)
        far: float = -1
        count = 0
        for index, position in enumerate(positions, 1):
            far = max(far, reach.get(position, -1))
            if far <= position:
                count = index
        return count

    def take(self, lane: LaneT, last: int) -> Sequence[Staged[LaneT, ResultT]]:
        """Take the results whose messages are all at or before `last`, which is the position of a cut, in order."""
        records = self._lanes.get(lane)
        if records is None:
            return ()
        # The list is almost sorted already, so this is nearly O(n).
        records.in_flight = sorted([staged for staged in records.waiting if staged.last <= last], key=_get_last)
        if len(records.in_flight) == len(records.waiting):
            records.waiting = []
        else:
            records.waiting = [staged for staged in records.waiting if staged.last > last]
        return records.in_flight

    def settle(self, lane: LaneT) -> Sequence[Staged[LaneT, ResultT]]:
        """Forget the results in flight after their transaction was committed, and return them."""
        records = self._lanes.get(lane)
        if records is None:
            return ()
        done, records.in_flight = records.in_flight, []
        for staged in done:
            staged.state = StagedState.GONE
        if not records.waiting:
            del self._lanes[lane]
        return done

    def retry(self, lane: LaneT) -> Sequence[Staged[LaneT, ResultT]]:
        """Offer the results in flight again, ahead of the others, after their transaction was aborted; return them."""
        records = self._lanes.get(lane)
        if records is None:
            return ()
        back, records.in_flight = records.in_flight, []
        records.waiting = [*back, *records.waiting]
        return back

    def withhold(self, staged: Staged[LaneT, ResultT]) -> None:
        """Mark a waiting result as undecided. Until it is decided, nothing from its first message on is committed."""
        if staged.state is StagedState.READY:
            staged.state = StagedState.UNDECIDED

    def allow(self, staged: Staged[LaneT, ResultT]) -> None:
        """Allow an undecided result to be committed with its messages after all."""
        if staged.state is StagedState.UNDECIDED:
            staged.state = StagedState.READY

    def drop(self, staged: Staged[LaneT, ResultT]) -> None:
        """Forget an undecided result; its messages are committed without it."""
        if staged.state is StagedState.UNDECIDED:
            staged.state = StagedState.GONE
            self._lanes[staged.lane].waiting.remove(staged)

    def abandon(self, lane: LaneT) -> None:
        """Forget all results of a lane."""
        records = self._lanes.pop(lane, None)
        if records is not None:
            for staged in (*records.waiting, *records.in_flight):
                staged.state = StagedState.GONE

    def count_outstanding(self, lane: LaneT) -> int:
        """Return the number of staged results of a lane, including those in flight."""
        records = self._lanes.get(lane)
        return 0 if records is None else len(records.waiting) + len(records.in_flight)
