"""SIGKILL of engines again and again under load: what is in the sinks and in the dead letters at the end."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import confluent_kafka as ck
import pytest
from tests.chaos.conftest import PipelineProcess, Site, read_all
from tests.chaos.every_sink import REFUSED_EVERY, EverySink
from tests.faults import FaultyProxy
from tests.jsonl import read_lines
from tests.size import sized
from tests.until import wait_until

from tidemill.deadletters.letter import Letter, LetterKind, decode_letter

#: Which engine is killed when, and which sink is cut off when, follow from it.
SEED = 5
KEYS = 8
BAD_EVERY = 97
#: What one partition may have to do again after a kill.
MAX_UNCOMMITTED = 500


class Load(threading.Thread):
    """Feeds numbered messages at an even pace until it is stopped."""

    def __init__(self, site: Site) -> None:
        super().__init__(daemon=True)
        self.site = site
        self.per_second = 400
        self.stopped = threading.Event()

    def run(self) -> None:
        producer = ck.Producer({"bootstrap.servers": self.site.bootstrap, "enable.idempotence": True})
        while not self.stopped.wait(0.05):
            for _ in range(self.per_second // 20):
                n = self.site.fed
                value = json.dumps({"n": n, "bad": n % BAD_EVERY == 0})
                producer.produce(
                    self.site.topic, value.encode(), f"k{n % KEYS}".encode(), partition=n % self.site.partitions
                )
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


def kill_engines_for(seconds: float, pipeline: PipelineProcess, pauses: tuple[float, float]) -> int:
    """Kill one engine after another; returns how many. A pause between two is what is tested."""
    chosen = random.Random(SEED)
    end = time.monotonic() + seconds
    kills = 0
    while time.monotonic() < end:
        time.sleep(chosen.uniform(*pauses))
        assert pipeline.process.poll() is None, pipeline.log
        engines = pipeline.engines()
        if engines:
            os.kill(chosen.choice(engines), signal.SIGKILL)
            kills += 1
    return kills


class Outages(threading.Thread):
    """Cuts each of some servers off for a while, one after another; down and up times are what is tested."""

    def __init__(self, proxies: dict[str, FaultyProxy], seconds: float) -> None:
        super().__init__(daemon=True)
        self.order = sorted(proxies)
        random.Random(SEED).shuffle(self.order)
        self.proxies = proxies
        self.share = seconds / len(proxies)

    def run(self) -> None:
        for kind in self.order:
            time.sleep(self.share / 2)
            self.proxies[kind].down()
            time.sleep(min(5.0, self.share / 2))
            self.proxies[kind].up()


def of_key(numbers: Iterable[int], key: int) -> list[int]:
    return [n for n in numbers if n % KEYS == key]


def assert_in_order(name: str, numbers: list[int], expected: set[int]) -> int:
    """Each key's numbers follow one another without a gap, save that some are reprocessed from further back.

    A server may still execute what killed engines have sent, of which several can have waited for a server that was cut
    off, while the next one begins again: the numbers of each follow one another, too.

    Returns:
        How often something was begun again.
    """
    begun_again = 0
    for key in range(KEYS):
        wanted = of_key(sorted(expected), key)
        position_of = {n: place for place, n in enumerate(wanted)}
        last, killed = -1, set[int]()
        for n in of_key(numbers, key):
            place = position_of[n]
            if place != last + 1 and place - 1 in killed:
                killed.remove(place - 1)
                killed.add(place)
                continue
            assert place <= last + 1, (
                f"in {name}, {n} of key {key} overtook {wanted[last + 1]}; at {place}, killed at {sorted(killed)}"
            )
            if place <= last:
                begun_again += 1
                killed.add(last)
            last = place
        assert last == len(wanted) - 1, f"in {name}, an older value of key {key} came last"
    return begun_again


def letters(site: Site) -> list[tuple[int, Letter]]:
    """Return each letter with the number of its message; its key has to be that of the message."""
    found = []
    for letter in map(decode_letter, read_all(site.bootstrap, f"{site.topic}_dlq")):
        for source in letter.sources:
            n = source.offset * site.partitions + source.partition
            assert source.key == f"k{n % KEYS}"
            found.append((n, letter))
    return found


@pytest.fixture
def every_sink(
    site: Site, postgres: Any, database: str, mongo: Any, http_double: Any, valkey: Any, embedded_kafka: Any
) -> Iterator[EverySink]:
    topic = f"{site.topic}-out"
    embedded_kafka.create_topic(topic, partitions=2)
    sinks = EverySink(
        *(postgres, mongo, http_double, valkey),
        database=database,
        bootstrap=site.bootstrap,
        topic=topic,
        folder=site.out,
    )
    yield sinks
    sinks.close()


@pytest.mark.timeout(1300)
@pytest.mark.long  # below it is one sink; tests/sinks has every sink down for a while, with a pipeline in the process
def test_every_message_is_in_every_sink_or_in_the_dead_letters_while_engines_are_killed(
    site: Site, load: Load, every_sink: EverySink
) -> None:
    seconds = sized(20.0, 40.0)
    load.per_second = 200
    pipeline = site.start(handler="Deliver", sinks=every_sink.section(), executor={"max_uncommitted": MAX_UNCOMMITTED})
    load.start()
    pipeline.wait_working()
    wait_until(lambda: site.shares() == [2, 2], 60, what="two engines that share the partitions")
    outages = Outages(every_sink.between, seconds)
    outages.start()
    kills = kill_engines_for(seconds, pipeline, (2.0, 4.0))
    outages.join()
    load.stop()
    # Engines that were killed again and again start half a minute later, and then have all of it to catch up on.
    site.wait_all_committed(600)
    pipeline.signal(signal.SIGTERM)
    assert pipeline.wait() == 0, pipeline.log
    bad = set(range(0, site.fed, BAD_EVERY))
    refused = set(range(0, site.fed, REFUSED_EVERY)) - bad
    told = letters(site)
    assert {n for n, letter in told if letter.kind is LetterKind.HOOK} == bad
    assert {n for n, letter in told if letter.sink_type == "postgres"} == refused
    assert {n for n, _ in told} == bad | refused, "a letter for something that is nobody's fault"
    print("seed", SEED, "messages", site.fed, "kills", kills, "cut off in turn", outages.order)
    for name, numbers in every_sink.arrivals().items():
        expected = set(range(site.fed)) - bad - (refused if name == "postgres" else set())
        assert set(numbers) == expected, f"lost, or made up, in {name}"
        begun_again = assert_in_order(name, numbers, expected)
        again = len(numbers) - len(set(numbers))
        print(name, "reprocessed", again, "in", begun_again, "runs")
        assert again <= (kills + 2) * 2 * MAX_UNCOMMITTED, "more was reprocessed than could be uncommitted"
    for name, values in every_sink.latest().items():
        expected = set(range(site.fed)) - bad - (refused if name == "postgres" else set())
        assert values == {f"k{key}": max(of_key(expected, key)) for key in range(KEYS)}, name


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("handler", ["Deliver", "DeliverTransformed"])
def test_with_exactly_once_each_result_is_seen_once_while_engines_are_killed(
    site: Site, load: Load, embedded_kafka: Any, handler: str
) -> None:
    out = f"{site.topic}-out"
    embedded_kafka.create_topic(out, partitions=2)
    pipeline = site.start(handler=handler, kafka={"exactly_once": True}, sinks={"kafka": {"out": {"topic": out}}})
    load.start()

    def working() -> bool:
        assert pipeline.process.poll() is None, pipeline.log
        try:
            return sum(site.committed().values()) > 0
        except ck.KafkaException:
            return False  # a fresh broker has no coordinator yet

    wait_until(working, 60, what="a first transaction")
    kills = kill_engines_for(sized(12.0, 25.0), pipeline, (2.0, 3.0))
    load.stop()
    site.wait_all_committed(400)
    bad = set(range(0, site.fed, BAD_EVERY))
    records = [json.loads(value)["n"] for value in read_all(site.bootstrap, out)]
    counted = Counter(records)
    assert set(counted) == set(range(site.fed)) - bad
    assert max(counted.values()) == 1, "a result was seen twice"
    assert Counter(n for n, _ in letters(site)) == Counter(bad)
    assert assert_in_order("the topic", records, set(counted)) == 0
    print("seed", SEED, "messages", site.fed, "kills", kills)
    pipeline.signal(signal.SIGTERM)
    assert pipeline.wait() == 0, pipeline.log


@pytest.mark.timeout(900)
@pytest.mark.long  # tests/pipeline has it of an engine without Spark
def test_messages_of_a_key_wait_for_each_other_while_engines_are_killed(site: Site, load: Load) -> None:
    load.per_second = 200
    pipeline = site.start(handler="InTurn", executor={"order_by": "key"})
    load.start()
    pipeline.wait_working()
    kills = kill_engines_for(sized(10.0, 20.0), pipeline, (2.0, 4.0))
    load.stop()
    site.wait_all_committed(300)
    pipeline.signal(signal.SIGTERM)
    assert pipeline.wait() == 0, pipeline.log
    bad = set(range(0, site.fed, BAD_EVERY))
    assert {n for n, _ in letters(site)} == bad
    for name in ("out.jsonl", "done.jsonl"):
        numbers = [row["n"] for row in read_lines(site.out / name)]
        again = assert_in_order(name, numbers, set(range(site.fed)) - bad)
        print(name, "messages", site.fed, "kills", kills, "reprocessed", len(numbers) - len(set(numbers)), "in", again)
