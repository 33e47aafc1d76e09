from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.tasks.dependencies import (
    NOTHING,
    TOLD,
    OutcomeTally,
    Readiness,
    TaskOutcome,
    TriggerRule,
    Upstream,
    decide,
)

S, F, U, K = TaskOutcome.SUCCESS, TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED, TaskOutcome.SKIPPED
RUN, SKIP, FAIL, WAIT = Readiness.RUN, Readiness.SKIP, Readiness.FAIL, Readiness.WAIT

outcomes = st.lists(st.sampled_from([None, *TaskOutcome]), max_size=5)


def tally_of(ended: list[TaskOutcome | None]) -> OutcomeTally:
    """Count outcomes one by one, as ends of tasks do; None: not ended."""
    tally = OutcomeTally(len(ended))
    for outcome in ended:
        tally = tally.move(NOTHING, TOLD[outcome])
    return tally


def expect(rule: TriggerRule, ended: list[TaskOutcome | None], setups: list[TaskOutcome | None]) -> Readiness:
    """Say what the rule's words say, by looking at every upstream task.

    A rule holds once what it wants is certain. While it may still hold it waits. If it can no longer hold the task
    fails with its upstream where a failure is the reason, and is skipped otherwise.
    """
    if not ended or rule is TriggerRule.ALWAYS:
        return RUN
    waiting = None in ended
    bad, skipped, good = [x for x in ended if x in (F, U)], ended.count(K), ended.count(S)
    match rule:
        case TriggerRule.ALL_SUCCESS:
            return FAIL if bad else SKIP if skipped else WAIT if waiting else RUN
        case TriggerRule.ALL_FAILED:
            return SKIP if good or skipped else WAIT if waiting else RUN
        case TriggerRule.ALL_DONE:
            return WAIT if waiting else RUN
        case TriggerRule.ALL_DONE_MIN_ONE_SUCCESS:
            return SKIP if skipped else WAIT if waiting else RUN if good else FAIL
        case TriggerRule.ALL_DONE_SETUP_SUCCESS:
            if waiting:
                return WAIT
            return RUN if not setups or S in setups else SKIP if set(setups) == {K} else FAIL
        case TriggerRule.ALL_SKIPPED:
            return SKIP if good or bad else WAIT if waiting else RUN
        case TriggerRule.ONE_SUCCESS:
            return RUN if good else WAIT if waiting else SKIP if not bad else FAIL
        case TriggerRule.ONE_FAILED:
            return RUN if bad else WAIT if waiting else SKIP
        case TriggerRule.ONE_DONE:
            return RUN if good or F in bad else WAIT if waiting else SKIP
        case TriggerRule.NONE_FAILED:
            return FAIL if bad else WAIT if waiting else RUN
        case TriggerRule.NONE_FAILED_MIN_ONE_SUCCESS:
            return FAIL if bad else WAIT if waiting else RUN if good else SKIP
        case TriggerRule.NONE_SKIPPED:
            return SKIP if skipped else WAIT if waiting else RUN
    raise AssertionError(rule)


def all_outcomes(most: int) -> list[list[TaskOutcome | None]]:
    return [
        list(chosen)
        for size in range(most + 1)
        for chosen in itertools.combinations_with_replacement([None, *TaskOutcome], size)
    ]


@pytest.mark.parametrize("rule", TriggerRule)
def test_a_rule_decides_from_tallies_what_it_decides_from_the_upstream_tasks_themselves(rule):
    for ended in all_outcomes(4):
        for number_of_setups in range(len(ended) + 1):
            setups = ended[:number_of_setups]
            upstream = Upstream(tally_of(ended), tally_of(setups))
            assert decide(rule, upstream) is expect(rule, ended, setups), (ended, setups)


@pytest.mark.parametrize("rule", TriggerRule)
def test_no_rule_waits_once_all_upstream_tasks_have_ended(rule):
    for ended in all_outcomes(3):
        if None not in ended:
            assert decide(rule, Upstream(tally_of(ended), tally_of(ended[:1]))) is not WAIT


@pytest.mark.parametrize("rule", TriggerRule)
@pytest.mark.parametrize(
    ("scope", "readiness"),
    [([S, None], WAIT), ([S, S], RUN), ([S, K], SKIP), ([None, F], FAIL), ([K, U], FAIL)],
)
def test_a_task_waits_for_the_setups_in_whose_scope_it_is(rule, scope, readiness):
    assert decide(rule, Upstream(scope=tally_of(scope))) is readiness


def test_a_task_that_will_not_run_does_not_wait_for_a_setup():
    upstream = Upstream(tally_of([K]), scope=tally_of([None]))
    assert decide(TriggerRule.ALL_SUCCESS, upstream) is SKIP


@given(outcomes, st.data())
def test_the_order_of_ends_and_changes_of_mind_do_not_matter(ended, data):
    tally = tally_of(ended)
    current = list(ended)
    for place in data.draw(st.lists(st.sampled_from(range(len(ended))), max_size=6)) if ended else []:
        after = data.draw(st.sampled_from([None, *TaskOutcome]))
        tally = tally.move(TOLD[current[place]], TOLD[after])
        current[place] = after
    assert tally == tally_of(data.draw(st.permutations(current)))
    assert tally.done == sum(outcome is not None for outcome in current)


@pytest.mark.parametrize(("before", "after"), [(S, None), (K, S), (None, S)])
def test_a_tally_cannot_lose_what_it_does_not_count_or_count_more_than_there_are(before, after):
    with pytest.raises(ValueError, match="cannot change"):
        OutcomeTally(1, failed=1).move(TOLD[before], TOLD[after])
