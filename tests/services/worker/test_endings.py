from __future__ import annotations

import signal

import pytest

from tidemill.core.tasks.endings import AttemptEnding, Failure, Loss
from tidemill.core.tasks.worker_slots import InterruptReason, WorkerLimits
from tidemill.services.worker.endings import explain_end
from tidemill.services.zygote.messages import Exited


def explain(why: InterruptReason, status: int | None) -> AttemptEnding | None:
    return explain_end(why, None if status is None else Exited(9, status), "d.py", WorkerLimits(grace_seconds=5.0))


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "exit code 0"),
        (-signal.SIGSEGV, "crashed (SIGSEGV)"),
        (-signal.SIGKILL, "out of memory"),
        (-signal.SIGTERM, "SIGTERM, which tidemill did not send"),
        (-signal.SIGRTMIN - 1, "ended by signal 35"),
    ],
)
def test_a_process_that_ends_by_itself_fails_its_attempt(status: int, said: str) -> None:
    result = explain(InterruptReason.CRASH, status)
    assert isinstance(result, Failure)
    assert said in result.error


def test_what_is_not_the_fault_of_the_task_is_given_back() -> None:
    assert explain(InterruptReason.CRASH, None) == explain(InterruptReason.LOST, -9) == Loss()
    assert explain(InterruptReason.DRAIN, -9) == Loss(is_return=True)


def test_nobody_is_told_of_an_attempt_that_was_replaced() -> None:
    assert explain(InterruptReason.REPLACED, -9) is None
