"""Periodic hooks: sleep first, then as declared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.pipeline.periodic import OnError, Periodic, PeriodicOutcome, Scope, Sleep, StopPeriodic

declared = st.builds(Periodic, st.floats(0.001, 1e6), st.sampled_from(OnError), st.sampled_from(Scope))


@given(declared, st.integers(0, 100))
def test_an_engine_sleeps_first_and_hooks_of_the_pipeline_run_only_in_slot_0(hook: Periodic, slot: int) -> None:
    runs_here = hook.scope is Scope.ENGINE or slot == 0
    assert hook.decide_first(slot) == (Sleep(hook.seconds) if runs_here else StopPeriodic())


@given(declared, st.lists(st.sampled_from(PeriodicOutcome), max_size=20))
def test_it_runs_until_an_error_stops_it(hook: Periodic, outcomes: list[PeriodicOutcome]) -> None:
    for outcome in outcomes:
        step = hook.decide_next(outcome)
        if outcome is PeriodicOutcome.RAISED and hook.on_error is OnError.STOP:
            assert step == StopPeriodic()
            break
        assert step == Sleep(hook.seconds)


def test_a_hook_of_the_pipeline_runs_in_slot_0_only() -> None:
    hook = Periodic(60.0, scope=Scope.PIPELINE)
    assert (hook.decide_first(0), hook.decide_first(1)) == (Sleep(60.0), StopPeriodic())


def test_a_hook_that_stops_at_an_error_stops_at_the_first() -> None:
    assert Periodic(60.0, OnError.STOP).decide_next(PeriodicOutcome.RAISED) == StopPeriodic()
