from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidemill.core.tasks.worker_slots import (
    Attempt,
    Died,
    Effect,
    GoOn,
    Interrupt,
    InterruptReason,
    KillProcess,
    RetireProcess,
    RunAttempt,
    StartProcess,
    WorkerLimits,
    WorkerSlots,
)

LIMITS = WorkerLimits(
    concurrency=3, recycle_after=5, grace_seconds=5.0, idle_seconds=60.0, import_seconds=40.0, idle_processes=4
)
A1, A2, B1 = (
    Attempt((1, 1), "a.py", None, True),
    Attempt((2, 1), "a.py", None, True),
    Attempt((3, 1), "b.py", None, True),
)
#: Attempts that want a process of their own.
OWN1, OWN2 = Attempt((4, 1), "a.py"), Attempt((5, 1), "a.py")


def test_each_attempt_gets_a_process_that_has_run_nothing_and_one_is_started_ahead():
    slots = WorkerSlots(LIMITS)
    assert slots.claim(OWN1, 0.0) == [StartProcess(1, "a.py"), RunAttempt(1, OWN1), StartProcess(2, "a.py")]
    slots.note_loaded(1)
    assert slots.note_ended(1, 1.0, clean=True) == [RetireProcess(1)]
    assert slots.claim(OWN2, 1.0) == [RunAttempt(2, OWN2), StartProcess(3, "a.py")]
    assert slots.note_ended(2, 2.0, clean=False) == [RetireProcess(2)]


def test_a_process_that_has_run_something_is_not_given_an_attempt_that_wants_its_own():
    slots = WorkerSlots(LIMITS)
    slots.claim(A1, 0.0)
    assert slots.note_ended(1, 1.0, clean=True) == []
    assert slots.claim(OWN1, 1.0) == [StartProcess(2, "a.py"), RunAttempt(2, OWN1), StartProcess(3, "a.py")]
    # One that reuses takes the process that is warm, and leaves the one that was started ahead.
    assert slots.claim(A2, 1.0) == [RunAttempt(1, A2)]
    assert slots.note_ended(2, 2.0, clean=True) == [RetireProcess(2)]


def test_processes_that_were_started_ahead_for_many_files_leave_beyond_the_limit():
    slots = WorkerSlots(WorkerLimits(concurrency=8, idle_processes=1))
    slots.claim(OWN1, 0.0)
    assert slots.claim(Attempt((9, 1), "b.py"), 1.0) == [
        StartProcess(3, "b.py"),
        RunAttempt(3, Attempt((9, 1), "b.py")),
        StartProcess(4, "b.py"),
        RetireProcess(2),
    ]


def test_nothing_is_started_ahead_by_a_worker_that_drains():
    slots = WorkerSlots(LIMITS)
    slots.drain(0.0)
    assert slots.claim(OWN1, 0.0) == [StartProcess(1, "a.py"), RunAttempt(1, OWN1)]


def test_an_attempt_gets_a_new_process_and_the_next_that_reuses_processes_of_its_file_the_same_one():
    slots = WorkerSlots(LIMITS)
    assert slots.claim(A1, 0.0) == [StartProcess(1, "a.py"), RunAttempt(1, A1)]
    slots.note_loaded(1)
    assert slots.find_attempt(1) == A1
    assert slots.note_ended(1, 1.0, clean=True) == []
    assert slots.claim(A2, 1.0) == [RunAttempt(1, A2)]
    assert slots.claim(B1, 1.0) == [StartProcess(2, "b.py"), RunAttempt(2, B1)]
    assert slots.held == [A2, B1]
    assert slots.capacity == 1
    assert slots.processes == {1: "a.py", 2: "b.py"}


def test_a_process_that_is_not_as_before_is_replaced_at_once():
    slots = WorkerSlots(LIMITS)
    slots.claim(A1, 0.0)
    assert slots.note_ended(1, 1.0, clean=False) == [StartProcess(2, "a.py"), RetireProcess(1)]
    assert slots.claim(A2, 1.0) == [RunAttempt(2, A2)]
    assert slots.tick(5.9) == []
    assert slots.tick(6.0) == [KillProcess(1)]
    assert slots.tick(7.0) == []
    assert slots.note_exited(1, 99.0) == []


def test_a_process_has_a_successor_before_its_last_attempt_ends():
    slots = WorkerSlots(WorkerLimits(recycle_after=2))
    assert slots.claim(A1, 0.0) == [StartProcess(1, "a.py"), RunAttempt(1, A1)]
    slots.note_loaded(1)
    slots.note_ended(1, 0.0, clean=True)
    assert slots.claim(A2, 0.0) == [RunAttempt(1, A2), StartProcess(2, "a.py")]
    assert slots.note_ended(1, 1.0, clean=True) == [RetireProcess(1)]
    assert slots.claim(A1, 1.0) == [RunAttempt(2, A1)]


def test_no_successor_is_started_where_another_process_is_ready():
    slots = WorkerSlots(LIMITS)
    slots.claim(A1, 0.0)
    slots.claim(A2, 0.0)
    slots.note_ended(1, 1.0, clean=True)
    assert slots.note_ended(2, 1.0, clean=False) == [RetireProcess(2)]


def test_an_attempt_that_takes_too_long_is_interrupted_and_its_process_killed_after_the_grace():
    slots = WorkerSlots(LIMITS)
    slots.claim(Attempt((1, 1), "a.py", 10.0, True), 0.0)
    slots.note_loaded(1)
    assert slots.next_due == 10.0
    assert slots.tick(9.0) == []
    assert slots.tick(10.0) == [Interrupt(1, InterruptReason.TIMEOUT)]
    assert slots.next_due == 15.0
    assert slots.end((1, 1), 11.0) == []
    assert slots.tick(15.0) == [KillProcess(1)]
    assert slots.next_due is None
    assert slots.note_exited(1, 99.0) == [Died(Attempt((1, 1), "a.py", 10.0, True), InterruptReason.TIMEOUT)]


def test_an_attempt_that_ends_within_the_grace_has_a_result_and_its_process_leaves():
    slots = WorkerSlots(LIMITS)
    slots.claim(Attempt((1, 1), "a.py", 10.0, True), 0.0)
    slots.tick(10.0)
    assert slots.note_ended(1, 11.0, clean=True) == [StartProcess(2, "a.py"), RetireProcess(1)]
    assert slots.note_exited(1, 99.0) == []


def test_a_process_that_ends_by_itself_is_the_end_of_its_attempt():
    slots = WorkerSlots(LIMITS)
    slots.claim(A1, 0.0)
    assert slots.note_exited(1, 99.0) == [Died(A1, InterruptReason.CRASH)]
    slots.claim(A1, 0.0)
    assert slots.note_exited(2, 99.0, lost=True) == [Died(A1, InterruptReason.LOST)]
    slots.claim(A1, 0.0)
    slots.end(A1.key, 0.0)
    assert slots.note_exited(3, 99.0, lost=True) == [Died(A1, InterruptReason.REPLACED)]


def test_an_import_that_does_not_end_is_killed():
    slots = WorkerSlots(LIMITS)
    slots.claim(A1, 0.0)
    assert slots.next_due == 40.0
    assert slots.tick(40.0) == [KillProcess(1)]
    assert slots.note_exited(1, 99.0) == [Died(A1, InterruptReason.IMPORT)]


def test_a_process_without_work_leaves_after_a_while():
    slots = WorkerSlots(LIMITS)
    slots.claim(A1, 0.0)
    slots.note_loaded(1)
    slots.note_ended(1, 1.0, clean=True)
    assert slots.next_due == 61.0
    assert slots.tick(61.0) == [RetireProcess(1)]
    assert slots.claim(A1, 61.0) == [StartProcess(2, "a.py"), RunAttempt(2, A1)]


def test_a_process_whose_file_has_changed_leaves_once_it_has_nothing_to_do():
    slots = WorkerSlots(LIMITS)
    slots.claim(A1, 0.0)
    assert slots.note_stale(1, 0.0) == []
    slots.note_ended(1, 1.0, clean=True)
    assert slots.note_stale(1, 1.0) == [RetireProcess(1)]
    assert slots.note_stale(1, 1.0) == []


def test_only_a_few_processes_without_work_are_kept():
    slots = WorkerSlots(WorkerLimits(concurrency=1, idle_processes=1))
    slots.claim(A1, 0.0)
    slots.note_ended(1, 1.0, clean=True)
    slots.claim(B1, 2.0)
    assert slots.note_ended(2, 3.0, clean=True) == [RetireProcess(1)]


def test_a_worker_that_drains_claims_nothing_and_lets_attempts_end():
    slots = WorkerSlots(LIMITS)
    slots.claim(A1, 0.0)
    slots.claim(A2, 0.0)
    slots.claim(B1, 0.0)
    slots.note_ended(2, 1.0, clean=True)
    assert slots.drain(2.0) == [RetireProcess(2)]
    assert slots.capacity == 0
    assert slots.note_ended(1, 3.0, clean=False) == [RetireProcess(1)]
    assert slots.end_all(4.0) == [Interrupt(3, InterruptReason.DRAIN)]
    assert slots.note_exited(3, 99.0) == [Died(B1, InterruptReason.DRAIN)]


def test_what_is_said_of_processes_that_are_gone_changes_nothing():
    slots = WorkerSlots(LIMITS)
    slots.note_loaded(7)
    assert slots.note_ended(7, 0.0, clean=True) == []
    assert slots.note_stale(7, 0.0) == []
    assert slots.note_exited(7, 99.0) == []
    assert slots.end((7, 7), 0.0) == []
    assert slots.find_attempt(7) is None
    assert slots.next_due is None


def test_an_attempt_that_waits_gives_its_place_to_another_and_gets_the_first_that_becomes_free():
    slots = WorkerSlots(WorkerLimits(concurrency=1))
    slots.claim(A1, 0.0)
    slots.note_loaded(1)
    assert (slots.busy, slots.capacity) == (1, 0)
    assert slots.block(1, 1.0) == []
    assert slots.block(1, 2.0) == []
    assert (slots.busy, slots.capacity, slots.held) == (0, 1, [A1])
    slots.claim(B1, 2.0)
    assert slots.unblock(A1.key, 3.0) == []
    assert slots.unblock(A1.key, 3.0) == []
    assert slots.capacity == 0
    assert slots.note_ended(2, 4.0, clean=True) == [GoOn(1)]
    assert (slots.busy, slots.capacity) == (1, 0)
    assert slots.unblock(A1.key, 5.0) == [], "it does not wait"


@pytest.mark.parametrize("leaves", ["ends", "exits", "waits"])
def test_a_place_that_becomes_free_is_given_to_the_attempt_that_was_allowed_first(leaves):
    slots = WorkerSlots(WorkerLimits(concurrency=1))
    for number, attempt in enumerate((A1, A2), 1):
        slots.claim(attempt, 0.0)
        slots.block(number, 0.0)
    slots.claim(B1, 0.0)
    slots.unblock(A2.key, 1.0)
    slots.unblock(A1.key, 2.0)
    match leaves:
        case "ends":
            assert slots.note_ended(3, 3.0, clean=False) == [GoOn(2), StartProcess(4, "b.py"), RetireProcess(3)]
        case "exits":
            assert slots.note_exited(3, 3.0) == [Died(B1, InterruptReason.CRASH), GoOn(2)]
        case "waits":
            assert slots.block(3, 3.0) == [GoOn(2)]
    assert slots.busy == 1


def test_the_time_of_a_wait_does_not_count_for_the_timeout():
    slots = WorkerSlots(WorkerLimits(concurrency=1))
    slots.claim(Attempt((1, 1), "a.py", 10.0, True), 0.0)
    slots.note_loaded(1)
    slots.block(1, 4.0)
    assert slots.next_due is None
    assert slots.tick(100.0) == []
    assert slots.unblock((1, 1), 100.0) == [GoOn(1)]
    assert slots.next_due == 106.0


def test_an_attempt_that_waits_is_ended_as_others_are_and_does_not_go_on():
    slots = WorkerSlots(WorkerLimits(concurrency=1, grace_seconds=5.0))
    slots.claim(A1, 0.0)
    slots.note_loaded(1)
    slots.block(1, 1.0)
    slots.claim(B1, 1.0)
    slots.unblock(A1.key, 2.0)
    assert slots.end(A1.key, 3.0) == [Interrupt(1, InterruptReason.REPLACED)]
    assert slots.note_ended(2, 4.0, clean=True) == []
    assert slots.tick(8.0) == [KillProcess(1)]
    assert slots.note_exited(1, 8.0) == [Died(A1, InterruptReason.REPLACED)]


def test_a_worker_that_drains_ends_attempts_that_wait_or_begin_to_wait():
    slots = WorkerSlots(WorkerLimits(concurrency=1))
    slots.claim(A1, 0.0)
    slots.block(1, 1.0)
    slots.claim(B1, 1.0)
    assert slots.drain(2.0) == [Interrupt(1, InterruptReason.DRAIN)]
    assert slots.unblock(A1.key, 3.0) == []
    assert slots.block(2, 4.0) == [Interrupt(2, InterruptReason.DRAIN)]
    assert slots.end_all(5.0) == []


def test_what_is_said_of_waits_that_do_not_exist_changes_nothing():
    slots = WorkerSlots(LIMITS)
    assert slots.block(7, 0.0) == []
    assert slots.unblock((7, 7), 0.0) == []
    slots.claim(A1, 0.0)
    slots.claim(A2, 0.0)
    slots.block(2, 0.0)
    assert slots.unblock(A1.key, 0.0) == []
    slots.note_ended(1, 1.0, clean=True)
    assert slots.block(1, 2.0) == []


class AnyOrder(RuleBasedStateMachine):
    """A worker to which things happen in any order, and processes that obey or not."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = WorkerSlots(LIMITS)
        self.now = 0.0
        self.number = 0
        self.alive: dict[int, Attempt | None] = {}
        self.files: dict[int, str] = {}
        self.told: dict[int, float] = {}
        #: Whether the attempts that a process has run reuse it.
        self.shared: dict[int, bool] = {}
        self.claimed: set[tuple[int, int]] = set()
        self.ended: set[tuple[int, int]] = set()
        #: The attempts that wait at their `yield`, since when, and those among them that may go on.
        self.waits: dict[tuple[int, int], float] = {}
        self.allowed: list[tuple[int, int]] = []
        self.deadlines: dict[tuple[int, int], float] = {}
        self.interrupted: set[tuple[int, int]] = set()

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartProcess(process, file):
                    assert process not in self.files
                    self.alive[process], self.files[process] = None, file
                case RunAttempt(process, attempt):
                    assert self.alive[process] is None
                    assert process not in self.told
                    assert self.files[process] == attempt.file
                    assert self.shared.get(process) is not False, "a process that ran one attempt gets no other"
                    assert process not in self.shared or attempt.reuses
                    self.shared[process] = attempt.reuses
                    self.alive[process] = attempt
                case GoOn(process):
                    going = self.alive[process]
                    assert going is not None
                    fit = [key for key in self.allowed if key not in self.interrupted]
                    assert going.key == fit[0], "the attempts go on in the order in which they were allowed to"
                    self.allowed.remove(going.key)
                    since = self.waits.pop(going.key)
                    if going.key in self.deadlines:
                        self.deadlines[going.key] += self.now - since
                case Interrupt(process, why):
                    self.told.setdefault(process, self.now)
                    ended = self.alive[process]
                    assert ended is not None
                    self.interrupted.add(ended.key)
                    if why is InterruptReason.TIMEOUT:
                        assert ended.key not in self.waits
                        assert self.now >= self.deadlines[ended.key] - 1e-6
                case RetireProcess(process):
                    self.told.setdefault(process, self.now)
                case KillProcess(process):
                    self.exit(process)
                case Died(attempt):
                    self.end(attempt)

    def end(self, attempt: Attempt) -> None:
        assert attempt.key not in self.ended
        self.ended.add(attempt.key)
        self.waits.pop(attempt.key, None)
        if attempt.key in self.allowed:
            self.allowed.remove(attempt.key)

    def exit(self, process: int) -> None:
        del self.alive[process]
        self.told.pop(process, None)
        self.do(self.slots.note_exited(process, self.now))

    @rule(
        file=st.sampled_from(["a.py", "b.py", "c.py"]), seconds=st.none() | st.floats(0.0, 20.0), reuses=st.booleans()
    )
    def claim(self, file: str, seconds: float | None, reuses: bool) -> None:
        if self.slots.capacity:
            self.number += 1
            attempt = Attempt((self.number, 1), file, None if seconds is None else self.now + seconds, reuses)
            self.claimed.add(attempt.key)
            if attempt.deadline is not None:
                self.deadlines[attempt.key] = attempt.deadline
            self.do(self.slots.claim(attempt, self.now))

    @rule(data=st.data(), clean=st.booleans())
    def finish(self, data: st.DataObject, clean: bool) -> None:
        busy = sorted(process for process, attempt in self.alive.items() if attempt is not None)
        if busy:
            process = data.draw(st.sampled_from(busy))
            attempt, self.alive[process] = self.alive[process], None
            assert attempt is not None
            self.end(attempt)
            self.do(self.slots.note_ended(process, self.now, clean=clean))

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        if self.alive:
            self.slots.note_loaded(data.draw(st.sampled_from(sorted(self.alive))))

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        if self.alive:
            self.exit(data.draw(st.sampled_from(sorted(self.alive))))

    @rule(data=st.data())
    def replaced(self, data: st.DataObject) -> None:
        if self.slots.held:
            self.do(self.slots.end(data.draw(st.sampled_from(self.slots.held)).key, self.now))

    @rule(data=st.data())
    def block(self, data: st.DataObject) -> None:
        busy = [(process, one.key) for process, one in self.alive.items() if one and one.key not in self.waits]
        if busy:
            process, key = data.draw(st.sampled_from(sorted(busy)))
            self.waits[key] = self.now
            self.do(self.slots.block(process, self.now))

    @rule(data=st.data())
    def unblock(self, data: st.DataObject) -> None:
        waiting = sorted(self.waits.keys() - set(self.allowed))
        if waiting:
            key = data.draw(st.sampled_from(waiting))
            self.allowed.append(key)
            self.do(self.slots.unblock(key, self.now))

    @rule(data=st.data())
    def change_file(self, data: st.DataObject) -> None:
        if self.alive:
            self.do(self.slots.note_stale(data.draw(st.sampled_from(sorted(self.alive))), self.now))

    @rule(seconds=st.floats(0.0, 70.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.slots.tick(self.now))

    @rule()
    def drain(self) -> None:
        self.do(self.slots.drain(self.now))
        assert self.slots.capacity == 0

    @rule()
    def end_all(self) -> None:
        self.do(self.slots.end_all(self.now))

    @invariant()
    def every_attempt_runs_or_has_ended(self) -> None:
        running = {attempt.key for attempt in self.alive.values() if attempt is not None}
        assert {attempt.key for attempt in self.slots.held} == running
        assert running | self.ended == self.claimed
        assert not running & self.ended
        assert self.slots.busy == len(running - self.waits.keys()) <= LIMITS.concurrency

    @invariant()
    def no_place_is_free_while_an_attempt_may_go_on(self) -> None:
        if set(self.allowed) - self.interrupted:
            assert self.slots.busy == LIMITS.concurrency

    @invariant()
    def nobody_outlives_the_grace(self) -> None:
        due = self.slots.next_due
        for at in self.told.values():
            assert due is not None
            assert due <= at + 2 * LIMITS.grace_seconds

    @invariant()
    def few_are_kept(self) -> None:
        idle = [number for number, attempt in self.alive.items() if attempt is None and number not in self.told]
        assert len(idle) <= LIMITS.idle_processes + LIMITS.concurrency + len(self.waits)


TestAnyOrder = AnyOrder.TestCase
