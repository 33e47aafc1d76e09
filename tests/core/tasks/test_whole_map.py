"""The life of a whole mapped task, which its elements and its users decide."""

from __future__ import annotations

import pytest

from tidemill.core.tasks.attempt import Fenced, Moved, Refused, feed, order_elements
from tidemill.core.tasks.dependencies import NOTHING, REMOVED, TOLD, Readiness, TaskOutcome, Told
from tidemill.core.tasks.inputs import (
    Admit,
    Cancel,
    Channel,
    Claim,
    Clear,
    ClearXComs,
    Deferred,
    Due,
    Ended,
    Failed,
    Input,
    Lost,
    MapTold,
    Mark,
    OpenMap,
    Ready,
    Remove,
    ResetMap,
    Ring,
    Skipped,
    StopMap,
    Succeeded,
    TellSuccessors,
    TriggerFailed,
    TriggerFired,
)
from tidemill.core.tasks.task_row import STATES, Policy, TaskEnding, TaskRow, TaskState

S, F, U, K = TaskOutcome.SUCCESS, TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED, TaskOutcome.SKIPPED
RING = Ring(Channel.SCHEDULER)


def told(*outcomes: TaskOutcome, done: bool = False) -> Told:
    return Told(frozenset(outcomes), done)


def move(task: TaskRow, given: Input) -> Moved:
    answer = feed(task, given, 0)
    assert isinstance(answer, Moved), answer
    assert answer.task.epoch == task.epoch + 1
    return answer


def bring(*given: Told | Input) -> TaskRow:
    """Return a map that has been opened and then fed these inputs, or what its elements told."""
    task = move(TaskRow(Policy(is_map=True)), Ready(0, Readiness.RUN)).task
    for one in given:
        task = move(task, MapTold(task.epoch, one) if isinstance(one, Told) else one).task
    return task


def test_a_map_that_its_upstream_lets_run_creates_elements_and_tells_nothing_yet() -> None:
    answer = move(TaskRow(Policy(is_map=True)), Ready(0, Readiness.RUN))
    assert answer.task.state is TaskState.MAPPED
    assert answer.effects == (OpenMap(), RING)
    assert (answer.task.outcome, answer.task.next_due_us, answer.task.started) == (None, None, False)
    assert not answer.task.holds_slots(include_deferred=True)


@pytest.mark.parametrize(("readiness", "outcome"), [(Readiness.SKIP, K), (Readiness.FAIL, U)])
def test_a_map_that_its_upstream_keeps_from_running_has_no_elements(readiness, outcome) -> None:
    answer = move(TaskRow(Policy(is_map=True)), Ready(0, readiness))
    assert answer.task.outcome is outcome
    assert answer.effects == (TellSuccessors(NOTHING, TOLD[outcome]), RING)


def test_an_open_map_tells_each_kind_of_outcome_and_then_its_end() -> None:
    task, before = bring(), NOTHING
    for after in (told(S), told(S, F), told(S, F, done=True)):
        answer = move(task, MapTold(task.epoch, after))
        assert answer.effects == (TellSuccessors(before, after), RING)
        task, before = answer.task, after
    assert task.outcome is F
    assert task.tells == told(S, F, done=True)


@pytest.mark.parametrize(
    ("kinds", "outcome"), [((S, K), S), ((K,), K), ((S, K, U), U), ((S, U, F), F), ((F,), F), ((U,), U)]
)
def test_the_worst_outcome_of_its_elements_is_the_outcome_of_a_map(kinds, outcome) -> None:
    task = bring(told(*kinds, done=True))
    assert task.outcome is outcome
    assert (task.told is None) is (len(kinds) == 1), "where the outcome says it all, nothing else is stored"


def test_a_map_opens_again_when_an_element_runs_again_and_changes_when_one_is_marked() -> None:
    task = bring(told(S, F, done=True))
    answer = move(task, MapTold(task.epoch, told(S)))
    assert answer.task.state is TaskState.MAPPED
    assert answer.effects == (TellSuccessors(told(S, F, done=True), told(S)), RING)
    task = move(answer.task, MapTold(answer.task.epoch, told(S, done=True))).task
    assert task.outcome is S
    answer = move(task, MapTold(task.epoch, told(S, K, done=True)))
    assert answer.task.outcome is S
    assert answer.effects == (TellSuccessors(TOLD[S], told(S, K, done=True)), RING)


def test_what_was_told_already_is_refused() -> None:
    for task in (bring(told(S)), bring(told(S, done=True)), bring()):
        assert isinstance(feed(task, MapTold(task.epoch, task.tells), 0), Refused)


def test_elements_of_a_map_that_has_not_begun_and_of_a_plain_task_tell_nothing() -> None:
    for task in (
        TaskRow(Policy(is_map=True)),
        TaskRow(),
        TaskRow(state=TaskState.ENDING, ending=TaskEnding(STATES[S])),
    ):
        for part in (told(S), told(S, done=True)):
            assert isinstance(feed(task, MapTold(0, part), 0), Refused)
    assert feed(bring(), MapTold(0, told(S)), 0) == Fenced()


@pytest.mark.parametrize("outcome", TaskOutcome)
def test_a_map_that_is_marked_waits_for_its_elements_which_get_the_mark_too(outcome) -> None:
    task = bring(told(F))
    answer = move(task, Mark(outcome))
    assert answer.task.state is TaskState.ENDING
    assert answer.effects == (StopMap(), RING)
    assert order_elements(answer.task) == Mark(outcome)
    assert isinstance(feed(answer.task, MapTold(answer.task.epoch, told(F, S)), 0), Refused)
    answer = move(answer.task, MapTold(answer.task.epoch, told(F, S, done=True)))
    assert answer.task.outcome is outcome
    assert answer.effects == (TellSuccessors(told(F), TOLD[outcome]), RING)
    assert order_elements(answer.task) is None


def test_a_map_that_is_cleared_begins_anew_once_its_elements_are_gone() -> None:
    answer = move(bring(told(S)), Clear())
    assert answer.effects == (StopMap(), RING)
    assert order_elements(answer.task) == Remove()
    answer = move(answer.task, MapTold(answer.task.epoch, told(K, done=True)))
    assert answer.task.state is TaskState.NONE
    assert answer.effects == (ClearXComs(), ResetMap(), RING, TellSuccessors(told(S), NOTHING), RING)
    assert move(answer.task, Ready(answer.task.epoch, Readiness.RUN)).effects == (OpenMap(), RING)


def test_a_map_that_has_ended_is_cleared_at_once() -> None:
    task = bring(told(S, F, done=True))
    answer = move(task, Clear())
    assert answer.task.state is TaskState.NONE
    assert answer.effects == (ClearXComs(), ResetMap(), RING, TellSuccessors(task.tells, NOTHING), RING)


def test_a_map_that_has_ended_is_marked_at_once_until_an_element_changes() -> None:
    task = bring(told(S, F, done=True))
    answer = move(task, Mark(S))
    assert answer.effects == (TellSuccessors(task.tells, TOLD[S]), RING)
    again = move(answer.task, MapTold(answer.task.epoch, told(S)))
    assert again.task.state is TaskState.MAPPED
    assert isinstance(feed(answer.task, Mark(S), 0), Refused)


def test_the_elements_of_a_map_whose_run_is_cancelled_decide_its_outcome() -> None:
    answer = move(bring(told(S)), Cancel())
    assert answer.task.state is TaskState.ENDING
    assert answer.effects == (StopMap(), RING)
    assert order_elements(answer.task) is None, "the run cancels its tasks itself"
    assert isinstance(feed(answer.task, Cancel(), 0), Refused)
    ended = move(answer.task, MapTold(answer.task.epoch, told(S, F, K, done=True)))
    assert ended.task.outcome is F
    assert ended.task.tells == told(S, F, K, done=True)
    assert isinstance(feed(ended.task, Cancel(), 0), Refused)


def test_a_map_that_has_not_begun_is_cancelled_as_any_task() -> None:
    assert move(TaskRow(Policy(is_map=True)), Cancel()).task.outcome is K


def test_the_last_wish_counts_while_the_elements_of_a_map_end() -> None:
    task = bring(told(S), Clear())
    assert isinstance(feed(task, Clear(), 0), Refused)
    answer = move(task, Mark(F))
    assert answer.effects == (StopMap(), RING)
    assert answer.task.tells == told(S)
    assert order_elements(answer.task) == Mark(F)
    assert isinstance(feed(answer.task, Cancel(), 0), Refused)
    task = move(move(answer.task, Clear()).task, Cancel()).task
    assert move(task, MapTold(task.epoch, told(S, K, done=True))).task.tells == told(S, K, done=True)


def test_nothing_of_an_attempt_applies_to_a_map() -> None:
    for task in (bring(), bring(told(S)), bring(Clear()), bring(Cancel()), bring(told(S, done=True))):
        epoch = task.epoch
        for given in (
            Ready(epoch, Readiness.RUN), Admit(epoch), Claim(epoch, 7), Succeeded(epoch), Failed(epoch, "no"),
            Skipped(epoch), Deferred(epoch, "a trigger", "resume"), TriggerFired(epoch, "1"), TriggerFailed(epoch, "x"),
            Due(epoch), Lost(epoch), Ended(epoch), Remove(),
        ):  # fmt: skip
            assert isinstance(feed(task, given, 10**15), Refused), given


@pytest.mark.parametrize("outcome", [None, *TaskOutcome])
def test_an_element_that_is_removed_counts_nowhere_and_comes_back_when_it_is_cleared(outcome) -> None:
    task = TaskRow() if outcome is None else move(TaskRow(), Mark(outcome)).task
    answer = move(task, Remove())
    assert answer.task.state is TaskState.REMOVED
    assert answer.task.outcome is None
    assert answer.effects == (ClearXComs(), TellSuccessors(TOLD[outcome], REMOVED), RING)
    for given in (Remove(), Cancel(), Mark(S)):
        assert isinstance(feed(answer.task, given, 0), Refused)
    assert move(answer.task, Clear()).task.state is TaskState.NONE


def test_an_element_that_runs_is_removed_once_its_attempt_is_gone() -> None:
    task = TaskRow()
    for given in (Ready(0, Readiness.RUN), Admit(1), Claim(2, 7), Remove()):
        task = move(task, given).task
    assert task.state is TaskState.ENDING
    for given in (Cancel(), Mark(F), Remove()):
        assert isinstance(feed(task, given, 0), Refused)
    assert move(task, Ended(task.epoch)).task.state is TaskState.REMOVED
    assert move(move(task, Clear()).task, Ended(task.epoch + 1)).task.state is TaskState.NONE


def bring_unit(*given: Told | Input) -> TaskRow:
    """Return a unit of a mapped group that has begun and then was fed these inputs, or what its tasks told."""
    task = move(TaskRow(Policy(is_unit=True)), Ready(0, Readiness.RUN)).task
    for one in given:
        task = move(task, MapTold(task.epoch, one) if isinstance(one, Told) else one).task
    return task


@pytest.mark.parametrize(
    ("kinds", "state"), [((S, K), TaskState.SUCCESS), ((S, F, U), TaskState.FAILED), ((), TaskState.REMOVED)]
)
def test_a_unit_ends_with_the_worst_outcome_of_its_tasks(kinds, state) -> None:
    task = bring_unit()
    assert (task.state, task.epoch) == (TaskState.MAPPED, 1)
    answer = move(task, MapTold(1, told(*kinds, done=True)))
    assert (answer.task.state, answer.task.told) == (state, None)
    assert isinstance(answer.effects[0], TellSuccessors)


def test_a_unit_follows_its_tasks_after_its_end_and_begins_again() -> None:
    task = bring_unit(told(S, done=True), told(S, F, done=True))
    assert task.state is TaskState.FAILED
    task = move(task, Clear()).task
    assert task.state is TaskState.NONE
    assert isinstance(feed(task, MapTold(task.epoch, told(S, done=True)), 0), Refused)
    assert move(task, Ready(task.epoch, Readiness.RUN)).effects == ()


@pytest.mark.parametrize("given", [Clear(), Mark(S), Cancel(), Remove(), MapTold(1, told(S)), Due(1), Ended(1)])
def test_users_order_the_tasks_of_a_unit_not_the_unit(given) -> None:
    assert isinstance(feed(bring_unit(), given, 0), Refused)


@pytest.mark.parametrize("given", [Mark(F), Cancel(), Remove(), MapTold(2, told(S, done=True))])
def test_a_unit_that_has_ended_can_only_begin_again(given) -> None:
    assert isinstance(feed(bring_unit(told(S, done=True)), given, 0), Refused)
