"""Trigger rules: whether the upstream tasks of a task let it run, decided over tallies.

Each task keeps tallies of its upstream tasks by outcome, so nothing is scanned. An upstream task that ends changes one
number, and the numbers alone decide whether the task runs, is skipped, or fails with its upstream. The rules, and their
treatment of skips and failures, are those of Airflow 3.

A mapped task counts as one task for each kind of outcome that its elements have, and while it is open as one more,
which has not ended (`Told`). No rule asks how many tasks ended in one way, only whether any did and whether all did, so
the decision is the one that the elements themselves would cause, however many there are.

Invariants: the tallies never count more outcomes than there are upstream tasks; once all upstream tasks are counted, no
rule waits.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple


class TaskOutcome(enum.StrEnum):
    """The outcome of a task."""

    SUCCESS = "success"
    FAILED = "failed"
    UPSTREAM_FAILED = "upstream_failed"
    SKIPPED = "skipped"


class Told(NamedTuple):
    """The part of an upstream task in the tallies of its successors.

    Attributes:
        kinds: The outcomes that it has; a mapped task has those of its elements.
        done: Whether it has ended. A task that is done without an outcome was removed, and counts as no task.
    """

    kinds: frozenset[TaskOutcome] = frozenset()
    done: bool = False

    @property
    def extra(self) -> int:
        """The number of tasks that it counts as, beyond one."""
        return len(self.kinds) - self.done

    @property
    def outcome(self) -> TaskOutcome:
        """The outcome of a mapped task whose elements have these outcomes: the worst, and skipped if there is none."""
        worst = (TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED, TaskOutcome.SUCCESS)
        return next((outcome for outcome in worst if outcome in self.kinds), TaskOutcome.SKIPPED)


#: The part of a task that has told nothing, and of a removed element.
NOTHING, REMOVED = Told(), Told(done=True)
#: The part of a task with one outcome; None: it has not ended.
TOLD: dict[TaskOutcome | None, Told] = {
    None: NOTHING,
    **{outcome: Told(frozenset((outcome,)), done=True) for outcome in TaskOutcome},
}


class TriggerRule(enum.StrEnum):
    """The outcomes of its direct upstream tasks that a task waits for."""

    ALL_SUCCESS = "all_success"
    ALL_FAILED = "all_failed"
    ALL_DONE = "all_done"
    ALL_DONE_MIN_ONE_SUCCESS = "all_done_min_one_success"
    ALL_DONE_SETUP_SUCCESS = "all_done_setup_success"
    ALL_SKIPPED = "all_skipped"
    ONE_SUCCESS = "one_success"
    ONE_FAILED = "one_failed"
    ONE_DONE = "one_done"
    NONE_FAILED = "none_failed"
    NONE_FAILED_MIN_ONE_SUCCESS = "none_failed_min_one_success"
    NONE_SKIPPED = "none_skipped"
    ALWAYS = "always"


class Readiness(enum.Enum):
    """The consequence of the upstream tasks for a task."""

    WAIT = "wait"
    RUN = "run"
    SKIP = "skip"
    FAIL = "fail"


_WAIT, _RUN, _SKIP, _FAIL = Readiness.WAIT, Readiness.RUN, Readiness.SKIP, Readiness.FAIL


@dataclass(frozen=True, slots=True)
class OutcomeTally:
    """The number of tasks in a set that have ended, by outcome.

    Attributes:
        total: The number of tasks in the set.
        success: The number of tasks that succeeded.
        failed: The number of tasks whose own attempts failed.
        upstream_failed: The number of tasks that failed because of their upstream.
        skipped: The number of tasks that were skipped.
    """

    total: int = 0
    success: int = 0
    failed: int = 0
    upstream_failed: int = 0
    skipped: int = 0

    @property
    def done(self) -> int:
        """The number of tasks that have ended."""
        return self.success + self.bad + self.skipped

    @property
    def bad(self) -> int:
        """The number of tasks that failed, by themselves or with their upstream."""
        return self.failed + self.upstream_failed

    def move(self, before: Told, after: Told) -> OutcomeTally:
        """Return the tally after the part of one task in it changed.

        Raises:
            ValueError: The tally does not count `before`, or would count too many.

        Example:
            >>> OutcomeTally(2).move(NOTHING, TOLD[TaskOutcome.SUCCESS])
            OutcomeTally(total=2, success=1, failed=0, upstream_failed=0, skipped=0)
        """
        counts = {
            outcome: int(getattr(self, outcome.value)) + (outcome in after.kinds) - (outcome in before.kinds)
            for outcome in TaskOutcome
        }
        total = self.total + after.extra - before.extra
        if min(counts.values()) < 0 or sum(counts.values()) > total:
            raise ValueError(f"the tally {self} cannot change from {before} to {after}")
        return replace(self, total=total, **{outcome.value: count for outcome, count in counts.items()})


@dataclass(frozen=True, slots=True)
class Upstream:
    """The tallies of a task's upstream tasks.

    Attributes:
        direct: All its direct upstream tasks.
        setups: The setups among its direct upstream tasks; they count in `direct` too.
        scope: The setups in whose scope the task is that are not direct upstream tasks; empty for a teardown.
    """

    direct: OutcomeTally = OutcomeTally()
    setups: OutcomeTally = OutcomeTally()
    scope: OutcomeTally = OutcomeTally()


def decide(rule: TriggerRule, upstream: Upstream) -> Readiness:
    """Decide whether a task runs, waits, is skipped, or fails with its upstream.

    The setups in whose scope it is must have succeeded, whatever the rule: if one failed, so does the task, and if one
    was skipped, so is the task.

    Example:
        >>> decide(TriggerRule.ALL_SUCCESS, Upstream(OutcomeTally(total=2, success=1)))
        <Readiness.WAIT: 'wait'>
        >>> decide(TriggerRule.ONE_SUCCESS, Upstream(OutcomeTally(total=2, success=1)))
        <Readiness.RUN: 'run'>
    """
    scope = _all_success(upstream.scope)
    if scope in (_SKIP, _FAIL):
        return scope
    direct = _decide_direct(rule, upstream)
    # A task that will not run need not wait for a setup.
    return scope if direct is _RUN else direct


def _decide_direct(rule: TriggerRule, upstream: Upstream) -> Readiness:
    if not upstream.direct.total:
        return _RUN
    if rule is TriggerRule.ALL_DONE_SETUP_SUCCESS:
        return _all_done_setup_success(upstream.direct, upstream.setups)
    return _RULES[rule](upstream.direct)


def _all_success(tally: OutcomeTally) -> Readiness:
    if tally.bad:
        return _FAIL
    if tally.skipped:
        return _SKIP
    return _RUN if tally.success == tally.total else _WAIT


def _all_failed(tally: OutcomeTally) -> Readiness:
    if tally.success or tally.skipped:
        return _SKIP
    return _RUN if tally.bad == tally.total else _WAIT


def _all_done(tally: OutcomeTally) -> Readiness:
    return _RUN if tally.done == tally.total else _WAIT


def _all_done_min_one_success(tally: OutcomeTally) -> Readiness:
    # This rule does not count a skipped task as done.
    if tally.skipped:
        return _SKIP
    if tally.done < tally.total:
        return _WAIT
    return _RUN if tally.success else _FAIL


def _all_done_setup_success(tally: OutcomeTally, setups: OutcomeTally) -> Readiness:
    if tally.done < tally.total:
        return _WAIT
    if not setups.total or setups.success:
        return _RUN
    return _SKIP if setups.skipped == setups.total else _FAIL


def _all_skipped(tally: OutcomeTally) -> Readiness:
    if tally.success or tally.bad:
        return _SKIP
    return _RUN if tally.skipped == tally.total else _WAIT


def _one_success(tally: OutcomeTally) -> Readiness:
    if tally.success:
        return _RUN
    if tally.done < tally.total:
        return _WAIT
    return _SKIP if tally.skipped == tally.total else _FAIL


def _one_failed(tally: OutcomeTally) -> Readiness:
    if tally.bad:
        return _RUN
    return _SKIP if tally.done == tally.total else _WAIT


def _one_done(tally: OutcomeTally) -> Readiness:
    # A task that failed with its upstream never ran; this rule does not count it as done.
    if tally.success or tally.failed:
        return _RUN
    return _SKIP if tally.done == tally.total else _WAIT


def _none_failed(tally: OutcomeTally) -> Readiness:
    if tally.bad:
        return _FAIL
    return _RUN if tally.done == tally.total else _WAIT


def _none_failed_min_one_success(tally: OutcomeTally) -> Readiness:
    if tally.bad:
        return _FAIL
    if tally.done < tally.total:
        return _WAIT
    return _RUN if tally.success else _SKIP


def _none_skipped(tally: OutcomeTally) -> Readiness:
    if tally.skipped:
        return _SKIP
    return _RUN if tally.done == tally.total else _WAIT


def _always(_tally: OutcomeTally) -> Readiness:
    return _RUN


_RULES: dict[TriggerRule, Callable[[OutcomeTally], Readiness]] = {
    TriggerRule.ALL_SUCCESS: _all_success,
    TriggerRule.ALL_FAILED: _all_failed,
    TriggerRule.ALL_DONE: _all_done,
    TriggerRule.ALL_DONE_MIN_ONE_SUCCESS: _all_done_min_one_success,
    TriggerRule.ALL_SKIPPED: _all_skipped,
    TriggerRule.ONE_SUCCESS: _one_success,
    TriggerRule.ONE_FAILED: _one_failed,
    TriggerRule.ONE_DONE: _one_done,
    TriggerRule.NONE_FAILED: _none_failed,
    TriggerRule.NONE_FAILED_MIN_ONE_SUCCESS: _none_failed_min_one_success,
    TriggerRule.NONE_SKIPPED: _none_skipped,
    TriggerRule.ALWAYS: _always,
}
