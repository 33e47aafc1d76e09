"""The same pipeline on a real Spark cluster: shipped, on every worker, and carried on when one is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.chaos.conftest import Site, wait_for
from tests.spark.cluster import EXECUTOR_MEMORY, Cluster

pytestmark = pytest.mark.timeout(300)


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


def test_a_live_pipeline_has_engines_on_both_workers_and_survives_the_loss_of_one(site: Site, cluster: Cluster):
    site.feed(400)
    pipeline = site.start(spark=cluster.spark(), handler="Shipped")
    pipeline.wait_working(120)
    wait_for(lambda: site.shares() == [2, 2], 90, "two engines that share the partitions")
    assert cluster.busy() == 2, cluster.state()
    site.feed(3_000)
    wait_for(lambda: sum(site.committed().values()) > 600, 60, "work under way")
    cluster.kill_worker(0)
    site.feed(400)
    site.wait_all_committed(150)
    again = site.assert_nothing_lost()
    print("done again", sum(again.values()))
    wait_for(lambda: site.shares() == [2, 2], 90, "two engines on the worker that is left")
    assert cluster.busy() == 1 or len(cluster.alive()) == 2, "the master has not noticed yet"
    pipeline.process.terminate()
    assert pipeline.wait(90) == 0, pipeline.log
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
    site.feed(400)
    pipeline = site.start(spark=local_cluster())
    pipeline.wait_working(120)
    wait_for(lambda: site.shares() == [2, 2], 90, "two engines that share the partitions")
    site.feed(400)
    site.wait_all_committed(60)
    site.assert_nothing_lost()
    pipeline.process.terminate()
    assert pipeline.wait(90) == 0, pipeline.log
