"""Resident copies: who gets which task, recycling, and starts that fail."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidemill.core.residents import Effect, Ending, Give, Residents, Retire, Start, WakeAt
from tidemill.core.retry import Backoff

BACKOFF = Backoff(1.0, 8.0, 2.0)


class CopiesBesideModel(RuleBasedStateMachine):
    """A shell that does what it is told, with copies that answer and die as they like."""

    @initialize(limit=st.integers(1, 4), recycle=st.integers(0, 3))
    def begin(self, limit: int, recycle: int) -> None:
        self.limit, self.recycle = limit, recycle
        self.copies: Residents[int] = Residents(limit, recycle, BACKOFF)
        self.now = 0.0
        self.tasks = 0
        self.waiting: list[int] = []
        self.busy: dict[int, int] = {}
        self.idle: list[int] = []
        self.answers: dict[int, int] = {}
        self.wake = math.inf
        self.died_unproven_at: float | None = None
        self.started: list[int] = []

    def apply(self, effects: object) -> None:
        for effect in effects:  # type: ignore[attr-defined]
            match effect:
                case Start(copy, task):
                    assert copy not in self.answers, "a number was used twice"
                    assert task == self.waiting.pop(0)
                    assert not self.idle, "a copy was started beside an idle one"
                    self.answers[copy] = 0
                    self.busy[copy] = task
                    self.started.append(copy)
                case Give(copy, task):
                    assert task == self.waiting.pop(0)
                    self.idle.remove(copy)
                    self.busy[copy] = task
                case Retire(copy):
                    assert self.recycle
                    assert self.answers[copy] == self.recycle
                    self.idle.remove(copy)
                case WakeAt(at):
                    assert at > self.now
                    self.wake = at
        assert self.copies.alive == len(self.busy) + len(self.idle) <= self.limit
        assert self.copies.waiting == len(self.waiting)

    @rule()
    def a_task_comes(self) -> None:
        self.tasks += 1
        self.waiting.append(self.tasks)
        self.apply(self.copies.submit(self.tasks, self.now))

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def a_copy_answers(self, data: st.DataObject) -> None:
        copy = data.draw(st.sampled_from(sorted(self.busy)))
        del self.busy[copy]
        self.idle.append(copy)
        self.answers[copy] += 1
        self.apply(self.copies.answered(copy, self.now))
        assert self.copies.failed_starts == 0 or self.answers[copy] > 1

    @precondition(lambda self: self.busy or self.idle)
    @rule(data=st.data(), ending=st.sampled_from(Ending), unseen=st.booleans())
    def a_copy_ends(self, data: st.DataObject, ending: Ending, unseen: bool) -> None:
        copy = data.draw(st.sampled_from(sorted([*self.busy, *self.idle])))
        task = self.busy.pop(copy, None)
        if copy in self.idle:
            self.idle.remove(copy)
        before = self.copies.failed_starts
        if unseen and task is not None:
            self.waiting.insert(0, task)
            self.apply(self.copies.unseen(copy, task, self.now))
            ending = Ending.DIED
        else:
            self.apply(self.copies.ended(copy, ending, self.now))
        counts = ending is Ending.DIED and not self.answers[copy]
        assert before <= self.copies.failed_starts <= before + counts

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_task_is_withdrawn(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(task)
        self.copies.withdraw(task)

    @rule(seconds=st.floats(0.1, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.wake:
            self.wake = math.inf
            self.apply(self.copies.tick(self.now))

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        if getattr(self, "waiting", None) and len(self.busy) + len(self.idle) < self.limit:
            assert self.copies.failed_starts
            trying = any(self.answers[copy] == 0 for copy in self.busy)
            assert trying or self.wake < math.inf
        assert not (getattr(self, "waiting", None) and self.idle)


TestCopiesBesideModel = CopiesBesideModel.TestCase
TestCopiesBesideModel.settings = settings(max_examples=200, stateful_step_count=40)


def copies(limit: int = 2, recycle: int = 0) -> Residents[str]:
    return Residents(limit, recycle, BACKOFF)


def names(effects: object) -> list[Effect[str]]:
    return list(effects)  # type: ignore[call-overload]


def test_copies_are_started_for_tasks_that_find_none_idle_up_to_the_limit() -> None:
    mine = copies()
    assert names(mine.submit("a", 0)) == [Start(0, "a")]
    assert names(mine.submit("b", 0)) == [Start(1, "b")]
    assert names(mine.submit("c", 0)) == []
    assert names(mine.answered(0, 0)) == [Give(0, "c")]
    assert names(mine.answered(1, 0)) == []
    assert mine.alive == 2


def test_the_copy_that_was_used_last_is_used_again() -> None:
    mine = copies()
    mine.submit("a", 0)
    mine.submit("b", 0)
    mine.answered(1, 0)
    mine.answered(0, 0)
    assert names(mine.submit("c", 0)) == [Give(0, "c")]


def test_a_copy_is_retired_after_its_tasks_and_the_next_task_starts_another() -> None:
    mine = copies(limit=1, recycle=2)
    mine.submit("a", 0)
    mine.submit("b", 0)
    mine.submit("c", 0)
    assert names(mine.answered(0, 0)) == [Give(0, "b")]
    assert names(mine.answered(0, 0)) == [Retire(0), Start(1, "c")]
    assert names(mine.ended(0, Ending.DIED, 0)) == [], "the end of a retired copy is no failure"
    assert mine.failed_starts == 0


def test_after_a_start_that_failed_one_copy_is_tried_and_only_after_a_wait_that_grows() -> None:
    mine = copies()
    mine.submit("a", 0)
    mine.submit("b", 0)
    assert names(mine.ended(0, Ending.DIED, 10.0)) == []
    assert names(mine.ended(1, Ending.DIED, 10.0)) == []
    assert mine.failed_starts == 1, "two that were started together are one failed start"
    assert names(mine.submit("c", 10.0)) == [WakeAt(11.0)]
    assert names(mine.tick(11.0)) == [Start(2, "c")]
    assert names(mine.submit("d", 11.0)) == [], "while one is tried, no other is started"
    assert names(mine.ended(2, Ending.DIED, 12.0)) == [WakeAt(14.0)]
    assert names(mine.tick(14.0)) == [Start(3, "d")]
    mine.submit("e", 14.0)
    mine.submit("f", 14.0)
    assert names(mine.answered(3, 14.0)) == [Give(3, "e"), Start(4, "f")], "it answers, so the others may start"


def test_a_copy_that_was_stopped_is_no_failed_start_nor_is_one_that_had_answered() -> None:
    mine = copies()
    mine.submit("a", 0)
    assert names(mine.ended(0, Ending.STOPPED, 0)) == []
    mine.submit("b", 0)
    mine.answered(1, 0)
    assert names(mine.ended(1, Ending.DIED, 0)) == []
    assert mine.failed_starts == 0
    assert names(mine.submit("c", 0)) == [Start(2, "c")]


def test_a_task_that_its_copy_never_saw_goes_first() -> None:
    mine = copies(limit=1)
    mine.submit("a", 0)
    mine.answered(0, 0)
    assert names(mine.submit("b", 0)) == [Give(0, "b")]
    mine.submit("c", 0)
    assert names(mine.unseen(0, "b", 0)) == [Start(1, "b")]
    mine.withdraw("c")
    mine.withdraw("nobody")
    assert names(mine.answered(1, 0)) == []
