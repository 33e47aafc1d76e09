"""A virtual day with many engines: every partition is owned again in time, and the brokers see few joins at once."""

from __future__ import annotations

from bench.scale_day import NOTICE_SECONDS, START_SECONDS, VANISHED_SECONDS, simulate


def test_no_partition_is_idle_for_longer_than_promised_and_no_herd_forms() -> None:
    day = simulate(30, 300, day_seconds=7_200.0)
    assert day["not_running_at_the_end"] == 0
    assert day["engines_that_ended_by_crash"] > 0
    assert day["engines_that_ended_by_lost_host"] > 0
    # A slot that fails again within a minute waits longer, up to the fifth delay of its backoff here.
    assert day["longest_idle_after_crash_seconds"] <= NOTICE_SECONDS + START_SECONDS + 3.5
    assert day["longest_idle_after_lost_host_seconds"] <= VANISHED_SECONDS + START_SECONDS + 3.5
    assert day["longest_idle_after_restart_seconds"] <= START_SECONDS + 0.5
    assert day["most_joins_in_a_second"] <= 20
