"""DataFrame mode in a user's own session: rows in, outcomes out, delivered once however often they are looked at."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidemill.config.settings import Settings
from tidemill.runtime.java import find_java
from tidemill.spark.frames import process
from tidemill.testing.kafka import unique_name

pytestmark = pytest.mark.timeout(180)
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session as a user makes it: no setting of ours, workers used again."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    os.environ["JAVA_HOME"] = str(find_java().home)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    gateway = SparkContext._gateway
    yield session
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(30)
    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture
def settings(embedded_kafka: Any, tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "kafka": {"brokers": embedded_kafka.bootstrap, "source_topic": unique_name("rows")},
            "sinks": {"filesystem": {"out": {"base_path": str(tmp_path / "out")}}},
        }
    )


def rows_of(session: Any, count: int, schema: str = "key string, value string", **fields: Any) -> Any:
    return session.createDataFrame([(str(n), json.dumps({"n": n, **fields})) for n in range(count)], schema)


def seen(settings: Settings) -> Counter[int]:
    path = Path(settings.sinks.filesystem["out"].base_path) / "out.jsonl"
    return Counter(json.loads(line)["n"] for line in path.read_text().splitlines()) if path.exists() else Counter()


def test_a_batch_is_delivered_once_however_often_its_outcomes_are_read(session, settings):
    from tests.spark.backfill_handlers import Known

    threads = threading.active_count()
    done = process(rows_of(session, 3_000).repartition(3), Known, settings)
    assert seen(settings) == Counter(range(3_000))
    assert done.count() == 3_000
    assert {row.status for row in done.collect()} == {"done"}
    assert sorted(int(bytes(row.key)) for row in done.collect()) == list(range(3_000))
    assert seen(settings) == Counter(range(3_000)), "looking at the outcomes delivered again"
    # The worker processes go on with other work of the session, as if nothing had been.
    assert session.sparkContext.parallelize(range(100), 4).map(lambda n: n + 1).sum() == 5_050
    assert threading.active_count() <= threads + 2
