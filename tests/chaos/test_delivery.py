"""SIGKILL of engines again and again under load: what is in the sinks and in the dead letters at the end."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka as ck
import pytest
from tests.chaos.conftest import PipelineProcess, Site, wait_for

from tidemill.runtime.deadletter import decode_letter

PER_SECOND = 400
BAD_EVERY = 97


class Load(threading.Thread):
    """Feeds numbered messages at an even pace until it is stopped."""

    def __init__(self, site: Site) -> None:
        super().__init__(daemon=True)
        self.site = site
        self.stopped = threading.Event()

    def run(self) -> None:
        producer = ck.Producer({"bootstrap.servers": self.site.bootstrap, "enable.idempotence": True})
        while not self.stopped.wait(0.05):
            for _ in range(PER_SECOND // 20):
                n = self.site.fed
                value = json.dumps({"n": n, "bad": n % BAD_EVERY == 0})
                producer.produce(self.site.topic, value.encode(), partition=n % self.site.partitions)
                self.site.fed += 1
        assert producer.flush(30) == 0

    def stop(self) -> None:
        self.stopped.set()
        self.join(40)


@pytest.fixture
def load(site: Site) -> Iterator[Load]:
    feeder = Load(site)
    yield feeder
    feeder.stop()


def read_all(bootstrap: str, topic: str) -> list[bytes]:
    """Return what a consumer that reads committed records sees of a topic, in the order of each partition."""
    consumer = ck.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "audit",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    partitions = list(consumer.list_topics(topic, timeout=10).topics[topic].partitions)
    consumer.assign([ck.TopicPartition(topic, n, 0) for n in partitions])
    values: list[bytes] = []
    ended: set[Any] = set()

    def done() -> bool:
        record = consumer.poll(0.5)
        while record is not None:
            if record.error() is None:
                values.append(record.value())
                ended.discard(record.partition())
            else:
                assert record.error().code() == ck.KafkaError._PARTITION_EOF, record.error()
                ended.add(record.partition())
            record = consumer.poll(0)
        return len(ended) == len(partitions)

    try:
        wait_for(done, 90, "the end of the topic: a transaction is open")
    finally:
        consumer.close()
    return values


def kill_engines_for(seconds: float, pipeline: PipelineProcess, every: Callable[[], float]) -> int:
    """Kill one engine after another; returns how many. A pause between two is what is tested."""
    chosen = random.Random(5)
    end = time.monotonic() + seconds
    kills = 0
    while time.monotonic() < end:
        time.sleep(every())
        assert pipeline.process.poll() is None, pipeline.log
        engines = pipeline.engines()
        if engines:
            os.kill(chosen.choice(engines), signal.SIGKILL)
            kills += 1
    return kills


def first_seen_in_order(numbers: list[int]) -> bool:
    """Tell whether each key's numbers came in order, repetitions aside."""
    for key in range(8):
        seen = list(dict.fromkeys(n for n in numbers if n % 8 == key))
        if seen != sorted(seen):
            return False
    return True


def letters(site: Site) -> list[int]:
    found = [decode_letter(value) for value in read_all(site.bootstrap, f"{site.topic}_dlq")]
    return [source.offset * site.partitions + source.partition for letter in found for source in letter.sources]


@pytest.mark.timeout(400)
def test_every_message_is_in_every_sink_or_in_the_dead_letters_while_engines_are_killed(
    site: Site, load: Load, long_run: bool, embedded_kafka: Any
) -> None:
    out = f"{site.topic}-out"
    embedded_kafka.create_topic(out, partitions=2)
    pipeline = site.start(
        handler="Deliver",
        sinks={"filesystem": {"out": {"base_path": str(site.out)}}, "kafka": {"out": {"topic": out}}},
    )
    load.start()
    pipeline.wait_working()
    kills = kill_engines_for(120.0 if long_run else 16.0, pipeline, lambda: 3.0)
    load.stop()
    site.wait_all_committed(120)
    bad = set(range(0, site.fed, BAD_EVERY))
    in_letters = letters(site)
    assert set(in_letters) == bad
    lines = [row["n"] for row in site.rows()]
    records = [json.loads(value)["n"] for value in read_all(site.bootstrap, out)]
    for name, numbers in (("file", lines), ("topic", records)):
        assert set(numbers) == set(range(site.fed)) - bad, f"lost, or made up, in the {name}"
        assert first_seen_in_order(numbers), f"a key is out of order in the {name}"
        again = len(numbers) - len(set(numbers))
        print(name, "messages", site.fed, "kills", kills, "done again", again)
        assert again <= kills * 2 * PER_SECOND, "more was done again than could be uncommitted"


@pytest.mark.timeout(400)
def test_with_exactly_once_each_result_is_seen_once_while_engines_are_killed(
    site: Site, load: Load, long_run: bool, embedded_kafka: Any
) -> None:
    out = f"{site.topic}-out"
    embedded_kafka.create_topic(out, partitions=2)
    pipeline = site.start(handler="Deliver", kafka={"exactly_once": True}, sinks={"kafka": {"out": {"topic": out}}})
    load.start()

    def working() -> bool:
        assert pipeline.process.poll() is None, pipeline.log
        try:
            return sum(site.committed().values()) > 0
        except ck.KafkaException:
            return False  # a fresh broker has no coordinator yet

    wait_for(working, 60, "a first transaction")
    kills = kill_engines_for(120.0 if long_run else 16.0, pipeline, lambda: 2.5)
    load.stop()
    site.wait_all_committed(120)
    bad = set(range(0, site.fed, BAD_EVERY))
    records = [json.loads(value)["n"] for value in read_all(site.bootstrap, out)]
    counted = Counter(records)
    assert set(counted) == set(range(site.fed)) - bad
    assert max(counted.values()) == 1, "a result was seen twice"
    assert Counter(letters(site)) == Counter(bad)
    for key in range(8):
        of_key = [n for n in records if n % 8 == key]
        assert of_key == sorted(of_key)
    print("messages", site.fed, "kills", kills)
    pipeline.signal(signal.SIGTERM)
    assert pipeline.wait() == 0, pipeline.log
