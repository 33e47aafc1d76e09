"""The supervision of a slot, rule by rule, and its invariants under random schedules."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.core.examples import examples

from tidemill.core.supervision.slot import Slot
from tidemill.core.supervision.slot_events import (
    AdmitEngine,
    CancelJob,
    DrainEngine,
    DrainRequested,
    Effect,
    EngineConnected,
    EngineEnding,
    EngineReady,
    Heartbeat,
    Input,
    JobEnded,
    KillEngine,
    LinkClosed,
    OperatorReport,
    RefuseEngine,
    ReportKind,
    RestartRequested,
    SlotFinished,
    StartSlot,
    SubmitJob,
    Tick,
)
from tidemill.core.supervision.slot_limits import SlotLimits, SlotState


class Play:
    """A slot and a clock; reports are kept apart from the other effects."""

    def __init__(self) -> None:
        self.slot = Slot(3)
        self.now = 1000.0
        self.reports: list[OperatorReport] = []

    def feed(self, event: Input, after: float = 0.0) -> list[Effect]:
        """Let time pass, with ticks, and then feed an event."""
        until = self.now + after
        effects: list[Effect] = []
        while self.slot.due is not None and self.slot.due < until:
            self.now = max(self.now, self.slot.due)
            effects += self._take(Tick())
        self.now = until
        return effects + self._take(event)

    def stand_still(self, seconds: float) -> None:
        """Let time pass without ticks."""
        self.now += seconds

    def seconds_to_effect(self) -> float:
        """Let time pass until a tick has an effect, and return how long that took."""
        started = self.now
        while True:
            assert self.slot.due is not None
            self.now = max(self.now, self.slot.due)
            if self._take(Tick()):
                return self.now - started

    def _take(self, event: Input) -> list[Effect]:
        effects = self.slot.feed(event, self.now)
        self.reports += [effect for effect in effects if isinstance(effect, OperatorReport)]
        return [effect for effect in effects if not isinstance(effect, OperatorReport)]

    def tick(self, after: float) -> list[Effect]:
        return self.feed(Tick(), after)

    def kinds(self) -> list[ReportKind]:
        return [report.kind for report in self.reports]

    def idle(self, seconds: float, run_token: int | None = None) -> None:
        """Let time pass; with a run token its engine stays alive."""
        for _ in range(int(seconds)):
            self.feed(Tick() if run_token is None else Heartbeat(run_token), 1.0)
            assert self.tick(0.0) == []


@pytest.fixture
def fresh() -> Play:
    return Play()


@pytest.fixture
def running(fresh: Play) -> Play:
    """Return a slot whose first job's engine, number 1, is ready."""
    assert fresh.feed(StartSlot()) == [SubmitJob(1)]
    assert fresh.feed(EngineConnected(1, 1), 0.5) == [AdmitEngine(1)]
    assert fresh.feed(EngineReady(1), 0.5) == []
    return fresh


def kill(play: Play, job: int, run: int) -> list[Effect]:
    """Kill the engine's process: its link closes at once, and Spark notices soon."""
    assert play.feed(LinkClosed(run)) == []
    return play.feed(JobEnded(job, EngineEnding.CRASHED, "worker died"), 0.1)


# -- restarts ------------------------------------------------------------------------------------------------------


def test_the_replacement_of_a_killed_engine_is_submitted_after_the_first_backoff(running: Play) -> None:
    assert kill(running, 1, 1) == []
    assert running.slot.due == running.now + 0.2
    assert running.tick(0.2) == [SubmitJob(2)]
    assert running.feed(EngineConnected(2, 2)) == [AdmitEngine(2)]
    assert running.kinds() == [ReportKind.RESTART]
    assert running.reports[0].text == ("slot 3 lost its engine (crashed: worker died); the next one starts in 0.2 s")


def test_the_backoff_grows_up_to_half_a_minute_and_is_reset_by_a_healthy_minute(running: Play) -> None:
    waits = []
    job = 1
    for _ in range(10):
        running.feed(LinkClosed(job))
        running.feed(JobEnded(job, EngineEnding.FAILED, "again"))
        waits.append(round(running.seconds_to_effect(), 6))
        job += 1
        running.feed(EngineConnected(job, job))
        running.feed(EngineReady(job))
        running.idle(59, job)
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    running.idle(1, job)
    running.feed(LinkClosed(job))
    running.feed(JobEnded(job, EngineEnding.CRASHED))
    assert running.slot.due == pytest.approx(running.now + 0.2)


def test_a_new_job_waits_until_the_old_engines_link_is_closed(running: Play) -> None:
    assert running.feed(JobEnded(1, EngineEnding.CRASHED)) == []
    assert running.slot.state is SlotState.WAITING
    assert running.tick(3.0) == []
    assert running.feed(LinkClosed(1)) == [SubmitJob(2)]


def test_an_old_link_that_does_not_close_is_reported(running: Play) -> None:
    running.feed(JobEnded(1, EngineEnding.CRASHED))
    running.idle(60)
    assert running.reports[-1] == OperatorReport(
        ReportKind.NO_HELLO, "slot 3 has had no engine for 60 s: the old engine's link is still open"
    )


@pytest.mark.parametrize("ending", [EngineEnding.FENCED, EngineEnding.CONFIG])
def test_nothing_is_restarted_after_a_fencing_or_a_configuration_error(running: Play, ending: EngineEnding) -> None:
    assert running.feed(JobEnded(1, ending, "why")) == [SlotFinished(ending, "why")]
    assert running.slot.state is SlotState.FINISHED
    assert running.slot.due is None
    assert running.tick(100) == []


def test_a_failure_that_an_engine_of_the_first_start_reports_ends_the_run(fresh: Play) -> None:
    fresh.feed(StartSlot())
    fresh.feed(EngineConnected(1, 1))
    assert fresh.feed(JobEnded(1, EngineEnding.FAILED, "sink x: no route")) == [
        SlotFinished(EngineEnding.FAILED, "sink x: no route")
    ]


def test_an_engine_that_is_killed_in_the_first_start_is_replaced(fresh: Play) -> None:
    fresh.feed(StartSlot())
    fresh.feed(EngineConnected(1, 1))
    assert kill(fresh, 1, 1) == []
    assert fresh.tick(0.2) == [SubmitJob(2)]
    fresh.feed(EngineConnected(2, 2))
    fresh.feed(EngineReady(2))
    assert kill(fresh, 2, 2) == []
    assert fresh.tick(0.4) == [SubmitJob(3)]
    assert kill(fresh, 3, 3) == []


def test_engines_that_die_repeatedly_in_the_first_start_end_the_run(fresh: Play) -> None:
    fresh.feed(StartSlot())
    for job in (1, 2):
        assert fresh.feed(JobEnded(job, EngineEnding.CRASHED, "killed")) == []
        assert fresh.seconds_to_effect() < 1.0
    assert fresh.feed(JobEnded(3, EngineEnding.CRASHED, "killed")) == [
        SlotFinished(EngineEnding.CRASHED, "3 times in a row before it was ready; the last time: killed")
    ]


def test_a_restarted_engine_that_cannot_start_is_restarted_again(running: Play) -> None:
    kill(running, 1, 1)
    running.tick(0.2)
    assert running.feed(JobEnded(2, EngineEnding.FAILED, "sink x: no route")) == []
    assert running.tick(0.4) == [SubmitJob(3)]


def test_an_engine_that_drained_although_nobody_asked_is_replaced(running: Play) -> None:
    running.feed(LinkClosed(1))
    assert running.feed(JobEnded(1, EngineEnding.DRAINED)) == []
    assert running.tick(0.2) == [SubmitJob(2)]


def test_only_the_first_start_has_an_effect(running: Play) -> None:
    assert running.feed(StartSlot()) == []
    kill(running, 1, 1)
    assert running.feed(StartSlot()) == []


def test_the_end_of_an_older_job_changes_nothing(running: Play) -> None:
    kill(running, 1, 1)
    running.tick(0.2)
    assert running.feed(JobEnded(1, EngineEnding.FENCED, "late")) == []
    assert running.slot.state is SlotState.STARTING


# -- tokens --------------------------------------------------------------------------------------------------------


def test_an_engine_that_reconnects_keeps_its_place(running: Play) -> None:
    running.feed(LinkClosed(1), 1.0)
    assert running.slot.state is SlotState.LINK_LOST
    assert running.slot.run_token == 1
    assert running.feed(EngineConnected(1, 1), 5.0) == [AdmitEngine(1)]
    assert running.slot.state is SlotState.RUNNING
    assert running.tick(14.9) == []
    assert running.slot.run_token == 1


def test_of_two_engines_of_one_job_the_newest_wins(running: Play) -> None:
    effects = running.feed(EngineConnected(1, 2))
    assert effects == [RefuseEngine(1, "slot 3 refuses engine 1: engine 2 is newer"), AdmitEngine(2)]
    assert running.feed(LinkClosed(1)) == []
    assert [type(effect) for effect in running.feed(EngineConnected(1, 1))] == [RefuseEngine]
    assert running.slot.run_token == 2


def test_an_engine_fenced_by_another_of_its_own_job_is_replaced(running: Play) -> None:
    running.feed(LinkClosed(1))
    running.feed(EngineConnected(1, 2))
    running.feed(LinkClosed(2))
    assert running.feed(JobEnded(1, EngineEnding.FENCED, "by the other")) == []
    assert running.tick(0.2) == [SubmitJob(2)]


def test_an_engine_of_an_older_job_is_refused_and_holds_up_the_next_job_until_it_is_gone(running: Play) -> None:
    kill(running, 1, 1)
    assert [type(effect) for effect in running.feed(EngineConnected(1, 2))] == [RefuseEngine]
    assert running.tick(1.0) == []
    assert running.feed(LinkClosed(2)) == [SubmitJob(2)]
    assert ReportKind.REFUSED in running.kinds()


def test_messages_of_a_replaced_engine_do_not_count(running: Play) -> None:
    running.feed(EngineConnected(1, 2))
    running.feed(Heartbeat(1), 14.0)
    running.feed(EngineReady(1))
    assert running.tick(1.0) == [CancelJob(1)]


def test_a_finished_slot_refuses_every_engine(running: Play) -> None:
    running.feed(JobEnded(1, EngineEnding.CONFIG))
    assert running.feed(EngineConnected(1, 1)) == [RefuseEngine(1, "slot 3 is finished")]
    assert running.feed(DrainRequested()) == []


def test_a_healthy_time_is_that_of_one_engine(running: Play) -> None:
    running.idle(60, 1)
    kill(running, 1, 1)
    running.tick(0.2)
    running.feed(JobEnded(2, EngineEnding.CRASHED, "before its hello"))
    assert running.slot.due == pytest.approx(running.now + 0.4)
    running.tick(0.4)
    running.feed(EngineConnected(3, 3))
    running.feed(EngineReady(3))
    running.idle(60, 3)
    running.feed(LinkClosed(3))
    running.feed(EngineConnected(3, 4))
    kill(running, 3, 4)
    assert running.slot.due == pytest.approx(running.now + 0.8)


def test_a_fencing_counts_whatever_became_of_earlier_jobs(running: Play) -> None:
    kill(running, 1, 1)
    running.tick(0.2)
    running.feed(EngineConnected(2, 2))
    assert running.feed(JobEnded(2, EngineEnding.FENCED, "taken")) == [SlotFinished(EngineEnding.FENCED, "taken")]


def test_the_end_of_a_replaced_engines_link_does_not_make_the_newer_one_look_gone_later(running: Play) -> None:
    running.feed(EngineConnected(1, 2))
    running.feed(LinkClosed(2))
    running.idle(30)
    running.feed(LinkClosed(1))
    running.idle(24)
    assert running.tick(1.0) == [CancelJob(1)]


def test_an_engine_that_is_ready_again_after_its_link_broke_was_healthy_all_the_time(running: Play) -> None:
    kill(running, 1, 1)
    running.tick(0.2)
    running.feed(EngineConnected(2, 2))
    running.feed(EngineReady(2))
    running.idle(50, 2)
    running.feed(LinkClosed(2))
    running.feed(EngineConnected(2, 2))
    running.feed(EngineReady(2))
    running.idle(10, 2)
    kill(running, 2, 2)
    assert running.slot.due == pytest.approx(running.now + 0.2)


# -- time ----------------------------------------------------------------------------------------------------------


def test_a_slot_without_hello_for_a_minute_is_reported_by_name_and_again(fresh: Play) -> None:
    fresh.feed(StartSlot())
    assert fresh.slot.state is SlotState.STARTING
    fresh.idle(59)
    assert fresh.reports == []
    fresh.idle(61)
    assert [report.text for report in fresh.reports] == [
        f"slot 3 has had no engine for {seconds} s: its Spark job waits for a core, or the worker cannot start or "
        "cannot reach the driver"
        for seconds in (60, 120)
    ]


def test_an_engine_silent_for_15_s_is_cancelled_and_replaced_once_its_link_has_ended(running: Play) -> None:
    running.feed(Heartbeat(1), 1.0)
    assert running.tick(14.9) == []
    assert running.seconds_to_effect() == pytest.approx(0.1)
    assert running.slot.state is SlotState.CANCELLED
    assert running.kinds() == [ReportKind.SILENT]
    assert running.feed(Heartbeat(1), 1.0) == [], "it is considered dead, whatever it says"
    assert running.feed(JobEnded(1, EngineEnding.CRASHED, "cancelled")) == []
    assert running.tick(5.0) == []
    assert running.feed(LinkClosed(1)) == [SubmitJob(2)]
    assert "was silent for 15 s is considered dead" in running.reports[-1].text


def test_what_is_due_at_the_same_time_by_another_calculation_needs_no_second_tick() -> None:
    slot = Slot(0)
    slot.feed(StartSlot(), 0.1)
    slot.feed(EngineConnected(1, 1), 60.1)
    for now in (61.1, 62.1, 63.1, 64.1, 65.1, 66.1, 67.1, 68.1, 69.1, 70.1, 71.1, 72.1, 73.1, 74.1):
        slot.feed(Tick(), now)
    slot.feed(DrainRequested(), 74.1)
    while slot.due is not None and slot.due < 80:
        now = slot.due
        slot.feed(Tick(), now)
        assert slot.due is None or slot.due > now


def test_an_engine_that_was_considered_dead_is_refused_when_it_comes_back(running: Play) -> None:
    running.tick(15.0)
    running.feed(LinkClosed(1))
    assert [type(effect) for effect in running.feed(EngineConnected(1, 1))] == [RefuseEngine]


def test_a_job_that_does_not_end_is_cancelled_again(running: Play) -> None:
    assert running.tick(15.0) == [CancelJob(1)]
    assert running.tick(14.9) == []
    assert running.seconds_to_effect() == pytest.approx(0.1)
    assert running.kinds() == [ReportKind.SILENT, ReportKind.CANCELLED]


def test_an_engine_that_never_reconnects_is_cancelled_after_its_own_deadline(running: Play) -> None:
    running.feed(LinkClosed(1))
    running.idle(54)
    assert running.tick(1.0) == [CancelJob(1)]
    assert running.kinds() == [ReportKind.LINK_LOST]


def test_an_engine_gone_for_a_minute_is_reported(running: Play) -> None:
    patient = Play()
    patient.slot = Slot(3, SlotLimits(lost_seconds=1000.0))
    patient.feed(StartSlot())
    patient.feed(EngineConnected(1, 1))
    patient.feed(LinkClosed(1))
    patient.tick(60.0)
    assert patient.reports[-1].text.endswith("its engine lost the link and has neither reconnected nor ended")


def test_a_long_backoff_is_reported_too(running: Play) -> None:
    from tidemill.core.retry import Backoff

    patient = Play()
    patient.slot = Slot(3, SlotLimits(backoff=Backoff(100.0, 100.0)))
    patient.feed(StartSlot())
    patient.feed(EngineConnected(1, 1))
    patient.feed(EngineReady(1))
    kill(patient, 1, 1)
    patient.tick(60.0)
    assert patient.reports[-1].text.endswith("it waits for its next start")


@pytest.mark.parametrize("seconds", [1.6, 14.0, 15.0, 15.5, 16.0, 3600.0])
def test_a_pause_of_the_supervisor_is_not_held_against_an_engine(running: Play, seconds: float) -> None:
    running.feed(Heartbeat(1), 0.5)
    running.stand_still(seconds)
    assert running.tick(0.0) == [], "the heartbeats still wait in the sockets"
    assert running.tick(14.0) == [], "the engine may have stood still too"
    assert running.feed(Heartbeat(1)) == []
    assert running.seconds_to_effect() == pytest.approx(15.0)
    assert running.kinds() == [ReportKind.SILENT]


def test_repeated_pauses_of_the_supervisor_never_make_an_engine_count_as_dead(running: Play) -> None:
    for _ in range(100):
        running.stand_still(5.0)
        assert running.tick(0.0) == []
    assert running.reports == []


def test_the_first_input_after_a_pause_is_not_held_against_an_engine_either(running: Play) -> None:
    running.stand_still(100.0)
    assert running.feed(Heartbeat(1)) == []
    assert running.tick(14.9) == []
    assert running.seconds_to_effect() == pytest.approx(0.1)


def test_other_waits_pause_with_the_supervisor(running: Play) -> None:
    running.feed(LinkClosed(1))
    running.idle(30)
    running.stand_still(1000.0)
    running.idle(23)
    assert running.seconds_to_effect() == pytest.approx(1.0), "one second of the stop had a tick"
    assert running.kinds() == [ReportKind.LINK_LOST]


# -- the end -------------------------------------------------------------------------------------------------------


def test_a_drain_is_sent_to_the_engine_whose_end_finishes_the_slot(running: Play) -> None:
    assert running.feed(DrainRequested()) == [DrainEngine(1)]
    assert running.feed(DrainRequested()) == []
    running.feed(LinkClosed(1), 1.0)
    assert running.feed(JobEnded(1, EngineEnding.DRAINED)) == [SlotFinished(EngineEnding.DRAINED)]


@pytest.mark.parametrize("linked", [True, False], ids=["on its link", "without a link"])
def test_an_engine_that_does_not_end_after_a_drain_is_killed_when_the_time_for_it_is_over(linked: bool) -> None:
    play = Play()
    play.slot = Slot(3, SlotLimits(drain_seconds=8.0))
    play.feed(StartSlot())
    play.feed(EngineConnected(1, 1), 0.5)
    play.feed(EngineReady(1), 0.5)
    assert play.feed(DrainRequested()) == [DrainEngine(1)]
    if not linked:
        play.feed(LinkClosed(1))
    for _ in range(7):
        assert play.feed(Heartbeat(1) if linked else Tick(), 1.0) == []
        assert play.tick(0.0) == []
    why = "an engine that did not end within 8 s after the request to drain"
    assert play.tick(1.0) == [KillEngine(1), CancelJob(1), SlotFinished(EngineEnding.OVERDUE, why)]
    assert play.kinds()[-1] is ReportKind.CANCELLED
    assert play.feed(JobEnded(1, EngineEnding.CRASHED, "killed"), 0.5) == []


def test_an_engine_that_dies_while_it_drains_is_not_replaced(running: Play) -> None:
    running.feed(DrainRequested())
    assert kill(running, 1, 1) == [SlotFinished(EngineEnding.CRASHED, "worker died")]


def test_a_drain_before_anything_ran_finishes_at_once(fresh: Play) -> None:
    assert fresh.slot.state is SlotState.IDLE
    assert fresh.slot.due is None
    assert fresh.tick(100.0) == []
    assert fresh.feed(DrainRequested()) == [SlotFinished(EngineEnding.DRAINED)]


def test_a_drain_while_no_engine_runs_finishes_at_once_and_reports_that_its_membership_is_left_over(
    running: Play,
) -> None:
    kill(running, 1, 1)
    assert running.feed(DrainRequested()) == [SlotFinished(EngineEnding.ABSENT)]


def test_a_drain_while_the_first_job_waits_for_a_core_cancels_it(fresh: Play) -> None:
    fresh.feed(StartSlot())
    assert fresh.feed(DrainRequested()) == [CancelJob(1), SlotFinished(EngineEnding.DRAINED)]
    assert [type(effect) for effect in fresh.feed(EngineConnected(1, 1))] == [RefuseEngine]


def test_an_engine_without_a_link_is_told_to_drain_when_it_reconnects(running: Play) -> None:
    running.feed(LinkClosed(1))
    assert running.feed(DrainRequested()) == []
    assert running.feed(EngineConnected(1, 1), 1.0) == [AdmitEngine(1), DrainEngine(1)]


def test_a_renewed_slot_starts_at_once_and_refuses_the_engines_before_it(running: Play) -> None:
    running.feed(DrainRequested())
    running.feed(LinkClosed(1))
    running.feed(JobEnded(1, EngineEnding.DRAINED))

    running.slot = running.slot.renew(SlotLimits())

    assert running.slot.state is SlotState.IDLE
    assert running.feed(StartSlot()) == [SubmitJob(2)]
    assert [type(effect) for effect in running.feed(EngineConnected(1, 1))] == [RefuseEngine]
    assert running.feed(EngineConnected(2, 2)) == [AdmitEngine(2)]


def test_a_renewed_slot_submits_nothing_before_the_links_of_killed_engines_are_closed(running: Play) -> None:
    running.slot = Slot(3, SlotLimits(drain_seconds=8.0))
    running.feed(StartSlot())
    running.feed(EngineConnected(1, 1))
    running.feed(DrainRequested())
    assert isinstance(running.tick(8.0)[-1], SlotFinished)

    running.slot = running.slot.renew(SlotLimits())

    assert running.feed(StartSlot()) == []
    assert running.feed(JobEnded(1, EngineEnding.CRASHED, "killed"), 0.5) == []
    assert running.feed(LinkClosed(1)) == [SubmitJob(2)]


def test_a_renewed_slot_does_not_wait_for_a_link_that_was_closed_before(running: Play) -> None:
    running.slot = Slot(3, SlotLimits(drain_seconds=8.0))
    running.feed(StartSlot())
    running.feed(EngineConnected(1, 1))
    running.feed(DrainRequested())
    assert isinstance(running.tick(8.0)[-1], SlotFinished)
    assert running.feed(LinkClosed(1)) == []

    running.slot = running.slot.renew(SlotLimits())

    assert running.feed(StartSlot()) == [SubmitJob(2)]


def test_a_renewed_slot_waits_for_the_link_of_an_engine_that_the_finished_one_refused(running: Play) -> None:
    running.feed(DrainRequested())
    running.feed(LinkClosed(1))
    running.feed(JobEnded(1, EngineEnding.DRAINED))
    assert [type(effect) for effect in running.feed(EngineConnected(1, 7))] == [RefuseEngine]

    running.slot = running.slot.renew(SlotLimits())

    assert running.feed(StartSlot()) == []
    assert running.feed(LinkClosed(7)) == [SubmitJob(2)]


def test_code_that_fails_in_a_renewed_slot_before_it_is_ready_is_not_tried_again(running: Play) -> None:
    running.feed(DrainRequested())
    running.feed(LinkClosed(1))
    running.feed(JobEnded(1, EngineEnding.DRAINED))
    running.slot = running.slot.renew(SlotLimits())
    running.feed(StartSlot())
    running.feed(EngineConnected(2, 2))
    running.feed(LinkClosed(2))

    assert running.feed(JobEnded(2, EngineEnding.FAILED, "on_ready raised")) == [
        SlotFinished(EngineEnding.FAILED, "on_ready raised")
    ]


def test_an_engine_that_hangs_while_it_drains_is_cancelled(running: Play) -> None:
    running.feed(DrainRequested())
    assert running.tick(15.0) == [CancelJob(1)]
    running.feed(LinkClosed(1))
    (finished,) = running.feed(JobEnded(1, EngineEnding.CRASHED, "Spark's words"))
    assert finished == SlotFinished(
        EngineEnding.CRASHED, "its job was cancelled: an engine that was silent for 15 s is considered dead"
    )


# -- a restart that a user wants ---------------------------------------------------------------------------------


def test_a_restarted_engine_drains_keeps_its_place_and_is_replaced_at_once(running: Play) -> None:
    assert running.feed(RestartRequested()) == [DrainEngine(1, keep_membership=True)]
    assert running.slot.state is SlotState.RESTARTING
    assert running.feed(RestartRequested()) == []
    running.feed(LinkClosed(1), 2.0)
    assert running.feed(JobEnded(1, EngineEnding.DRAINED)) == [SubmitJob(2)]
    assert running.feed(EngineConnected(2, 2), 1.0) == [AdmitEngine(2)]
    assert running.slot.state is SlotState.RUNNING
    assert running.kinds() == []
    running.feed(LinkClosed(2))
    running.feed(JobEnded(2, EngineEnding.CRASHED))
    assert running.slot.due == pytest.approx(running.now + 0.2), "a restart does not count as a failure"


def test_a_restart_waits_until_the_old_engines_link_is_closed(running: Play) -> None:
    running.feed(RestartRequested())
    assert running.feed(JobEnded(1, EngineEnding.DRAINED), 1.0) == []
    assert running.feed(LinkClosed(1)) == [SubmitJob(2)]


def test_an_engine_that_reconnects_is_told_again_to_drain_for_its_restart(running: Play) -> None:
    running.feed(RestartRequested())
    running.feed(LinkClosed(1))
    assert running.feed(EngineConnected(1, 1), 1.0) == [AdmitEngine(1), DrainEngine(1, keep_membership=True)]


def test_an_engine_that_does_not_end_for_its_restart_is_killed_and_replaced(running: Play) -> None:
    running.feed(RestartRequested())
    effects: list[Effect] = []
    for _ in range(40):
        effects += running.feed(Heartbeat(1), 1.0)
    assert effects == [KillEngine(1), CancelJob(1), CancelJob(1)][: len(effects)]
    assert running.reports[0].text == (
        "slot 3 has an engine that did not end within 33 s after the request to restart; it is considered dead and "
        "replaced"
    )
    running.feed(LinkClosed(1))
    running.feed(JobEnded(1, EngineEnding.CRASHED))
    assert running.tick(0.2) == [SubmitJob(2)]


def test_an_engine_that_fails_while_it_restarts_counts_as_failed(running: Play) -> None:
    running.feed(RestartRequested())
    running.feed(LinkClosed(1))
    assert running.feed(JobEnded(1, EngineEnding.FAILED, "sink closed")) == []
    assert running.slot.due == pytest.approx(running.now + 0.2)


def test_nothing_is_restarted_without_an_engine_or_once_the_slot_drains(running: Play) -> None:
    running.feed(LinkClosed(1))
    assert running.feed(RestartRequested()) == []
    running.feed(EngineConnected(1, 1))
    running.feed(DrainRequested())
    assert running.feed(RestartRequested()) == []
    running.feed(LinkClosed(1))
    assert running.feed(JobEnded(1, EngineEnding.DRAINED)) == [SlotFinished(EngineEnding.DRAINED, None)]
    assert running.feed(RestartRequested()) == []


def test_a_drain_during_a_restart_finishes_the_slot(running: Play) -> None:
    running.feed(RestartRequested())
    assert running.feed(DrainRequested(), 1.0) == [DrainEngine(1)]
    running.feed(LinkClosed(1))
    assert running.feed(JobEnded(1, EngineEnding.DRAINED)) == [SlotFinished(EngineEnding.DRAINED, None)]


def test_an_engine_that_takes_the_place_of_one_that_restarts_stays(running: Play) -> None:
    running.feed(RestartRequested())
    assert running.feed(EngineConnected(1, 2), 1.0) == [
        RefuseEngine(1, "slot 3 refuses engine 1: engine 2 is newer"),
        AdmitEngine(2),
    ]
    assert running.slot.state is SlotState.RUNNING


# -- random schedules ----------------------------------------------------------------------------------------------


class SlotUnderRandomEvents(RuleBasedStateMachine):
    """Anything may happen in any order; the effects must keep the invariants all the same."""

    @initialize()
    def begin(self) -> None:
        self.slot = Slot(0)
        self.now = 0.0
        self.jobs: dict[int, str] = {}  # token -> "running" or how it ended
        self.open_links: set[int] = set()
        self.admitted: list[int] = []
        self.was_ready = False
        self.no_more_jobs = False
        self.finished: SlotFinished | None = None
        self.drain_asked = self.restart_asked = False
        self.engines: dict[int, set[int]] = {}  # job -> who was admitted

    def feed(self, event: Input) -> list[Effect]:
        effects = self.slot.feed(event, self.now)
        for effect in effects:
            match effect:
                case SubmitJob(job_token):
                    assert self.finished is None
                    assert not self.no_more_jobs
                    assert not self.drain_asked
                    assert "running" not in self.jobs.values(), "two jobs at once"
                    assert not self.open_links, "an old engine's link is open"
                    assert job_token > max(self.jobs, default=0)
                    self.jobs[job_token] = "running"
                case CancelJob(job_token):
                    assert self.jobs[job_token] == "running"
                case AdmitEngine(run_token):
                    assert self.finished is None
                    assert run_token >= max(self.admitted, default=0)
                    self.admitted.append(run_token)
                case DrainEngine(run_token, keep_membership):
                    assert self.drain_asked != keep_membership
                    assert self.drain_asked or self.restart_asked
                    assert run_token == self.admitted[-1]
                    assert run_token in self.open_links
                case RefuseEngine(run_token):
                    assert run_token in self.open_links
                    assert run_token != self.slot.run_token or self.slot.state is SlotState.CANCELLED
                case SlotFinished():
                    assert self.finished is None, "it finished twice"
                    self.finished = effect
                case OperatorReport(_, text):
                    assert text.startswith("slot 0 ")
        return effects

    @rule()
    def start(self) -> None:
        self.feed(StartSlot())

    @rule(which=st.sampled_from(["new", "again", "old job"]), pick=st.integers(0, 50))
    def hello(self, which: str, pick: int) -> None:
        run_token = max([*self.admitted, *self.open_links, 0]) + 1
        job_token = max(self.jobs, default=1)
        if which == "again" and self.admitted:
            run_token = self.admitted[pick % len(self.admitted)]
        if which == "old job":
            job_token = max(0, job_token - 1 - pick % 3)
        self.open_links.add(run_token)
        effects = self.feed(EngineConnected(job_token, run_token))
        answers = [e for e in effects if isinstance(e, AdmitEngine | RefuseEngine) and e.run_token == run_token]
        assert len(answers) == 1, "every hello has one answer"
        if isinstance(answers[0], AdmitEngine):
            self.engines.setdefault(job_token, set()).add(run_token)
        if job_token != max(self.jobs, default=0) or self.jobs.get(job_token) != "running":
            assert isinstance(answers[0], RefuseEngine), "only the running job's engines are admitted"

    @rule(pick=st.integers(0, 50), what=st.sampled_from([EngineReady, Heartbeat, LinkClosed, LinkClosed]))
    def an_engine_does_something(self, pick: int, what: type) -> None:
        if self.open_links:
            run_token = sorted(self.open_links)[pick % len(self.open_links)]
            if what is EngineReady and run_token == self.slot.run_token:
                self.was_ready = True
            if what is LinkClosed:
                self.open_links.discard(run_token)
            self.feed(what(run_token))

    @rule(pick=st.integers(0, 50), ending=st.sampled_from([e for e in EngineEnding if e is not EngineEnding.ABSENT]))
    def a_job_ends(self, pick: int, ending: EngineEnding) -> None:
        if self.jobs:
            token = max(self.jobs) if pick % 4 else sorted(self.jobs)[pick % len(self.jobs)]
            counted = self.jobs[token] == "running"
            self.jobs[token] = ending
            was_finished = self.finished is not None
            effects = self.feed(JobEnded(token, ending, "why"))
            if counted and not was_finished:
                first = not self.was_ready and ending is EngineEnding.FAILED
                fenced = ending is EngineEnding.FENCED and len(self.engines.get(token, ())) <= 1
                if ending is EngineEnding.CONFIG or fenced or first or self.drain_asked:
                    assert self.finished is not None
                    self.no_more_jobs = True
            else:
                assert effects == []

    @rule()
    def drain(self) -> None:
        self.drain_asked = True
        running = "running" in self.jobs.values() and self.slot.run_token is not None
        self.feed(DrainRequested())
        assert running or self.finished is not None, "no engine runs: it finishes at once"

    @rule()
    def restart(self) -> None:
        self.restart_asked = True
        self.feed(RestartRequested())
        assert self.slot.state is not SlotState.RUNNING or self.drain_asked

    @rule(seconds=st.sampled_from([0.1, 1.0, 14.0, 15.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.slot.due is not None and self.slot.due < until:
            self.now = max(self.now, self.slot.due)
            self.feed(Tick())
        self.now = until
        self.feed(Tick())

    @rule(seconds=st.sampled_from([15.0, 60.0]))
    def the_supervisor_stands_still(self, seconds: float) -> None:
        # What was due before the next tick anyway may happen: another cancellation, the end of the drain's time.
        healthy = self.slot.state is SlotState.RUNNING and not self.drain_asked
        self.now += seconds
        cancelled = any(isinstance(effect, CancelJob) for effect in self.feed(Tick()))
        assert not (healthy and cancelled)

    @rule()
    def the_clock_reaches_what_is_due(self) -> None:
        due = self.slot.due
        if due is not None:
            self.now = max(self.now, due)
            self.feed(Tick())
            later = self.slot.due
            assert later is None or later > self.now, "the shell would spin"

    @invariant()
    def the_state_is_one_that_can_be(self) -> None:
        if not hasattr(self, "slot"):
            return
        state = self.slot.state
        assert (state is SlotState.FINISHED) == (self.finished is not None)
        if state in (SlotState.RUNNING, SlotState.RESTARTING):
            assert self.slot.run_token in self.open_links
            assert "running" in self.jobs.values()
        if state in (SlotState.IDLE, SlotState.WAITING):
            assert "running" not in self.jobs.values()


TestSlotUnderRandomEvents = SlotUnderRandomEvents.TestCase
TestSlotUnderRandomEvents.settings = settings(max_examples=examples(200), stateful_step_count=50)
