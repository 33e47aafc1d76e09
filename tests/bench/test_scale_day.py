"""A virtual day with many engines: every partition is owned again in time, and the brokers see few joins at once."""

from __future__ import annotations

from bench.scale_day import (
    NOTICE_SECONDS,
    PER_REBALANCE,
    PER_SECOND,
    PER_START,
    REBALANCE_SECONDS,
    SESSION_SECONDS,
    START_SECONDS,
    VANISHED_SECONDS,
    simulate,
)


def test_no_partition_is_idle_for_longer_than_promised_and_no_herd_forms() -> None:
    day = simulate(30, 300, day_seconds=7_200.0)
    assert day["not_running_at_the_end"] == 0
    assert day["engines_with_crash"] > 0
    assert day["engines_with_lost_host"] > 0
    # A slot that fails again within a minute waits longer, up to the fifth delay of its backoff here.
    assert day["longest_idle_after_crash_seconds"] <= NOTICE_SECONDS + START_SECONDS + 3.5
    assert day["longest_idle_after_lost_host_seconds"] <= VANISHED_SECONDS + START_SECONDS + 3.5
    assert day["longest_idle_after_restart_seconds"] <= START_SECONDS + 0.5
    assert day["most_joins_in_a_second"] <= 20


def test_all_engines_begin_together_and_end_together() -> None:
    day = simulate(30, 300, day_seconds=7_200.0)
    assert START_SECONDS < day["consuming_after_seconds"] <= START_SECONDS + 0.2, "slot 0 is ready before the others"
    assert day["runs_finished"] == 1


def test_a_host_that_is_lost_for_long_is_one_rebalance_and_its_return_another() -> None:
    day = simulate(30, 300, day_seconds=86_400.0)
    assert day["engines_with_long_loss"] == day["engines_with_return"] > 0
    assert day["longest_idle_after_long_loss_seconds"] == SESSION_SECONDS + REBALANCE_SECONDS
    assert day["rebalances"] <= 12, "six hosts, each gone and back"
    at_once = 30 * (PER_SECOND + PER_REBALANCE + PER_START)
    assert 30 * PER_SECOND == day["requests_per_second"] < day["most_requests_in_a_second"] <= at_once
