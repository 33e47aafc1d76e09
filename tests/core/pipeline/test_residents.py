"""Resident copies: which copy gets which task, retirement, and starts that fail."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.examples import examples

from tidemill.core.pipeline.residents import CopyEnding, Effect, Give, Residents, RetireCopy, StartCopy, WakeAt
from tidemill.core.retry import Backoff

BACKOFF = Backoff(1.0, 8.0, 2.0)


class CopiesAgainstModel(RuleBasedStateMachine):
    """A shell that carries out the effects, with copies that answer and die at random."""

    @initialize(limit=st.integers(1, 4), recycle=st.integers(0, 3), ahead=st.integers(0, 2))
    def begin(self, limit: int, recycle: int, ahead: int) -> None:
        self.limit, self.recycle, self.ahead = limit, recycle, ahead
        self.copies: Residents[int] = Residents(limit, recycle, BACKOFF, ahead)
        self.now = 0.0
        self.tasks = 0
        self.waiting: list[int] = []
        self.has: dict[int, list[int]] = {}
        self.answers: dict[int, int] = {}
        self.wake = math.inf

    def apply(self, effects: object) -> None:
        for effect in effects:  # type: ignore[attr-defined]
            match effect:
                case StartCopy(copy, task):
                    assert copy not in self.answers, "a number was used twice"
                    assert all(self.has.values()), "a copy was started beside an idle one"
                    assert task == self.waiting.pop(0)
                    self.answers[copy] = 0
                    self.has[copy] = [task]
                case Give(copy, task):
                    assert task == self.waiting.pop(0)
                    if self.has[copy]:
                        assert all(self.has.values()), "one more for a busy copy beside an idle one"
                        assert self.answers[copy], "it did not show yet that it works"
                    self.has[copy].append(task)
                case RetireCopy(copy):
                    assert self.recycle
                    assert self.answers[copy] == self.recycle
                    assert self.has.pop(copy) == []
                case WakeAt(at):
                    assert at > self.now
                    self.wake = at
        assert self.copies.alive == len(self.has) <= self.limit
        assert self.copies.waiting == len(self.waiting)
        assert all(len(tasks) <= 1 + self.ahead for tasks in self.has.values())

    @rule()
    def a_task_comes(self) -> None:
        self.tasks += 1
        self.waiting.append(self.tasks)
        self.apply(self.copies.submit(self.tasks, self.now))

    def draw_copy(self, data: st.DataObject, *, busy: bool) -> int:
        return data.draw(st.sampled_from(sorted(copy for copy, tasks in self.has.items() if tasks or not busy)))

    @precondition(lambda self: any(self.has.values()))
    @rule(data=st.data())
    def a_copy_answers(self, data: st.DataObject) -> None:
        copy = self.draw_copy(data, busy=True)
        self.has[copy].pop(0)
        self.answers[copy] += 1
        self.apply(self.copies.note_answer(copy, self.now))
        assert self.copies.failed_starts == 0 or self.answers[copy] > 1

    @precondition(lambda self: self.has)
    @rule(data=st.data(), how=st.sampled_from([*CopyEnding, "unseen", "dropped"]))
    def a_copy_ends(self, data: st.DataObject, how: CopyEnding | str) -> None:
        copy = self.draw_copy(data, busy=False)
        tasks = self.has.pop(copy)
        before = self.copies.failed_starts
        if how == "unseen" and tasks:
            self.waiting[:0] = tasks
            self.apply(self.copies.note_undelivered(copy, self.now))
            how = CopyEnding.DIED
        elif isinstance(how, CopyEnding):
            self.waiting[:0] = tasks[1:]
            self.apply(self.copies.note_ended(copy, how, self.now))
        else:
            self.apply(self.copies.drop(copy, self.now))
        counts = how is CopyEnding.DIED and not self.answers[copy]
        assert before <= self.copies.failed_starts <= before + counts
        assert list(self.copies.note_ended(copy, CopyEnding.DIED, self.now)) == []
        assert list(self.copies.drop(copy, self.now)) == []

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
        if getattr(self, "waiting", None):
            assert all(self.has.values()), "a task waits beside an idle copy"
            if len(self.has) < self.limit:
                assert self.copies.failed_starts
                assert self.wake < math.inf or any(self.answers[copy] == 0 for copy in self.has)


TestCopiesAgainstModel = CopiesAgainstModel.TestCase
TestCopiesAgainstModel.settings = settings(max_examples=examples(200), stateful_step_count=40)


def copies(limit: int = 2, recycle: int = 0) -> Residents[str]:
    return Residents(limit, recycle, BACKOFF)


def names(effects: object) -> list[Effect[str]]:
    return list(effects)  # type: ignore[call-overload, no-any-return]


def test_copies_are_started_for_tasks_that_find_none_idle_up_to_the_limit() -> None:
    mine = copies()
    assert names(mine.submit("a", 0)) == [StartCopy(0, "a")]
    assert names(mine.submit("b", 0)) == [StartCopy(1, "b")]
    assert names(mine.submit("c", 0)) == []
    assert names(mine.note_answer(0, 0)) == [Give(0, "c")]
    assert names(mine.note_answer(1, 0)) == []
    assert mine.alive == 2


def test_the_copy_that_was_used_last_is_used_again() -> None:
    mine = copies()
    mine.submit("a", 0)
    mine.submit("b", 0)
    mine.note_answer(1, 0)
    mine.note_answer(0, 0)
    assert names(mine.submit("c", 0)) == [Give(0, "c")]


def test_a_copy_is_retired_after_its_tasks_and_the_next_task_starts_another() -> None:
    mine = copies(limit=1, recycle=2)
    mine.submit("a", 0)
    mine.submit("b", 0)
    mine.submit("c", 0)
    assert names(mine.note_answer(0, 0)) == [Give(0, "b")]
    assert names(mine.note_answer(0, 0)) == [RetireCopy(0), StartCopy(1, "c")]
    assert names(mine.note_ended(0, CopyEnding.DIED, 0)) == [], "the end of a retired copy is not a failure"
    assert mine.failed_starts == 0


def test_after_a_start_that_failed_one_copy_is_tried_and_only_after_a_wait_that_grows() -> None:
    mine = copies()
    mine.submit("a", 0)
    mine.submit("b", 0)
    assert names(mine.note_ended(0, CopyEnding.DIED, 10.0)) == []
    assert names(mine.note_ended(1, CopyEnding.DIED, 10.0)) == []
    assert mine.failed_starts == 1, "two that were started together are one failed start"
    assert names(mine.submit("c", 10.0)) == [WakeAt(11.0)]
    assert names(mine.tick(11.0)) == [StartCopy(2, "c")]
    assert names(mine.submit("d", 11.0)) == [], "while one is tried, no other is started"
    assert names(mine.note_ended(2, CopyEnding.DIED, 12.0)) == [WakeAt(14.0)]
    assert names(mine.tick(14.0)) == [StartCopy(3, "d")]
    mine.submit("e", 14.0)
    mine.submit("f", 14.0)
    assert names(mine.note_answer(3, 14.0)) == [Give(3, "e"), StartCopy(4, "f")], "it answers, so the others may start"


def test_neither_a_stopped_copy_nor_one_that_had_answered_is_a_failed_start() -> None:
    mine = copies()
    mine.submit("a", 0)
    assert names(mine.note_ended(0, CopyEnding.STOPPED, 0)) == []
    mine.submit("b", 0)
    mine.note_answer(1, 0)
    assert names(mine.note_ended(1, CopyEnding.DIED, 0)) == []
    assert mine.failed_starts == 0
    assert names(mine.submit("c", 0)) == [StartCopy(2, "c")]


def test_a_task_that_its_copy_never_saw_goes_first() -> None:
    mine = copies(limit=1)
    mine.submit("a", 0)
    mine.note_answer(0, 0)
    assert names(mine.submit("b", 0)) == [Give(0, "b")]
    mine.submit("c", 0)
    assert names(mine.note_undelivered(0, 0)) == [StartCopy(1, "b")]
    mine.withdraw("c")
    mine.withdraw("nobody")
    assert names(mine.note_answer(1, 0)) == []


def test_all_tasks_of_a_copy_that_saw_none_of_them_go_to_others_in_order() -> None:
    mine: Residents[str] = Residents(1, 0, BACKOFF, ahead=2)
    mine.submit("a", 0)
    mine.note_answer(0, 0)
    for task in "bcde":
        mine.submit(task, 0)
    assert names(mine.note_undelivered(0, 0)) == [StartCopy(1, "b")]
    assert names(mine.note_answer(1, 0)) == [Give(1, "c"), Give(1, "d"), Give(1, "e")]


def test_while_all_copies_are_busy_a_task_goes_to_the_copy_with_the_fewest() -> None:
    mine: Residents[str] = Residents(2, 5, BACKOFF, ahead=2)
    mine.submit("a", 0)
    mine.submit("b", 0)
    assert names(mine.submit("c", 0)) == [], "none has answered yet"
    mine.submit("d", 0)
    assert names(mine.note_answer(0, 0)) == [Give(0, "c"), Give(0, "d")]
    assert names(mine.note_answer(1, 0)) == []
    assert names(mine.submit("e", 0)) == [Give(1, "e")], "an idle one first"
    assert names(mine.submit("f", 0)) == [Give(1, "f")]
    assert names(mine.submit("g", 0)) == [Give(0, "g")]
    assert names(mine.submit("h", 0)) == [Give(1, "h")]
    assert names(mine.submit("i", 0)) == []
    assert names(mine.note_ended(0, CopyEnding.DIED, 0)) == [StartCopy(2, "d")], "c was worked on; d and g were not"
    assert names(mine.note_answer(1, 0)) == [Give(1, "g")], "it goes on with the next one, and gets another"
    assert mine.waiting == 1


def test_a_copy_gets_no_more_tasks_than_it_may_do_before_it_is_retired() -> None:
    mine: Residents[str] = Residents(1, 2, BACKOFF, ahead=5)
    mine.submit("a", 0)
    mine.submit("b", 0)
    mine.submit("c", 0)
    assert names(mine.note_answer(0, 0)) == [Give(0, "b")]
    assert names(mine.note_answer(0, 0)) == [RetireCopy(0), StartCopy(1, "c")]
