"""Processes that die: engines, the driver, the broker."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import confluent_kafka as ck
import pytest
from tests.chaos.conftest import Site
from tests.until import wait_until

pytestmark = pytest.mark.timeout(180)


def longest_silence(times: list[float]) -> float:
    ordered = sorted(times)
    return max((b - a for a, b in itertools.pairwise(ordered)), default=0.0)


@pytest.mark.long
@pytest.mark.alone
def test_sigkill_of_an_engine_at_full_load_loses_nothing_and_disturbs_nobody(site):
    site.feed(200)
    pipeline = site.start()
    pipeline.wait_working()
    wait_until(lambda: site.shares() == [2, 2], 60, what="two engines that share the partitions")
    site.feed(5_000)
    wait_until(lambda: sum(site.committed().values()) > 1_000, 60, what="work under way")
    victim = pipeline.engines()[0]
    before = {row["partition"] for row in site.rows()}
    assert before == {0, 1, 2, 3}
    killed_at = time.time()
    os.kill(victim, signal.SIGKILL)
    site.wait_all_committed(120)
    again = site.assert_nothing_lost()
    silences = {}
    for partition in range(4):
        times = [row["at"] for row in site.rows() if row["partition"] == partition and row["at"] > killed_at - 1]
        silences[partition] = longest_silence(times)
    # The pipeline itself makes a load of about 4 on two cores; whatever else runs takes its share of the replacement's.
    busy = max(1.0, os.getloadavg()[0] / 4)
    assert max(silences.values()) < 2.0 * busy, silences
    assert sorted(silences.values())[1] < 1.0 * busy, f"the other engine's partitions were disturbed: {silences}"
    print("silences", silences, "reprocessed", sum(again.values()))
    assert sum(again.values()) <= 400, "more was reprocessed than was uncommitted"


@pytest.mark.long  # tests/sources has it of a source, with and without transactions
def test_a_broker_that_is_down_is_waited_for(tmp_path: Path, own_kafka):
    broker = own_kafka()
    site = Site(tmp_path, broker.bootstrap, broker.create_topic)
    pipeline = site.start()
    try:
        site.feed(500)
        pipeline.wait_working()
        broker.kill()
        time.sleep(10)  # the outage itself is what is tested
        assert pipeline.process.poll() is None, pipeline.log
        assert "reachable" in pipeline.log
        broker.start()
        site.feed(500)
        site.wait_all_committed(90)
        site.assert_nothing_lost()
        pipeline.signal(signal.SIGTERM)
        assert pipeline.wait() == 0, pipeline.log
    finally:
        pipeline.end()
        print(pipeline.log)


@pytest.mark.long  # test_kafka.py has it of a source, test_supervisor.py of the engines of a run
def test_an_engine_whose_place_was_taken_while_it_was_stopped_ends(site):
    site.feed(40)
    pipeline = site.start(engines=1)
    pipeline.wait_working()
    wait_until(lambda: sum(site.committed().values()) == 40, 60, what="all committed")
    (engine,) = pipeline.engines()
    os.kill(engine, signal.SIGSTOP)
    thief = ck.Consumer(
        {
            "bootstrap.servers": site.bootstrap,
            "group.id": site.group,
            "group.instance.id": f"{site.group}.w1.0",
            "partition.assignment.strategy": "cooperative-sticky",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        thief.subscribe([site.topic])
        wait_until(
            lambda: thief.poll(0.1) or len(thief.assignment()) == 4, 60, what="the other process has the partitions"
        )
        os.kill(engine, signal.SIGCONT)
        site.feed(40)
        code = pipeline.wait(60)
        assert code == 5, pipeline.log
        assert "w1" in pipeline.log.splitlines()[-1]
        assert sum(site.committed().values()) == 40, "a fenced engine committed"
    finally:
        thief.close()


@pytest.mark.long
# test_standstill.py has an engine that is stopped.
@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.nightly), "blocked"])
def test_an_engine_that_hangs_is_replaced_and_its_partitions_idle_for_less_than_a_minute(site, how):
    site.feed(40)
    pipeline = site.start(engines=1, handler="BlockOnce")
    pipeline.wait_working()
    site.wait_all_committed(30)

    def lone_engine() -> int | None:
        # A process that is being started looks like its parent for a moment.
        found = pipeline.engines()
        return found[0] if len(found) == 1 else None

    engine = wait_until(lone_engine, 60, what="one engine")
    if how == "stopped":
        os.kill(engine, signal.SIGSTOP)
    since = time.monotonic()
    site.feed(40, bad=how == "blocked")
    wait_until(lambda: len(site.rows()) > 40, 60, what="the partitions are worked on again")
    print(f"{how}: idle for {time.monotonic() - since:.1f} s")
    site.wait_all_committed(60)
    site.assert_nothing_lost()
    wait_until(lambda: engine not in pipeline.marked(), 60, what="the hung engine is gone")


@pytest.mark.long
def test_when_spark_dies_the_engines_drain_and_the_run_fails(site):
    site.feed(600, sleep=0.1, slow_every=3)
    pipeline = site.start(executor={"drain_timeout_seconds": 20, "window_size": 25, "max_executors": 4})
    pipeline.wait_working()
    marked = pipeline.marked().items()
    (jvm,) = [pid for pid, command in marked if "SparkSubmit" in command and "/java" in command.split()[0]]
    os.kill(jvm, signal.SIGKILL)
    assert pipeline.wait(60) == 4, pipeline.log
    assert "Spark" in pipeline.log.splitlines()[-1]
    wait_until(lambda: not pipeline.marked(), 60, what="nothing is left behind")
    assert sum(site.committed().values()) == len(site.seen()), "the engines did not drain"
