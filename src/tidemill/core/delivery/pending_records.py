"""What goes into the next transaction: results that wait until their messages may be committed with them.

Theory of operation. A result is *staged* for the span of positions of its messages, in its lane. Of a lane's resolved
prefix as much may be committed as no staged result straddles: a result whose messages are not all in the prefix waits,
and the messages of its that are in it wait too, or a crash would lose it. A result that awaits a decision
is *undecided*, and lets nothing at or behind its first message go. What is taken is in flight until it is settled or
offered again.

Invariants: of a result and the positions of its span either all are at or before a cut or none; nothing is taken
twice unless it was offered again; results of a lane are taken in the order in which they were staged, as far as they
go together; an abandoned lane has nothing. Memory is O(staged).
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)
ResultT = TypeVar("ResultT")


class StagedState(enum.Enum):
    """Whether a result may go."""

    READY = "ready"
    UNDECIDED = "undecided"
    GONE = "gone"


class Staged(Generic[LaneT, ResultT]):
    """One result and its span. Read it; only `PendingRecords` changes it.

    Attributes:
        lane: Its lane.
        first: The first position of its messages.
        last: The last one.
        result: Opaque.
        state: Whether it may go.
    """

    __slots__ = ("first", "lane", "last", "result", "state")

    def __init__(self, lane: LaneT, first: int, last: int, result: ResultT) -> None:
        """Start ready."""
        self.lane = lane
        self.first = first
        self.last = last
        self.result = result
        self.state = StagedState.READY


class _Line(Generic[LaneT, ResultT]):
    """The staged results of one lane."""

    __slots__ = ("in_flight", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Staged[LaneT, ResultT]] = []
        self.in_flight: list[Staged[LaneT, ResultT]] = []


class PendingRecords(Generic[LaneT, ResultT]):
    """Lanes of staged results.

    Example:
        >>> staging: PendingRecords[str, str] = PendingRecords()
        >>> _ = staging.stage("a", 10, 10, "one"), staging.stage("a", 11, 14, "of two")
        >>> staging.cut("a", [10, 11, 12])
        1
        >>> [staged.result for staged in staging.take("a", 10)]
        ['one']
    """

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        """Start empty."""
        self._lines: dict[LaneT, _Line[LaneT, ResultT]] = {}

    def stage(self, lane: LaneT, first: int, last: int, result: ResultT) -> Staged[LaneT, ResultT]:
        """Add a result behind the others of its lane."""
        line = self._lines.get(lane)
        if line is None:
            line = self._lines[lane] = _Line()
        staged = Staged(lane, first, last, result)
        line.waiting.append(staged)
        return staged

    def cut(self, lane: LaneT, positions: Sequence[int]) -> int:
        """Return how many of a lane's resolved positions may be committed now.

        Args:
            lane: The lane.
            positions: Its contiguous resolved prefix, rising.
        """
        line = self._lines.get(lane)
        reach: dict[int, float] = {}
        for staged in line.waiting if line is not None else ():
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
        """Take every result whose messages are at or before `last`, a position up to which `cut` allowed."""
        line = self._lines.get(lane)
        if line is None:
            return ()
        line.in_flight = [staged for staged in line.waiting if staged.last <= last]
        if len(line.in_flight) == len(line.waiting):
            line.waiting = []
        else:
            line.waiting = [staged for staged in line.waiting if staged.last > last]
        return line.in_flight

    def settle(self, lane: LaneT) -> Sequence[Staged[LaneT, ResultT]]:
        """Let what is in flight go for good, and return it: the transaction was committed."""
        line = self._lines.get(lane)
        if line is None:
            return ()
        done, line.in_flight = line.in_flight, []
        for staged in done:
            staged.state = StagedState.GONE
        if not line.waiting:
            del self._lines[lane]
        return done

    def retry(self, lane: LaneT) -> Sequence[Staged[LaneT, ResultT]]:
        """Offer what is in flight again, before the others, and return it: the transaction was aborted."""
        line = self._lines.get(lane)
        if line is None:
            return ()
        back, line.in_flight = line.in_flight, []
        line.waiting = [*back, *line.waiting]
        return back

    def withhold(self, staged: Staged[LaneT, ResultT]) -> None:
        """Let nothing at or behind a waiting result go until it is decided about."""
        if staged.state is StagedState.READY:
            staged.state = StagedState.UNDECIDED

    def again(self, staged: Staged[LaneT, ResultT]) -> None:
        """Let an undecided result go with its messages after all."""
        if staged.state is StagedState.UNDECIDED:
            staged.state = StagedState.READY

    def drop(self, staged: Staged[LaneT, ResultT]) -> None:
        """Forget an undecided result: its messages go without it."""
        if staged.state is StagedState.UNDECIDED:
            staged.state = StagedState.GONE
            self._lines[staged.lane].waiting.remove(staged)

    def abandon(self, lane: LaneT) -> None:
        """Forget everything of a lane."""
        line = self._lines.pop(lane, None)
        if line is not None:
            for staged in (*line.waiting, *line.in_flight):
                staged.state = StagedState.GONE

    def outstanding(self, lane: LaneT) -> int:
        """Return how many results of a lane are staged, those in flight included."""
        line = self._lines.get(lane)
        return 0 if line is None else len(line.waiting) + len(line.in_flight)
