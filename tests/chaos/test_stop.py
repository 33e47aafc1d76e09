"""Stops in good order: SIGTERM, Ctrl-C, a second signal, and two pipelines that share a group."""

from __future__ import annotations

import os
import re
import signal
import time

import confluent_kafka as ck
import pytest
from tests import size
from tests.chaos.conftest import Site
from tests.until import slack, wait_until

pytestmark = pytest.mark.timeout(180)


def partitions_within(site, seconds: float) -> float:
    """Return how long a new member of the group waits for all partitions."""
    consumer = ck.Consumer(
        {
            "bootstrap.servers": site.bootstrap,
            "group.id": site.group,
            "partition.assignment.strategy": "cooperative-sticky",
            "enable.auto.commit": False,
        }
    )
    try:
        started = time.monotonic()
        consumer.subscribe([site.topic])
        wait_until(
            lambda: consumer.poll(0.05) or len(consumer.assignment()) == site.partitions, seconds, what="partitions"
        )
        return time.monotonic() - started
    finally:
        consumer.close()


@pytest.mark.long  # test_supervisor.py has kills of engines, test_launching.py of a driver
def test_a_killed_run_leaves_no_process_and_the_next_one_loses_nothing_and_stops_under_load(site):
    site.feed(900, sleep=0.1, slow_every=3)
    killed = site.start(executor={"drain_timeout_seconds": 2, "window_size": 25, "max_executors": 4})
    killed.wait_working()
    killed.signal(signal.SIGKILL)
    killed.wait()
    wait_until(lambda: not killed.marked(), 2 + 15, what="every process is gone")
    before = len(site.rows())
    stopped = site.start(executor={"window_size": 25, "max_executors": 4})

    def working() -> bool:
        assert stopped.process.poll() is None, stopped.log
        return len(site.rows()) > before

    wait_until(working, 60, what="a result of the second run")
    stopped.signal(signal.SIGTERM)
    assert stopped.wait(60) == 0, stopped.log
    assert not stopped.marked()
    offsets = site.committed()
    committed = {n for n in range(site.fed) if n // site.partitions < offsets[n % site.partitions]}
    results = [row["n"] for row in site.rows()]
    assert len(set(results)) < site.fed, "it went on fetching"
    assert committed <= set(results), "what is committed is finished, by one of both"
    assert set(results[before:]) <= committed, "what the second finished is committed"
    assert partitions_within(site, 60) < slack(6)


@pytest.mark.long
# tests/cli/test_run.py has Ctrl-C of the command, with results.
@pytest.mark.parametrize("how", ["sigterm", pytest.param("ctrl-c", marks=pytest.mark.nightly)])
def test_a_stop_under_load_finishes_commits_leaves_and_exits_0(site, how):
    site.feed(600, sleep=0.1, slow_every=3)
    pipeline = site.start(executor={"window_size": 25, "max_executors": 4})
    pipeline.wait_working()
    if how == "sigterm":
        pipeline.signal(signal.SIGTERM)
    else:
        pipeline.ctrl_c()
    code = pipeline.wait(60)
    assert code == 0, pipeline.log
    assert not pipeline.marked()
    done, committed = len(site.seen()), site.committed()
    assert 0 < done < 600, "it went on fetching"
    assert sum(committed.values()) == done, "what finished is committed, what is committed finished"
    assert partitions_within(site, 60) < slack(6)
    if how == "ctrl-c":
        return  # what is left behind is the same
    second = site.start()
    site.wait_all_committed(120)
    again = site.assert_nothing_lost()
    assert not again, "what had been committed was reprocessed"
    second.signal(signal.SIGTERM)
    assert second.wait() == 0


@pytest.mark.long  # test_engine.py has it of an engine without Spark
def test_what_does_not_finish_within_the_drain_timeout_is_redelivered(site):
    site.feed(40, sleep=0.05)
    pipeline = site.start(executor={"drain_timeout_seconds": 1, "term_grace_seconds": 0.2})
    pipeline.wait_working()
    site.wait_all_committed(30)
    site.feed(8, sleep=30)
    wait_until(lambda: any("sleep 30" in c for c in pipeline.marked().values()), 60, what="slow tasks run")
    pipeline.signal(signal.SIGTERM)
    assert pipeline.wait(60) == 0, pipeline.log
    assert not pipeline.marked()
    assert sum(site.committed().values()) == 40
    assert len(site.rows()) == 40, "a late result was delivered"


@pytest.mark.long
@pytest.mark.parametrize("signals", [pytest.param(1, id="one signal"), pytest.param(2, id="two signals")])
def test_a_hook_that_holds_up_the_loop_for_good_does_not_delay_a_stop(site, signals):
    site.feed(40, sleep=0.02)
    site.feed(1, bad=True)
    site.feed(40, sleep=0.02)
    pipeline = site.start(handler="BlockOnce", executor={"drain_timeout_seconds": 2})
    wait_until(lambda: "a hook blocks the event loop" in pipeline.log, 90, what="the hook is named")
    engines = pipeline.engines()
    pipeline.signal(signal.SIGTERM)
    started = time.monotonic()
    if signals == 2:
        wait_until(lambda: "drain" in pipeline.log, 60, what="the drain begins")
        pipeline.signal(signal.SIGTERM)
    code = pipeline.wait(60)
    seconds = time.monotonic() - started
    print(f"ended {seconds:.1f} s after the signal")
    assert code == (4 if signals == 1 else 130), pipeline.log
    if signals == 1:
        assert "did not end within 5 s after the request to drain and was killed" in pipeline.log
    assert seconds < slack(7)
    assert not [pid for pid in engines if os.path.exists(f"/proc/{pid}")], "an engine outlived the run"
    if signals == 2:
        return  # what is left behind is the same
    site.start(handler="BlockOnce")
    site.wait_all_committed(120)
    site.assert_nothing_lost()


@pytest.mark.long
# A second signal is above, for a hook that never returns.
@pytest.mark.parametrize("signals", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_transform_that_never_returns_holds_up_no_stop_and_loses_nothing(site, signals):
    site.feed(400)
    site.feed(1, bad=True)
    site.feed(400)
    pipeline = site.start(handler="StuckOnce", executor={"drain_timeout_seconds": 60 if signals == 2 else 1})
    wait_until((site.folder / "stuck").exists, 90, what="one that does not return")
    wait_until(lambda: sum(site.committed().values()) > 300, 60, what="other partitions go on")
    pipeline.signal(signal.SIGTERM)
    wait_until(lambda: "drain" in pipeline.log, 60, what="the drain begins")
    if signals == 2:
        pipeline.signal(signal.SIGTERM)
    started = time.monotonic()
    assert pipeline.wait(60) == (0 if signals == 1 else 130), pipeline.log
    assert time.monotonic() - started < slack(10)
    wait_until(lambda: not pipeline.marked(), 60, what="nothing is left behind")
    for partition, offset in site.committed().items():
        lacking = set(range(partition, offset * site.partitions, site.partitions)) - site.seen().keys()
        assert not lacking, "committed, but not delivered"
    if signals == 2 or not size.nightly:
        return  # that the next run does the rest is shown above
    site.start(handler="DeliverTransformed")
    site.wait_all_committed(120)
    assert set(site.seen()) == set(range(site.fed)) - {400}


@pytest.mark.long  # tests/sources has it of two members
def test_two_pipelines_of_one_group_share_the_partitions_and_repeat_nothing(site):
    site.feed(1_200, sleep=0.01, slow_every=3)
    first = site.start("w1", engines=1)
    first.wait_working()
    second = site.start("w2", engines=1)
    wait_until(lambda: "partitions assigned" in second.log, 60, what="the second one has partitions")
    site.feed(600)
    site.wait_all_committed(120)
    assert not site.assert_nothing_lost(), "work was repeated by a rebalance"
    second.signal(signal.SIGTERM)
    assert second.wait() == 0
    site.feed(100)
    site.wait_all_committed(30)
    assert not site.assert_nothing_lost()


def test_a_signal_while_spark_starts_is_not_lost(site):
    pipeline = site.start()
    wait_until(lambda: "starting Spark" in pipeline.log, 60, what="the start of Spark")
    pipeline.signal(signal.SIGTERM)
    assert pipeline.wait(60) == 0, pipeline.log
    assert not pipeline.marked()


@pytest.mark.long
# A client of a broker that is gone knows it at once; one that is silent holds each call up.
@pytest.mark.parametrize("how", [pytest.param("gone", marks=pytest.mark.nightly), "silent"])
def test_a_stop_while_the_broker_is_away_keeps_its_deadline_and_says_what_is_reprocessed(tmp_path, own_kafka, how):
    broker = own_kafka()
    site = Site(tmp_path, broker.bootstrap, broker.create_topic)
    site.feed(20_000, sleep=0.0)
    pipeline = site.start(executor={"drain_timeout_seconds": 5})
    try:
        pipeline.wait_working()
        if how == "gone":
            broker.kill()
        else:
            os.kill(broker.pid, signal.SIGSTOP)
        rows = len(site.rows())
        wait_until(lambda: len(site.rows()) > rows, 60, what="work goes on without the broker")
        started = time.monotonic()
        pipeline.signal(signal.SIGTERM)
        code = pipeline.wait(60)
        took = time.monotonic() - started
        last = pipeline.log.strip().splitlines()[-1]
    finally:
        pipeline.end()
        if how == "silent":
            os.kill(broker.pid, signal.SIGCONT)
    assert code == 4, pipeline.log
    assert re.search(r"commits failed .* reprocesses [\d,]+ finished messages", last)
    print(f"{how}: {took:.1f} s")
    # Its deadline is 10 s; where the processors are shared by others, Spark's own end takes longer.
    assert took < slack(5 + 5 + 3), pipeline.log
