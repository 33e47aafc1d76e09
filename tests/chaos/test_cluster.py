"""The same pipeline on a real Spark cluster: shipped, on every worker, and carried on when one is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from tests.chaos.conftest import ROOT, Site
from tests.spark.cluster import EXECUTOR_MEMORY, Cluster
from tests.until import wait_until

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


def assert_shipped(site: Site, engines: int) -> None:
    """The code of this package came in the zip: the cluster's Python does not have it."""
    rows = site.rows()
    assert {row["code"].rpartition("/tidemill/")[0].rpartition("/")[2] for row in rows} == {"tidemill.zip"}
    assert len({row["pid"] for row in rows}) >= engines


@pytest.mark.long
def test_a_live_pipeline_has_engines_on_both_workers_and_survives_the_loss_of_one(site: Site, cluster: Cluster):
    site.feed(400)
    pipeline = site.start(spark=cluster.spark(), handler="Shipped")
    pipeline.wait_working(300)
    wait_until(lambda: site.shares() == [2, 2], 300, what="two engines that share the partitions")
    assert cluster.busy() == 2, cluster.state()
    site.feed(1_500)
    wait_until(lambda: sum(site.committed().values()) > 500, 60, what="work under way")
    wait_until(lambda: len({row["pid"] for row in site.rows()}) >= 2, 120, what="results of both engines")
    cluster.kill_worker(0)
    site.feed(400)
    site.wait_all_committed(150)
    again = site.assert_nothing_lost()
    print("reprocessed", sum(again.values()))
    wait_until(lambda: site.shares() == [2, 2], 300, what="two engines on the worker that is left")
    site.feed(400)  # the engine that took over did perhaps all of it before
    site.wait_all_committed(150)
    assert cluster.busy() == 1 or len(cluster.alive()) == 2, "the master has not noticed yet"
    pipeline.process.terminate()
    assert pipeline.wait(300) == 0, pipeline.log
    assert_shipped(site, 3)
    cluster.replace_worker(0)


def local_cluster() -> dict[str, Any]:
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": EXECUTOR_MEMORY,
    }
    return {"master": "local-cluster[2,1,1024]", "conf": conf}


@pytest.mark.long
def test_a_live_pipeline_runs_in_a_local_cluster(site: Site):
    site.feed(80)
    pipeline = site.start(spark=local_cluster())
    pipeline.wait_working(300)
    wait_until(lambda: site.shares() == [2, 2], 300, what="two engines that share the partitions")
    site.feed(80)
    site.wait_all_committed(60)
    site.assert_nothing_lost()
    pipeline.process.terminate()
    assert pipeline.wait(300) == 0, pipeline.log


def backfill(site: Site, spark: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a backfill of the site's topic, with small ranges."""
    config = {
        "kafka": {"brokers": site.bootstrap, "source_topic": site.topic, "consumer_group": site.group},
        "sinks": {"filesystem": {"out": {"base_path": str(site.out)}}},
        "spark": spark,
    }
    (site.folder / "backfill.yaml").write_text(yaml.safe_dump(config))
    command = ["backfill", "backfill.yaml", "--handler", "tests.chaos.handlers:Shipped", "--from", "earliest"]
    with open(site.folder / "backfill.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tidemill", *command, "--outcomes", "outcomes", "--range-messages", "250"],
            cwd=site.folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


@pytest.mark.long
def test_a_backfill_survives_the_loss_of_a_worker(site: Site, cluster: Cluster):
    site.feed(2_500, sleep=0.02, slow_every=2)
    process = backfill(site, cluster.spark())
    try:
        wait_until(lambda: len({row["pid"] for row in site.rows()}) >= 2, 300, what="two engines at work")
        assert cluster.busy() == 2
        cluster.kill_worker(1)
        assert process.wait(200) == 0, (site.folder / "backfill.log").read_text()
    finally:
        process.kill()
    site.assert_nothing_lost()
    assert_shipped(site, 3)
    parts = (site.folder / "outcomes").glob("part-*")
    told = Counter((row["partition"], row["offset"]) for part in parts for row in pq.read_table(part).to_pylist())
    assert told == Counter((n % 4, n // 4) for n in range(2_500))
    cluster.replace_worker(1)
