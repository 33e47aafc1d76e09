"""The cost of leaving, timing out and overflowing does not depend on how much is outstanding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tidemill.core.streams.group import StreamGroup
from tidemill.core.streams.members import Member, SeatEndCause, StreamLimits
from tidemill.core.streams.pending_events import PendingEvents

TIMEOUT = 1000.0
BACKLOG = 20


class Home:
    def note_resolved(self) -> None:
        return


class Crowded:
    """A group with very many outstanding events, because what `good` derived from it is not stored.

    `due` waits for what it derived from the first event alone, which is older than all others.
    """

    def __init__(self, outstanding: int) -> None:
        self.pending_events = PendingEvents()
        self.group: StreamGroup[str, int, int] = StreamGroup(
            StreamLimits(BACKLOG, TIMEOUT, 10**6), self.pending_events, Home()
        )
        self.pending_events.open("key", self.group.members)
        self.good, self.due = self.group.join("good"), self.group.join("due")
        self.publish(0.0)
        self.read(self.due, bind=True)
        self.read(self.good, bind=False)
        for _ in range(outstanding):
            self.publish(5.0)
            self.read(self.good, bind=True)
            self.read(self.due, bind=False)
        assert self.group.outstanding == outstanding + 1

    def publish(self, now: float) -> Any:
        return self.group.publish(0, 0, "lane", now)

    def read(self, member: Member[str, int, int], *, bind: bool) -> None:
        while self.group.load_more(member):
            for sent in member.unread:
                member.window = sent
                if bind:
                    self.pending_events.bind_pending_event(trigger_id=member.name, key="key")
                    member.carry()

    def leave(self) -> Callable[[], None]:
        passing = self.group.join("passing")
        self.publish(5.0)
        return lambda: self.group.leave(passing)

    def time_out(self) -> Callable[[], None]:
        def act() -> None:
            assert [(one.member.name, one.cause) for one in self.group.expire(TIMEOUT)] == [
                ("due", SeatEndCause.TIMEOUT)
            ]

        return act

    def overflow(self) -> Callable[[], None]:
        self.group.join("lazy")
        for _ in range(BACKLOG):
            self.publish(5.0)
            self.read(self.good, bind=True)
            self.read(self.due, bind=False)

        def act() -> None:
            assert [(one.member.name, one.cause) for one in self.publish(5.0)] == [("lazy", SeatEndCause.OVERFLOW)]

        return act

    def refuse(self) -> Callable[[], None]:
        # The second of all numbers; the first belongs to `due`.
        return lambda: self.pending_events.refuse_persisted([2], "refused")

    def reject(self) -> Callable[[], None]:
        self.publish(5.0)
        assert self.group.load_more(self.good)
        self.good.window = sent = next(self.good.unread)
        for _ in range(2):
            self.pending_events.bind_pending_event(trigger_id="good", key="key")
        return lambda: self.group.reject(self.good, sent)


def lines_run(act: Callable[[], Any]) -> int:
    """Return how many lines of Python a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("prepare", [Crowded.leave, Crowded.time_out, Crowded.overflow, Crowded.refuse, Crowded.reject])
def test_it_costs_the_same_with_a_thousand_times_as_much_outstanding(
    prepare: Callable[[Crowded], Callable[[], None]],
) -> None:
    few, many = (lines_run(prepare(Crowded(outstanding))) for outstanding in (10, 10_000))
    assert 0 < many <= few + 20
