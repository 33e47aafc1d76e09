from __future__ import annotations

import pytest

from tidemill.core.blocking import BlockCause, Standstill, Usage, judge_block


@pytest.mark.parametrize(
    ("late", "cpu", "queued", "cause"),
    [
        (0.5, 0.5, 0.0, BlockCause.COMPUTING),
        (0.5, 0.0, 0.0, BlockCause.WAITING),
        (0.5, 0.1, 0.4, BlockCause.STARVED),
        (1.0, 0.45, 0.5, BlockCause.COMPUTING),  # half of the time without a CPU, and blocking the other half
        (1.0, 0.1, 0.5, BlockCause.WAITING),
    ],
)
def test_a_blocked_loop_is_distinguished_from_a_starved_machine(late, cpu, queued, cause):
    assert judge_block(late, Usage(3.0, 7.0), Usage(3.0 + cpu, 7.0 + queued), 0.2) is cause


def test_a_watching_thread_that_was_late_itself_blames_nobody():
    usage = Usage(1.0, 1.0)
    assert judge_block(0.5, usage, usage, 0.2, overslept_seconds=0.35) is BlockCause.STARVED
    assert judge_block(0.5, usage, usage, 0.2, overslept_seconds=0.1) is BlockCause.WAITING


def test_a_thread_that_still_waits_for_a_cpu_blames_nobody():
    before = Usage(1.0, 1.0)
    assert judge_block(0.5, before, Usage(1.05, 1.1, is_runnable=True), 0.2) is BlockCause.STARVED
    assert judge_block(0.5, before, Usage(1.05, 1.1), 0.2) is BlockCause.WAITING
    assert judge_block(0.5, before, Usage(1.45, 1.0, is_runnable=True), 0.2) is BlockCause.COMPUTING
    assert judge_block(0.5, before, Usage(1.15, 1.0, is_runnable=True), 0.2) is BlockCause.STARVED


def test_code_that_computes_without_letting_the_watching_thread_run_is_to_blame():
    before = Usage(1.0, 1.0)
    assert judge_block(0.5, before, Usage(1.45, 1.0), 0.2, overslept_seconds=0.45) is BlockCause.COMPUTING
    assert judge_block(0.5, before, Usage(1.1, 1.0), 0.2, overslept_seconds=0.45) is BlockCause.STARVED


def test_only_a_step_that_is_found_again_without_a_report_between_has_lasted():
    standstill, one, other = Standstill(1.0), object(), object()
    assert [standstill.look(1, one, seconds) for seconds in (1.0, 1.0, 0.5)] == [0.0, 1.0, 1.5]
    assert [standstill.look(1, other, 1.0) for _ in range(2)] == [0.0, 1.0]
    assert standstill.look(2, other, 1.0) == 0.0
    # A callback has no task.
    assert [standstill.look(3, None, 1.0) for _ in range(2)] == [0.0, 1.0]
    # The process was stopped meanwhile.
    assert standstill.look(3, None, 3600.0) == 3.0
