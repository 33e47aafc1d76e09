from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.examples import examples

from tidemill.core.retry import JITTER_BITS
from tidemill.core.tasks.attempt import MAX_CLEANUP_US, MAX_LOST, Already, Fenced, Moved, Refused, feed
from tidemill.core.tasks.dependencies import NOTHING, TOLD, Readiness, TaskOutcome, Told
from tidemill.core.tasks.endings import Failure, Skip, Success
from tidemill.core.tasks.inputs import (
    Admit,
    Blocked,
    CallbackKind,
    Cancel,
    Channel,
    Claim,
    CleanedUp,
    Clear,
    ClearXComs,
    Deferred,
    DiscardEvents,
    Due,
    EndAttempt,
    Ended,
    Failed,
    FileMissing,
    Input,
    Lost,
    MakeTrigger,
    MapTold,
    Mark,
    OpenMap,
    Ready,
    Remove,
    ResetMap,
    Returned,
    Ring,
    RunCallback,
    Skipped,
    StartInTrigger,
    StopMap,
    StopTrigger,
    StoreXComs,
    StreamIdle,
    StreamReady,
    Succeeded,
    TellSuccessors,
    TriggerEnded,
    TriggerFailed,
    TriggerFired,
    TriggerStopReason,
    Unblocked,
    WentOn,
    identify,
)
from tidemill.core.tasks.task_row import (
    ENDED,
    BlockPhase,
    Policy,
    TaskBlock,
    TaskResume,
    TaskRow,
    TaskState,
    TaskStream,
)

SECOND = 1_000_000
RETRYING = Policy(retries=2, retry_delay_us=10 * SECOND, execution_timeout_us=60 * SECOND)
MAP = Policy(is_map=True)
S, F, U, K = TaskOutcome.SUCCESS, TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED, TaskOutcome.SKIPPED
#: The states in which a task has an attempt, or waits to have one.
ATTEMPTS = {TaskState.SCHEDULED, TaskState.QUEUED, TaskState.RUNNING, TaskState.DEFERRED, TaskState.UP_FOR_RETRY}
#: What is said of the wait of a running attempt at its `yield`.
BLOCKS = {Blocked, Unblocked, WentOn}
#: The states of plain tasks.
PLAIN = [state for state in TaskState if state is not TaskState.MAPPED]


KINDS: dict[type, dict[str, object]] = {
    Ready: {"readiness": Readiness.RUN},
    Admit: {},
    Claim: {"session": 7},
    Succeeded: {},
    Failed: {"error": "it broke"},
    Skipped: {},
    Deferred: {"trigger": "a trigger", "method": "resume"},
    Blocked: {},
    Unblocked: {},
    WentOn: {},
    StreamIdle: {},
    StreamReady: {},
    TriggerFired: {"payload": "1"},
    TriggerEnded: {"ending": Success()},
    TriggerFailed: {"error": "it broke"},
    Due: {},
    Lost: {},
    Returned: {},
    FileMissing: {"error": "no worker has it"},
    Ended: {},
    CleanedUp: {},
    Clear: {"triggerer": 9},
    Mark: {"triggerer": 9},
    Cancel: {"triggerer": 9},
    Remove: {"triggerer": 9},
    MapTold: {"told": Told(frozenset((S, F)), done=True)},
}


START = StartInTrigger("a trigger", "resume", '{"a":1}', 5 * SECOND)


class Life:
    """A task, what happens to it, and the effects of the last input."""

    def __init__(self, policy: Policy | None = None) -> None:
        policy = policy or Policy()
        self.task = TaskRow(policy, max_tries=policy.retries + 1)
        self.now = 1_000 * SECOND
        self.effects: tuple[object, ...] = ()

    def take(self, kind: type, *args: object, **kwargs: object) -> Life:
        """Feed what somebody says who knows the task's epoch; it has to change something."""
        told = {"epoch": self.task.epoch, **kwargs} if kind is Mark else kwargs
        answer = feed(
            self.task, kind(*args, **told) if kind is Mark else kind(self.task.epoch, *args, **told), self.now
        )
        assert isinstance(answer, Moved), answer
        assert answer.task.epoch == self.task.epoch + 1
        self.task, self.effects = answer.task, answer.effects
        return self

    def run(self) -> Life:
        """Bring the task from where its upstream lets it run, or from a resumption, to a worker."""
        if self.task.state is TaskState.NONE:
            self.take(Ready, Readiness.RUN)
        if self.task.state is TaskState.SCHEDULED:
            self.take(Admit)
        return self.take(Claim, session=7)

    def defer(self, **kwargs: object) -> Life:
        return self.run().take(Deferred, "a trigger", "resume", '{"a":1}', **kwargs)

    def refuse(self, kind: type, *args: object, **kwargs: object) -> str:
        answer = feed(self.task, kind(self.task.epoch, *args, **kwargs), self.now)
        assert isinstance(answer, Refused)
        return answer.reason


def bring(state: TaskState) -> Life:
    """A task with retries in a state."""
    life = Life(RETRYING)
    match state:
        case TaskState.SCHEDULED:
            life.take(Ready, Readiness.RUN)
        case TaskState.QUEUED:
            life.take(Ready, Readiness.RUN).take(Admit)
        case TaskState.RUNNING:
            life.run()
        case TaskState.DEFERRED:
            life.defer()
        case TaskState.UP_FOR_RETRY:
            life.run().take(Failed, "it broke")
        case TaskState.ENDING:
            life.run().take(Clear)
        case TaskState.SUCCESS:
            life.run().take(Succeeded)
        case TaskState.FAILED:
            life.run().take(Failed, "it broke", may_retry=False)
        case TaskState.SKIPPED:
            life.run().take(Skipped)
        case TaskState.UPSTREAM_FAILED:
            life.take(Ready, Readiness.FAIL)
        case TaskState.REMOVED:
            life.run().take(Succeeded).take(Remove)
    assert life.task.state is state
    return life


def test_a_task_that_succeeds_stores_its_xcoms_and_tells_its_successors():
    life = Life().run()
    assert life.task.session == 7
    assert life.task.tries == 1
    life.take(Succeeded, (("return_value", "1"),))
    assert life.task.state is TaskState.SUCCESS
    assert life.task.session is None
    assert life.effects == (
        StoreXComs((("return_value", "1"),)),
        RunCallback(CallbackKind.SUCCESS),
        TellSuccessors(TOLD[None], TOLD[TaskOutcome.SUCCESS]),
        Ring(Channel.SCHEDULER),
    )


def test_each_step_on_the_way_wakes_who_has_the_next_one():
    life = Life().take(Ready, Readiness.RUN)
    assert life.effects == (Ring(Channel.SCHEDULER),)
    assert life.take(Admit).effects == (Ring(Channel.WORKER),)
    assert life.take(Claim, 7).effects == ()
    assert life.take(Succeeded).effects[0] == RunCallback(CallbackKind.SUCCESS)


@pytest.mark.parametrize(
    ("readiness", "outcome"), [(Readiness.SKIP, TaskOutcome.SKIPPED), (Readiness.FAIL, TaskOutcome.UPSTREAM_FAILED)]
)
def test_a_task_that_its_upstream_keeps_from_running_ends_without_a_callback(readiness, outcome):
    life = Life().take(Ready, readiness)
    assert life.task.outcome is outcome
    assert life.effects == (TellSuccessors(TOLD[None], TOLD[outcome]), Ring(Channel.SCHEDULER))


def test_a_failed_try_waits_for_its_retry_which_begins_without_the_xcoms_of_the_first():
    life = bring(TaskState.UP_FOR_RETRY)
    assert life.effects == (RunCallback(CallbackKind.RETRY, "it broke"), Ring(Channel.SCHEDULER))
    assert life.task.next_due_us == life.now + 10 * SECOND
    assert "nothing is due" in life.refuse(Due)
    life.now += 10 * SECOND
    assert life.take(Due).task.state is TaskState.SCHEDULED
    life.run()
    assert life.effects == (ClearXComs(),)
    assert life.task.tries == 2


def test_the_last_failure_is_final():
    life = Life(RETRYING)
    for _ in range(2):
        life.run().take(Failed, "it broke")
        life.now += 10 * SECOND
        life.take(Due)
    life.run().take(Failed, "it broke")
    assert life.task.state is TaskState.FAILED
    assert life.task.tries == 3
    assert life.effects == (
        RunCallback(CallbackKind.FAILURE, "it broke"),
        TellSuccessors(TOLD[None], TOLD[TaskOutcome.FAILED]),
        Ring(Channel.SCHEDULER),
    )


def test_a_failure_that_must_not_be_retried_is_final_at_once():
    assert bring(TaskState.FAILED).task.tries == 1


def test_pauses_before_retries_are_constant_or_grow_to_their_maximum():
    most = (1 << JITTER_BITS) - 1
    constant = Policy(retry_delay_us=10 * SECOND)
    assert [constant.compute_delay(tries, most) for tries in (1, 5)] == [10 * SECOND] * 2
    growing = Policy(retry_delay_us=10 * SECOND, exponential=True, max_retry_delay_us=30 * SECOND)
    assert [growing.compute_delay(tries, 0) for tries in (1, 2, 3, 4)] == [10e6, 15e6, 15e6, 15e6]
    assert [round(growing.compute_delay(tries, most), -1) for tries in (1, 2, 3)] == [20e6, 30e6, 30e6]
    short = Policy(retry_delay_us=10 * SECOND, exponential=True, max_retry_delay_us=12 * SECOND)
    assert [short.compute_delay(tries, bits) for tries in (1, 9) for bits in (0, most)] == [
        10e6,
        12e6 - 1,
        10e6,
        12e6 - 1,
    ]
    capped = Policy(retry_delay_us=10 * SECOND, exponential=True, max_retry_delay_us=5 * SECOND)
    assert capped.compute_delay(1, 0) == 5e6


def test_a_deferred_task_gives_its_slots_back_and_is_resumed_with_the_event():
    life = Life().run()
    assert life.task.holds_slots()
    epoch = life.task.epoch
    life.take(Deferred, "a trigger", "resume", '{"a":1}', timeout_us=5 * SECOND)
    assert life.effects == (
        MakeTrigger(epoch + 1, "a trigger"),
        Ring(Channel.TRIGGERER),
        Ring(Channel.SCHEDULER),
    )
    assert not life.task.holds_slots()
    assert life.task.holds_slots(include_deferred=True)
    assert life.task.next_due_us == life.now + 5 * SECOND
    life.take(TriggerFired, '"payload"')
    assert life.effects == (StopTrigger(TriggerStopReason.DONE), Ring(Channel.SCHEDULER))
    assert life.task.resume == TaskResume("resume", '{"a":1}', '"payload"')
    assert life.task.next_due_us is None
    life.run()
    assert life.task.tries == 1
    assert life.effects == ()


def test_a_task_may_defer_any_number_of_times_within_one_try():
    life = Life(RETRYING)
    for number in range(5):
        life.defer().take(TriggerFired, str(number))
    life.run().take(Succeeded)
    assert life.task.tries == 1


def test_the_deadline_of_a_try_counts_from_its_first_start_over_deferrals_and_begins_anew_with_a_retry():
    life = bring(TaskState.RUNNING)
    deadline = life.now + 60 * SECOND
    assert life.task.deadline_us == deadline
    assert life.task.next_due_us is None, "the worker enforces it while the task runs"
    life.take(Deferred, "a trigger", "resume", timeout_us=300 * SECOND)
    life.now += 30 * SECOND
    life.take(TriggerFired, "1").run()
    assert life.task.deadline_us == deadline
    life.take(Deferred, "a trigger", "resume")
    assert life.task.next_due_us == deadline
    life.now = deadline
    life.take(Due)
    assert life.task.state is TaskState.UP_FOR_RETRY
    assert life.effects[:2] == (
        StopTrigger(TriggerStopReason.TIMEOUT),
        RunCallback(CallbackKind.RETRY, "TaskTimeout: the task took longer than its execution_timeout"),
    )
    life.now += 10 * SECOND
    assert life.take(Due).run().task.deadline_us == life.now + 60 * SECOND


def test_a_resumed_task_that_waits_for_a_slot_too_long_fails_by_its_deadline():
    life = bring(TaskState.DEFERRED).take(TriggerFired, "1")
    life.now = life.task.next_due_us
    life.take(Due)
    assert life.task.state is TaskState.UP_FOR_RETRY
    assert not any(isinstance(effect, StopTrigger) for effect in life.effects)


@pytest.mark.parametrize("soft_fail", [False, True])
def test_a_trigger_that_is_too_late_fails_the_try_or_skips_a_sensor_that_fails_softly(soft_fail):
    life = Life(replace(RETRYING, soft_fail=soft_fail)).defer(timeout_us=5 * SECOND)
    life.now += 5 * SECOND
    life.take(Due)
    assert life.effects[0] == StopTrigger(TriggerStopReason.TIMEOUT)
    assert life.task.state is (TaskState.SKIPPED if soft_fail else TaskState.UP_FOR_RETRY)
    assert "TaskDeferralTimeout" in life.effects[1].error


@pytest.mark.parametrize("soft_fail", [False, True])
def test_a_sensor_whose_trigger_is_too_late_fails_without_retries_or_is_skipped(soft_fail):
    life = Life(replace(RETRYING, soft_fail=soft_fail, is_sensor=True)).defer(timeout_us=5 * SECOND)
    life.now += 5 * SECOND
    life.take(Due)
    assert life.task.state is (TaskState.SKIPPED if soft_fail else TaskState.FAILED)
    (said,) = [effect.error for effect in life.effects if isinstance(effect, RunCallback)]
    assert said == "SensorTimeout: the trigger did not fire before the timeout of the sensor"


def test_the_error_of_a_trigger_is_named_in_its_last_line():
    life = Life(RETRYING).defer().take(TriggerFailed, "Traceback\n  there\n\nthe trigger raised SystemExit: 3\n")
    assert life.effects[1].error == "Traceback\n  there\n\nTaskDeferralError: the trigger raised SystemExit: 3"


@pytest.mark.parametrize("soft_fail", [False, True])
def test_a_trigger_that_fails_fails_the_try_with_its_traceback(soft_fail):
    life = Life(replace(RETRYING, soft_fail=soft_fail)).defer().take(TriggerFailed, "ValueError: no")
    assert life.effects[0] == StopTrigger(TriggerStopReason.FAILED)
    assert life.effects[1].error == "TaskDeferralError: ValueError: no"
    assert life.task.state is (TaskState.SKIPPED if soft_fail else TaskState.UP_FOR_RETRY)


def test_a_task_that_starts_in_its_trigger_begins_its_try_at_the_deferral_without_a_claim():
    life = Life(RETRYING).take(Ready, Readiness.RUN)
    epoch = life.task.epoch
    life.take(Admit, START)
    assert life.task.state is TaskState.DEFERRED
    assert (life.task.tries, life.task.deadline_us) == (1, life.now + 60 * SECOND)
    assert life.task.next_due_us == life.now + 5 * SECOND
    assert life.effects == (MakeTrigger(epoch + 1, "a trigger"), Ring(Channel.TRIGGERER), Ring(Channel.SCHEDULER))
    assert not life.task.holds_slots()
    deadline = life.task.deadline_us
    life.take(TriggerFired, "1")
    assert life.task.resume == TaskResume("resume", '{"a":1}', "1")
    life.take(Admit, START)
    assert life.task.state is TaskState.QUEUED, "only a new try starts in the trigger"
    life.take(Claim, 7)
    assert (life.task.tries, life.task.deadline_us) == (1, deadline)
    life.take(Failed, "it broke")
    life.now += 10 * SECOND
    life.take(Due).take(Admit, START)
    assert life.effects[0] == ClearXComs()
    assert (life.task.state, life.task.tries) == (TaskState.DEFERRED, 2)


@pytest.mark.parametrize(
    ("ending", "outcome", "kind"),
    [(Success(), TaskOutcome.SUCCESS, CallbackKind.SUCCESS), (Skip(), TaskOutcome.SKIPPED, CallbackKind.SKIPPED)],
)
def test_an_event_of_the_trigger_ends_the_task_in_one_step(ending, outcome, kind):
    life = Life(RETRYING).take(Ready, Readiness.RUN).take(Admit, START)
    life.take(TriggerEnded, ending, (("key", "1"),))
    assert life.task.outcome is outcome
    assert life.effects == (
        StopTrigger(TriggerStopReason.DONE),
        StoreXComs((("key", "1"),)),
        RunCallback(kind),
        TellSuccessors(TOLD[None], TOLD[outcome]),
        Ring(Channel.SCHEDULER),
    )


def test_a_failure_that_the_trigger_reports_is_retried_unless_it_is_final_and_skips_a_sensor_that_fails_softly():
    life = Life(RETRYING).defer().take(TriggerEnded, Failure("it broke"))
    assert life.task.state is TaskState.UP_FOR_RETRY
    assert life.effects[:2] == (StopTrigger(TriggerStopReason.DONE), RunCallback(CallbackKind.RETRY, "it broke"))
    life = Life(RETRYING).defer().take(TriggerEnded, Failure("it broke", may_retry=False))
    assert life.task.state is TaskState.FAILED
    life = Life(replace(RETRYING, soft_fail=True)).defer().take(TriggerEnded, Failure("it broke"))
    assert life.task.state is TaskState.SKIPPED


def stream(policy: Policy | None = None, **kwargs: object) -> Life:
    """A task that has deferred to a trigger that streams."""
    return Life(policy).run().take(Deferred, "a trigger", "", streams=True, **kwargs)


def test_the_trigger_of_a_stream_lives_while_attempts_handle_its_events():
    life = stream(RETRYING, timeout_us=20 * SECOND, idle_us=5 * SECOND)
    made, start, deadline = life.task.epoch, life.now, life.task.deadline_us
    assert life.effects == (MakeTrigger(made, "a trigger"), Ring(Channel.TRIGGERER), Ring(Channel.SCHEDULER))
    assert life.task.stream == TaskStream(made, start + 20 * SECOND)
    assert life.task.next_due_us == start + 5 * SECOND, "the first event may take as long as any other"
    life.take(StreamReady)
    assert life.effects == (Ring(Channel.SCHEDULER),)
    assert life.task.next_due_us == start + 20 * SECOND
    life.run()
    assert (life.task.trigger, life.task.tries, life.task.deadline_us) == (made, 1, deadline)
    life.now += 2 * SECOND
    life.take(StreamIdle, idle_us=5 * SECOND)
    assert (life.task.state, life.task.trigger, life.task.session) == (TaskState.DEFERRED, made, None)
    assert life.task.next_due_us == life.now + 5 * SECOND
    life.take(StreamReady).run().take(StreamIdle, ready=True)
    assert life.task.state is TaskState.SCHEDULED, "what has arrived meanwhile resumes the task in the same step"
    life.run().take(Succeeded)
    assert life.effects[0] == StopTrigger(TriggerStopReason.DONE)


def test_a_stream_survives_the_loss_of_a_worker_and_ends_with_the_try():
    life = stream(RETRYING).take(StreamReady).run()
    made = life.task.trigger
    life.take(Lost)
    assert (life.task.state, life.task.trigger) == (TaskState.QUEUED, made)
    life.take(Claim, 7).take(Failed, "it broke")
    assert life.effects[0] == StopTrigger(TriggerStopReason.FAILED)
    assert life.task.trigger is None


def test_a_task_that_starts_in_a_stream_ends_with_it_and_without_an_attempt():
    start = replace(START, streams=True)
    life = Life(RETRYING).take(Ready, Readiness.RUN).take(Admit, start)
    assert life.task.stream == TaskStream(life.task.epoch, life.now + 5 * SECOND)
    assert life.task.trigger == life.task.epoch
    life.refuse(TriggerFired, payload="1")
    life.take(TriggerFailed, "it broke")
    assert life.effects[0] == StopTrigger(TriggerStopReason.FAILED)
    assert (life.task.state, life.task.trigger) == (TaskState.UP_FOR_RETRY, None)
    life.now += 3_600 * SECOND
    life.take(Due).take(Admit, start).take(TriggerEnded, Success())
    assert life.effects[0] == StopTrigger(TriggerStopReason.DONE)
    assert (life.task.outcome, life.task.tries, life.task.stream) == (TaskOutcome.SUCCESS, 2, None)


@pytest.mark.parametrize("late", [5, 61])
def test_a_stream_whose_next_event_is_too_late_fails_the_try(late):
    life = stream(RETRYING, idle_us=5 * SECOND)
    life.now += late * SECOND
    life.take(Due)
    assert life.effects[0] == StopTrigger(TriggerStopReason.TIMEOUT)
    assert life.task.state is TaskState.UP_FOR_RETRY


def test_a_stream_that_nobody_handles_in_time_is_too_late_whether_it_waits_or_not():
    life = stream(timeout_us=5 * SECOND).take(StreamReady)
    life.now += 5 * SECOND
    life.take(Due)
    assert life.task.state is TaskState.FAILED


def test_a_paused_stream_takes_no_event_before_its_time():
    life = stream(RETRYING, timeout_us=60 * SECOND).take(StreamReady).run()
    late = life.now + 60 * SECOND
    life.take(StreamIdle, ready=True, pause_us=10 * SECOND)
    assert life.task.state is TaskState.DEFERRED
    life.refuse(StreamReady)
    life.now += 10 * SECOND
    life.take(Due)
    assert (life.task.state, life.task.stream) == (TaskState.SCHEDULED, TaskStream(life.task.trigger or 0, late))
    life.run().take(StreamIdle, pause_us=90 * SECOND)
    assert life.task.next_due_us == late, "a pause does not prolong the stream"
    life.now = late
    life.take(Due)
    assert life.task.state is TaskState.UP_FOR_RETRY


@pytest.mark.parametrize("kind", [Clear, Cancel, Mark, Remove])
def test_a_user_ends_a_stream_and_its_attempt_together_in_every_state(kind):
    arguments = {"outcome": TaskOutcome.SUCCESS} if kind is Mark else {}
    running = stream(RETRYING).take(StreamReady).run().take(kind, **arguments, triggerer=9)
    assert running.effects == (
        StopTrigger(TriggerStopReason.USER),
        Ring(Channel.TRIGGERER),
        EndAttempt(7),
        Ring(Channel.WORKER),
    )
    assert (running.task.session, running.task.trigger) == (7, None)
    waiting = stream(RETRYING).take(StreamReady).take(kind, **arguments, triggerer=9)
    assert (waiting.task.session, waiting.task.trigger) == (9, None), "its trigger cleans up first"
    unclaimed = stream(RETRYING).take(StreamReady).take(kind, **arguments)
    assert unclaimed.effects[0] == StopTrigger(TriggerStopReason.USER)
    assert unclaimed.task.state is not TaskState.ENDING


def test_the_time_limit_of_a_stream_does_not_cut_the_cleanup_of_its_attempt_short():
    life = stream(RETRYING, timeout_us=5 * SECOND).take(StreamReady).run().take(Clear)
    assert life.task.next_due_us is None
    life.now += 5 * SECOND
    life.refuse(Due)
    life.take(Ended)
    assert life.task.state is TaskState.NONE


class Clearing(Life):
    """A task whose attempt and trigger are ended together."""

    def __init__(self, kind: type = Clear, **arguments: object) -> None:
        super().__init__(RETRYING)
        self.run().take(Deferred, "a trigger", "", streams=True).take(StreamReady).run()
        self.take(kind, triggerer=9, **arguments)

    def clean_up(self) -> None:
        answer = feed(self.task, CleanedUp(self.task.epoch), self.now)
        assert answer == Moved(answer.task, ())
        assert answer.task.epoch == self.task.epoch
        self.task = answer.task


@pytest.mark.parametrize("over", [Ended, Lost, Returned])
def test_a_stream_that_is_cleared_begins_again_once_its_process_and_its_trigger_are_gone(over):
    life = Clearing()
    assert (life.task.state, life.task.session) == (TaskState.ENDING, 7)
    life.take(over)
    assert (life.task.state, life.task.session) == (TaskState.ENDING, 9), "its trigger still cleans up"
    life.refuse(CleanedUp)
    life.take(over)
    assert life.task.state is TaskState.NONE

    life = Clearing()
    life.clean_up()
    assert (life.task.state, life.task.session, life.task.next_due_us) == (TaskState.ENDING, 7, None)
    life.take(over)
    assert life.task.state is TaskState.NONE


def test_the_cleanup_of_a_trigger_that_is_never_reported_delays_nothing_for_ever():
    life = Clearing()
    life.now += MAX_CLEANUP_US
    answer = feed(life.task, Due(life.task.epoch), life.now)
    assert isinstance(answer, Moved)
    assert (answer.task.state, answer.task.session, answer.task.next_due_us) == (TaskState.ENDING, 7, None)
    life.task = answer.task
    life.take(Ended)
    assert life.task.state is TaskState.NONE

    life = Clearing().take(Ended)
    life.now += MAX_CLEANUP_US
    life.take(Due)
    assert life.task.state is TaskState.NONE


def test_the_last_wish_of_a_user_waits_for_the_same_trigger():
    life = Clearing().take(Mark, outcome=TaskOutcome.SUCCESS)
    assert life.take(Ended).task.session == 9
    assert life.take(Ended).task.outcome is TaskOutcome.SUCCESS


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Mark, "marked by a user"), (Cancel, "the run was cancelled"), (Clear, None), (Remove, None)],
)
def test_only_a_mark_and_a_cancelled_run_discard_what_no_attempt_has_handled(kind, reason):
    arguments = {"outcome": TaskOutcome.SUCCESS} if kind is Mark else {}
    life = Clearing(kind, **arguments)
    assert not any(isinstance(effect, DiscardEvents) for effect in life.effects), "the last wish may be a clear"
    life.take(Ended).take(Ended)
    found = [effect.reason for effect in life.effects if isinstance(effect, DiscardEvents)]
    assert found == ([] if reason is None else [reason])
    untried = Life(RETRYING).take(Mark, outcome=TaskOutcome.SUCCESS)
    assert not any(isinstance(effect, DiscardEvents) for effect in untried.effects)


@pytest.mark.parametrize("streams", [False, True])
def test_a_streaming_task_that_defers_to_another_trigger_has_only_that_one(streams):
    life = stream(RETRYING).take(StreamReady).run()
    life.take(Deferred, "another", "resume", streams=streams)
    assert life.effects[:2] == (StopTrigger(TriggerStopReason.DONE), MakeTrigger(life.task.epoch, "another"))
    assert life.task.trigger == life.task.epoch
    assert (life.task.stream is not None) is streams


def test_a_try_that_is_lost_with_its_worker_is_queued_again_without_using_a_retry():
    life = bring(TaskState.RUNNING)
    deadline = life.task.deadline_us
    for _ in range(MAX_LOST):
        life.take(Lost)
        assert life.task.state is TaskState.QUEUED
        assert life.effects == (Ring(Channel.WORKER),)
        life.run()
    assert (life.task.tries, life.task.deadline_us) == (1, deadline)
    life.take(Lost)
    assert life.task.state is TaskState.UP_FOR_RETRY
    assert "lost with its worker 6 times" in life.effects[0].error
    life.now += 10 * SECOND
    assert life.take(Due).run().task.tries == 2


def test_a_try_that_stopping_workers_return_goes_on_however_often_and_uses_no_retry():
    life = bring(TaskState.RUNNING)
    deadline = life.task.deadline_us
    for _ in range(3 * MAX_LOST):
        assert life.take(Returned).task.state is TaskState.QUEUED
        life.run()
    assert (life.task.tries, life.task.deadline_us) == (1, deadline)


class Waiting(Life):
    """A generator that waits at its `yield`."""

    def __init__(self, phase: BlockPhase | None = BlockPhase.FULL) -> None:
        super().__init__(RETRYING)
        self.run()
        for kind in (Blocked, Unblocked, Admit)[: phase or 0]:
            self.say(kind)
        assert phase == (self.task.block and self.task.block.phase)

    def say(self, kind: type, **arguments: object) -> Waiting:
        answer = feed(self.task, kind(epoch=self.task.epoch, **arguments), self.now)
        assert isinstance(answer, Moved), answer
        self.task, self.effects = answer.task, answer.effects
        return self


def test_a_generator_that_waits_holds_no_slots_until_it_is_admitted_again():
    life = Waiting(None)
    before = life.task
    assert life.say(Blocked).effects == (Ring(Channel.SCHEDULER),)
    assert not life.task.holds_slots(include_deferred=True)
    assert life.say(Unblocked).effects == (Ring(Channel.SCHEDULER),)
    assert not life.task.holds_slots(include_deferred=True)
    assert life.say(Admit).effects == (Ring(Channel.WORKER),)
    assert life.task.holds_slots()
    assert life.say(WentOn).effects == ()
    assert life.task == before
    assert feed(before, Succeeded(before.epoch), life.now) == feed(life.task, Succeeded(before.epoch), life.now)


@pytest.mark.parametrize("phase", [None, *BlockPhase])
def test_each_step_of_a_wait_follows_the_one_before(phase):
    life = Waiting(phase)
    expected = {None: Blocked, BlockPhase.FULL: Unblocked, BlockPhase.READY: Admit, BlockPhase.ADMITTED: WentOn}
    for kind in (Blocked, Unblocked, Admit, WentOn):
        answer = feed(life.task, kind(life.task.epoch), life.now)
        assert isinstance(answer, Moved if kind is expected[phase] else Refused), kind
        assert feed(life.task, kind(life.task.epoch - 1), life.now) == Fenced()


def test_the_time_of_a_wait_does_not_count_in_the_deadline():
    life = Waiting()
    deadline = life.task.deadline_us
    assert life.task.next_due_us is None
    life.now += 1_000 * SECOND
    for kind in (Unblocked, Admit):
        life.say(kind)
        life.now += 50 * SECOND
    assert life.say(WentOn).task.deadline_us == deadline + 1_100 * SECOND


@pytest.mark.parametrize("phase", BlockPhase)
@pytest.mark.parametrize("kind", [Lost, Returned])
def test_a_generator_that_is_lost_while_it_waits_has_the_time_that_was_left(phase, kind):
    life = Waiting(phase)
    deadline = life.task.deadline_us
    life.now += 1_000 * SECOND
    life.take(kind).run()
    assert (life.task.block, life.task.deadline_us) == (None, deadline + 1_000 * SECOND)


def test_an_attempt_that_defers_itself_before_the_end_of_its_wait_is_known_has_the_time_that_was_left():
    life = Waiting(BlockPhase.ADMITTED)
    deadline = life.task.deadline_us
    life.now += 7 * SECOND
    life.take(Deferred, "a trigger", "resume")
    assert life.task.next_due_us == deadline + 7 * SECOND


@pytest.mark.parametrize("phase", BlockPhase)
@pytest.mark.parametrize("kind", [Clear, Mark, Cancel, Remove])
def test_whatever_ends_a_running_attempt_ends_one_that_waits_and_its_cleanup_gets_no_slots(phase, kind):
    life, running = Waiting(phase), Waiting(None)
    arguments = {"outcome": TaskOutcome.SUCCESS} if kind is Mark else {}
    for one in (life, running):
        one.say(kind, **arguments)
        assert (one.task.state, one.effects) == (TaskState.ENDING, (EndAttempt(7), Ring(Channel.WORKER)))
        if kind is not Remove:
            one.say(Mark, outcome=TaskOutcome.SKIPPED)
    assert life.task.holds_slots() is (phase is BlockPhase.ADMITTED)
    assert life.take(Ended).task == running.take(Ended).task


@pytest.mark.parametrize("phase", BlockPhase)
@pytest.mark.parametrize("kind", [Succeeded, Failed, Skipped])
def test_an_attempt_that_ends_while_it_waits_leaves_no_wait(phase, kind):
    life = Waiting(phase)
    assert life.task.block == TaskBlock(phase, life.now)
    life.take(kind, **KINDS[kind])
    assert life.task.block is None


def test_a_task_whose_file_no_worker_has_uses_up_its_tries_and_none_that_has_begun():
    life = Life(RETRYING).take(Ready, Readiness.RUN).take(Admit)
    for number in (1, 2):
        life.take(FileMissing, "no worker has it")
        assert (life.task.state, life.task.tries) == (TaskState.UP_FOR_RETRY, number)
        life.now += 60 * SECOND
        life.take(Due).take(Admit)
    life.take(FileMissing, "no worker has it")
    assert (life.task.outcome, life.task.tries) == (TaskOutcome.FAILED, 3)

    life = Life(RETRYING).run().take(Returned).take(FileMissing, "no worker has it")
    assert life.task.tries == 1, "the try that the worker has returned"


def test_what_was_lost_after_a_deferral_continues_where_it_was_resumed():
    life = bring(TaskState.DEFERRED).take(TriggerFired, "1").run().take(Lost).run()
    assert life.task.resume == TaskResume("resume", '{"a":1}', "1")
    assert life.task.tries == 1


@pytest.mark.parametrize("state", [state for state in PLAIN if state not in (TaskState.NONE, TaskState.ENDING)])
def test_a_task_is_cleared_from_every_state_and_has_all_its_retries_again(state):
    life = bring(state)
    before = life.task
    life.take(Clear)
    effects = life.effects
    if state is TaskState.RUNNING:
        life.take(Ended)
    assert life.task == TaskRow(
        RETRYING,
        epoch=life.task.epoch,
        tries=before.tries,
        tries_before=before.tries,
        max_tries=before.tries + 3,
    )
    assert ClearXComs() in life.effects
    assert (TellSuccessors(before.tells, NOTHING) in effects) is before.tells.done
    assert (StopTrigger(TriggerStopReason.USER) in effects) is (state is TaskState.DEFERRED)
    assert (EndAttempt(7) in effects) is (state is TaskState.RUNNING)
    assert Ring(Channel.SCHEDULER) in life.effects


@pytest.mark.parametrize("over", [Ended, Lost, Returned])
def test_a_task_that_is_cleared_while_it_runs_waits_until_its_process_or_its_worker_is_gone(over):
    life = bring(TaskState.RUNNING)
    epoch = life.task.epoch
    life.take(Clear)
    assert life.task.state is TaskState.ENDING
    assert life.task.holds_slots()
    assert life.effects == (EndAttempt(7), Ring(Channel.WORKER))
    assert life.task.session == 7
    assert life.task.next_due_us is None
    assert feed(life.task, Succeeded(epoch), life.now) == Fenced(), "what the old attempt says does not count"
    assert "ready does not apply" in life.refuse(Ready, Readiness.RUN)
    life.take(over)
    assert life.task.state is TaskState.NONE
    assert life.effects == (ClearXComs(), Ring(Channel.SCHEDULER))
    assert life.run().task.tries == 2


@pytest.mark.parametrize("state", [TaskState.RUNNING, TaskState.DEFERRED])
def test_successors_of_a_mark_are_told_once_the_old_attempt_is_gone(state):
    life = bring(state)
    answer = feed(life.task, Mark(TaskOutcome.SUCCESS, triggerer=9), life.now)
    assert isinstance(answer, Moved)
    assert answer.task.state is TaskState.ENDING
    assert not any(isinstance(effect, (TellSuccessors, RunCallback)) for effect in answer.effects)
    life.task = answer.task
    life.take(Ended)
    assert life.task.outcome is TaskOutcome.SUCCESS
    assert life.effects == (
        DiscardEvents("marked by a user"),
        RunCallback(CallbackKind.SUCCESS, "marked by a user"),
        TellSuccessors(TOLD[None], TOLD[TaskOutcome.SUCCESS]),
        Ring(Channel.SCHEDULER),
    )


def test_a_deferred_task_that_is_cleared_waits_until_its_trigger_has_cleaned_up_but_not_for_ever():
    life = bring(TaskState.DEFERRED).take(Clear, triggerer=9)
    assert (life.task.state, life.task.session) == (TaskState.ENDING, 9)
    assert life.effects == (StopTrigger(TriggerStopReason.USER), Ring(Channel.TRIGGERER))
    assert life.task.next_due_us == life.now + MAX_CLEANUP_US
    assert "nothing is due" in life.refuse(Due)
    life.now += MAX_CLEANUP_US
    assert life.take(Due).task == TaskRow(RETRYING, epoch=life.task.epoch, tries=1, tries_before=1, max_tries=4)


def test_the_last_wish_counts_while_a_task_is_ending():
    life = bring(TaskState.DEFERRED).take(Clear, triggerer=9)
    due_us = life.task.due_us
    assert "clear does not apply" in life.refuse(Clear)
    answer = feed(life.task, Mark(TaskOutcome.FAILED), life.now)
    assert isinstance(answer, Moved)
    assert answer.effects == ()
    assert (answer.task.session, answer.task.due_us) == (9, due_us)
    life.task = answer.task
    assert isinstance(feed(life.task, Mark(TaskOutcome.FAILED), life.now), Refused)
    assert "cancel does not apply" in life.refuse(Cancel)
    assert life.take(Clear).take(Cancel).take(Ended).task.outcome is TaskOutcome.SKIPPED, "it was to start over"


def test_a_task_that_was_cleared_and_does_not_start_again_calls_nobody_back():
    life = bring(TaskState.SUCCESS).take(Clear).take(Ready, Readiness.FAIL)
    assert not any(isinstance(effect, RunCallback) for effect in life.effects)


def test_nothing_has_to_be_cleared_where_nothing_has_happened():
    assert "clear does not apply" in Life().refuse(Clear)


@pytest.mark.parametrize("outcome", TaskOutcome)
@pytest.mark.parametrize("state", [state for state in PLAIN if state is not TaskState.REMOVED])
def test_a_user_may_mark_a_task_in_every_state(state, outcome):
    life = bring(state)
    before = life.task
    answer = feed(before, Mark(outcome), life.now)
    if before.outcome is outcome:
        assert isinstance(answer, Refused)
        return
    assert isinstance(answer, Moved)
    assert (StopTrigger(TriggerStopReason.USER) in answer.effects) is (state is TaskState.DEFERRED)
    assert (EndAttempt(7) in answer.effects) is (state is TaskState.RUNNING)
    life.task, life.effects = answer.task, answer.effects
    if answer.task.state is TaskState.ENDING:
        life.take(Ended)
    assert life.task.outcome is outcome
    assert TellSuccessors(TOLD[before.outcome], TOLD[outcome]) in life.effects


@pytest.mark.parametrize("state", PLAIN)
def test_a_cancelled_run_fails_what_has_started_and_skips_what_has_not(state):
    life = bring(state)
    answer = feed(life.task, Cancel(), life.now)
    if state in ENDED:
        assert isinstance(answer, Refused)
        return
    assert isinstance(answer, Moved)
    started, life.task = life.task.started, answer.task
    if answer.task.state is TaskState.ENDING:
        life.take(Ended)
    assert life.task.outcome is (TaskOutcome.FAILED if started else TaskOutcome.SKIPPED)


@pytest.mark.parametrize("state", PLAIN)
def test_every_input_is_answered_in_every_state(state):
    """What applies where, as one table; whatever it does not name is refused."""
    applies = {
        TaskState.NONE: {Ready, Mark, Cancel, Remove},
        TaskState.SCHEDULED: {Admit, Clear, Mark, Cancel, Remove},
        TaskState.QUEUED: {Claim, FileMissing, Clear, Mark, Cancel, Remove},
        TaskState.RUNNING: {
            *(Succeeded, Failed, Skipped, Deferred, Blocked, Lost, Returned, Clear, Mark, Cancel, Remove)
        },
        TaskState.DEFERRED: {TriggerFired, TriggerEnded, TriggerFailed, Due, Clear, Mark, Cancel, Remove},
        TaskState.UP_FOR_RETRY: {Due, Clear, Mark, Cancel, Remove},
        TaskState.ENDING: {Ended, Lost, Returned, Mark, Cancel, Remove},
        TaskState.REMOVED: {Clear},
    }.get(state, {Clear, Mark, Remove})
    life = bring(state)
    other = next(outcome for outcome in TaskOutcome if outcome is not life.task.outcome)
    for kind, arguments in KINDS.items():
        arguments = {"outcome": other} if kind is Mark else arguments
        answer = feed(life.task, kind(epoch=life.task.epoch, **arguments), life.now + 3_600 * SECOND)
        assert isinstance(answer, Moved if kind in applies else Refused), (state, kind)
        assert feed(life.task, kind(epoch=life.task.epoch - 1, **arguments), life.now) == Fenced()


def test_names_of_inputs_that_users_see_have_hyphens_between_their_words():
    assert identify(TriggerFired(1, "1", "trigger-1")) == "trigger-fired trigger-1"
    assert "trigger-failed does not apply" in bring(TaskState.NONE).refuse(TriggerFailed, **KINDS[TriggerFailed])


def test_a_report_that_is_repeated_because_its_answer_was_lost_is_told_from_one_that_is_late():
    life = bring(TaskState.RUNNING)
    report = Succeeded(life.task.epoch, request="s7-1")
    life.take(Succeeded, request="s7-1")
    assert feed(life.task, report, life.now, identify(report)) == Already()
    assert feed(life.task, report, life.now, "failed s7-1") == Fenced()
    assert feed(life.task, replace(report, request="s7-2"), life.now, identify(report)) == Fenced()
    assert feed(life.task, replace(report, epoch=life.task.epoch + 1), life.now, identify(report)) == Fenced()


#: What elements tell together; a map that is done has at least one outcome.
parts = st.builds(Told, st.frozensets(st.sampled_from(TaskOutcome)), st.just(False)) | st.builds(
    Told, st.frozensets(st.sampled_from(TaskOutcome), min_size=1), st.just(True)
)


@settings(max_examples=examples(300))
@given(st.data())
def test_whatever_happens_in_whatever_order_the_invariants_hold(data):
    """Speakers come with current and old epochs, repeat themselves, and users interfere."""
    policy = data.draw(
        st.builds(
            Policy,
            retries=st.integers(0, 2),
            retry_delay_us=st.integers(0, 3),
            exponential=st.booleans(),
            execution_timeout_us=st.none() | st.integers(1, 6),
            soft_fail=st.booleans(),
        )
        | st.just(MAP)
    )
    task, now = TaskRow(policy, max_tries=policy.retries + 1), 0
    journal: dict[int, str] = {}
    told = NOTHING
    trigger: int | None = None
    waited_since: int | None = None
    runs = False  # a process, or a trigger that a session runs
    cleans_up = False  # a trigger that ends beside its process
    for number in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.integers(0, 2))
        kind = data.draw(st.sampled_from(list(KINDS)))
        arguments = dict(KINDS[kind])
        if kind is Mark:
            arguments["outcome"] = data.draw(st.sampled_from(TaskOutcome))
        if kind is Ready:
            arguments["readiness"] = data.draw(st.sampled_from([Readiness.RUN, Readiness.SKIP, Readiness.FAIL]))
        if kind is MapTold:
            arguments["told"] = data.draw(parts)
        if kind is Admit:
            arguments["start"] = data.draw(st.sampled_from([None, START]))
        if kind is TriggerEnded:
            arguments["ending"] = data.draw(st.sampled_from([Success(), Failure("it broke"), Skip()]))
        if kind is Deferred:
            arguments["streams"] = data.draw(st.booleans())
            arguments["timeout_us"] = data.draw(st.none() | st.integers(1, 6))
        if kind is StreamIdle:
            arguments["ready"] = data.draw(st.booleans())
        if kind in (Deferred, StreamIdle):
            arguments["idle_us"] = data.draw(st.none() | st.integers(1, 6))
        epoch = task.epoch - data.draw(st.sampled_from([0, 0, 0, 1, 2]))
        given_input: Input = kind(epoch=epoch, request=str(number), **arguments)
        answer = feed(task, given_input, now, journal.get(epoch))
        if epoch != task.epoch:
            assert isinstance(answer, Fenced)
        if not isinstance(answer, Moved):
            continue
        if answer.task.epoch == task.epoch and task.state is TaskState.ENDING:
            # Its trigger has cleaned up, or had all the time for that; the process is still being ended.
            assert kind in (CleanedUp, Due)
            assert cleans_up
            assert task.ending is not None
            assert answer.task == task._replace(due_us=None, ending=task.ending._replace(triggerer=None))
            task, cleans_up = answer.task, False
            continue
        if kind in BLOCKS or (kind is Admit and task.state is TaskState.RUNNING):
            # The same attempt: it is still running, in the same epoch, and nothing else has changed.
            assert task.state is TaskState.RUNNING
            assert answer.task == task._replace(block=answer.task.block, deadline_us=answer.task.deadline_us)
            assert answer.task.block != task.block
            assert all(isinstance(effect, Ring) for effect in answer.effects)
            assert isinstance(feed(answer.task, given_input, now), Refused)
            waited_since = {Blocked: now, WentOn: None}.get(kind, waited_since)
            assert waited_since == (None if answer.task.block is None else answer.task.block.since_us)
            if kind is WentOn and task.deadline_us is not None:
                assert task.block is not None
                assert answer.task.deadline_us == task.deadline_us + now - task.block.since_us
            else:
                assert answer.task.deadline_us == task.deadline_us
            task = answer.task
            continue
        waited_since = waited_since if answer.task.state is TaskState.ENDING else None
        journal[task.epoch] = identify(given_input)
        # The same report again, after its answer was lost.
        assert feed(answer.task, given_input, now, journal[task.epoch]) == Already()
        assert answer.task.epoch == task.epoch + 1
        for effect in answer.effects:
            match effect:
                case TellSuccessors(before=before, after=after):
                    assert before == told
                    assert after != told
                    told = after
                case OpenMap():
                    assert (task.state, answer.task.state) == (TaskState.NONE, TaskState.MAPPED)
                case StopMap():
                    assert answer.task.state is TaskState.ENDING
                case ResetMap():
                    assert policy.is_map
                    assert answer.task.state is TaskState.NONE
                case MakeTrigger(epoch=made):
                    assert trigger is None
                    trigger = made
                case StopTrigger():
                    assert trigger == task.trigger, "a trigger speaks for the deferral that made it"
                    trigger = None
                case EndAttempt(session=session):
                    assert session == task.session
                case RunCallback(callback=CallbackKind.RETRY):
                    assert answer.task.state is TaskState.UP_FOR_RETRY
        if policy.is_map:
            assert task.state is not TaskState.ENDING or kind in (MapTold, Clear, Mark, Cancel)
            assert answer.task.state not in ATTEMPTS
            assert not any(isinstance(effect, (RunCallback, EndAttempt, MakeTrigger)) for effect in answer.effects)
        elif answer.task.state in (TaskState.RUNNING, TaskState.DEFERRED):
            assert not runs or task.state in (TaskState.RUNNING, TaskState.DEFERRED) or task.stream is not None, (
                "the old one is still there"
            )
            runs = True
        elif answer.task.state is TaskState.ENDING:
            assert runs
            if kind in (Ended, Lost, Returned):
                assert cleans_up
                assert answer.task.session == 9
                cleans_up = False
            elif task.session == 7 and task.stream is not None:
                cleans_up = True
            assert cleans_up is (answer.task.ending is not None and answer.task.ending.triggerer is not None)
        elif task.state is TaskState.ENDING:
            assert kind in (Ended, Lost, Returned, Due), "nothing else ends the wait"
            assert not cleans_up, "neither process nor trigger is left"
            runs = False
        else:
            runs = answer.task.stream is not None
        task = answer.task
        assert told == task.tells
        assert told.done is (task.state in ENDED)
        assert task.outcome is None or policy.is_map or told == TOLD[task.outcome]
        assert (task.ending is not None) is (task.state is TaskState.ENDING)
        assert trigger == task.trigger
        assert task.stream is None or task.state in ATTEMPTS
        held = task.state in (TaskState.RUNNING, TaskState.ENDING)
        assert task.block is None or held
        assert (task.block is None) is (waited_since is None)
        assert (task.session is not None) is (held and not policy.is_map)
        assert task.tries <= task.max_tries
        assert task.lost <= MAX_LOST
        waits = task.state is TaskState.DEFERRED or task.stream is not None
        assert (task.resume is not None and task.resume.payload is None) is waits
        if task.outcome is not None or policy.is_map:
            assert task.next_due_us is None
