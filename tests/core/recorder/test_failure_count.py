from __future__ import annotations

from tidemill.core.recorder.failure_count import count_failures, rank_failures
from tidemill.recorder.format.events import EventKind


def test_a_failure_is_counted_once_although_several_events_tell_of_it():
    assert count_failures({EventKind.TASK_RETRY: 3, EventKind.TASK_FAILED: 1, EventKind.DEAD_LETTERED: 1}) == 1
    assert count_failures({EventKind.DEAD_LETTERED: 10}) == 10
    assert count_failures({}) == 0


def test_a_task_that_was_replaced_by_others_is_no_failure_by_itself():
    assert count_failures({EventKind.TASK_REPLACED: 5}) == 0
    assert count_failures({EventKind.TASK_REPLACED: 5, EventKind.TASK_RETRY: 9, EventKind.TASK_FAILED: 1}) == 1


def test_an_error_that_lost_messages_comes_before_one_that_was_retried_more_often():
    kinds = {
        "retried": {"task_retry": 20},
        "rarely retried": {"task_retry": 2},
        "lost": {"task_failed": 10, "dead_lettered": 10},
    }
    assert sorted(kinds, key=lambda name: rank_failures(name, kinds[name])) == ["lost", "retried", "rarely retried"]
