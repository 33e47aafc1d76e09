"""Backfill over a real topic: all of it, once, resumable, and nothing that a live pipeline has is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pyarrow.parquet as pq
import pytest
import yaml
from confluent_kafka.admin import AdminClient

from tidemill.runtime.exitcode import ExitCode

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).parent.parent.parent


class Site:
    """A topic with messages in it, and a folder."""

    def __init__(self, broker: Any, folder: Path, partitions: int = 2, **options: Any) -> None:
        self.broker = broker
        self.folder = folder
        self.topic = f"bf-{uuid.uuid4().hex[:8]}"
        self.partitions = partitions
        self.outcomes = folder / "outcomes"
        self.config_path = folder / "tidemill.yaml"
        self.fed = 0
        broker.create_topic(self.topic, partitions=partitions, **options)

    def feed(self, count: int, **fields: Any) -> None:
        producer = ck.Producer({"bootstrap.servers": self.broker.bootstrap, "linger.ms": 5})
        for n in range(self.fed, self.fed + count):
            value = json.dumps({"n": n, **fields}).encode()
            producer.produce(self.topic, value, key=b"%d" % n, partition=n % self.partitions)
            if n % 10_000 == 0:
                producer.poll(0)
        assert producer.flush(30) == 0
        self.fed += count

    def config(self, **more: Any) -> dict[str, Any]:
        config: dict[str, Any] = {
            "kafka": {"brokers": self.broker.bootstrap, "source_topic": self.topic, "consumer_group": self.topic},
            "sinks": {"filesystem": {"out": {"base_path": str(self.folder / "out")}}},
            "spark": {"master": "local[2]"},
        }
        for section, values in more.items():
            config.setdefault(section, {}).update(values)
        self.config_path.write_text(yaml.safe_dump(config))
        return config

    def seen(self) -> Counter[int]:
        path = self.folder / "out" / "out.jsonl"
        return Counter(json.loads(line)["n"] for line in path.read_text().splitlines()) if path.exists() else Counter()

    def rows(self) -> list[dict[str, Any]]:
        return [row for part in sorted(self.outcomes.glob("part-*")) for row in pq.read_table(part).to_pylist()]

    def parts(self) -> list[str]:
        return sorted(part.name for part in self.outcomes.glob("part-*"))

    def command(self, handler: str, *arguments: str) -> list[str]:
        return [
            *(sys.executable, "-m", "tidemill", "backfill", str(self.config_path)),
            *("--handler", f"tests.spark.backfill_handlers:{handler}", "--outcomes", str(self.outcomes), *arguments),
        ]

    def run(self, handler: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(handler, *arguments),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, handler: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                self.command(handler, *arguments),
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@pytest.fixture
def site(embedded_kafka: Any, tmp_path: Path) -> Site:
    return Site(embedded_kafka, tmp_path)


def test_a_topic_is_done_once_in_ranges_finer_than_its_partitions(site: Site) -> None:
    site.feed(6_000)
    site.config()
    done = site.run("Known", "--from", "earliest", "--range-messages", "700")
    assert done.returncode == ExitCode.OK, done.stderr
    assert site.seen() == Counter(range(6_000))
    rows = site.rows()
    assert Counter((row["partition"], row["offset"]) for row in rows) == Counter((n % 2, n // 2) for n in range(6_000))
    assert {row["status"] for row in rows} == {"done"}
    assert len(site.parts()) == 2 * 5
    assert "6,000 messages done, 0 dead letters" in done.stderr
    assert not list(site.outcomes.glob("_part-*"))
    admin = AdminClient({"bootstrap.servers": site.broker.bootstrap})
    groups = {found.group_id for found in admin.list_consumer_groups().result(10).valid}
    assert not {name for name in groups if name.startswith(site.topic)}, "a group was joined"
