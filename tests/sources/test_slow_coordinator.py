"""`kafka.exactly_once` with members as processes and coordinators that are slow, cut off or come back too late.

Everything that happens is drawn from one seed, which a failure shows; `TIDEMILL_SEED` plays it again, as far as
processes and brokers keep their time.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
from tests.chaos.conftest import read_all
from tests.size import sized
from tests.sources.kafka_proxy import TRANSACTIONAL, Fault, KafkaProxy, When, proxied_broker
from tests.sources.member import MemberProcess
from tests.until import wait_until

SEED = int(os.environ.get("TIDEMILL_SEED") or random.SystemRandom().randrange(10**9))
PARTITIONS = 4


class Group:
    """Two members that stay, one that comes and goes, each behind a proxy of its own, and what they work on."""

    workers = ("w1", "w2", "w3")

    def __init__(self, folder: Path, broker: Any, proxies: list[KafkaProxy]) -> None:
        self.folder, self.broker = folder, broker
        self.proxies = dict(zip(self.workers, proxies, strict=True))
        self.topic = f"slow-{uuid.uuid4().hex[:8]}"
        self.out = f"{self.topic}-out"
        broker.create_topic(self.topic, partitions=PARTITIONS)
        broker.create_topic(self.out, partitions=2)
        self.members: dict[str, MemberProcess] = {}
        self.fed = 0
        self.producer = ck.Producer({"bootstrap.servers": broker.bootstrap, "enable.idempotence": True, "log_level": 0})
        # Consumers that read committed records would wait for transactions that are open.
        self.asker = ck.Consumer(
            {"bootstrap.servers": broker.bootstrap, "group.id": self.topic, "isolation.level": "read_uncommitted"}
        )
        self.offsets: Counter[int] = Counter()

    def start(self, worker: str) -> None:
        settings = {
            "kafka": {
                "brokers": self.proxies[worker].address,
                "source_topic": self.topic,
                "consumer_group": self.topic,
                "session_timeout_ms": 2_000,
                "heartbeat_interval_ms": 300,
                "exactly_once": True,
                "client_config": {"reconnect.backoff.max.ms": 500},
            },
            "executor": {"drain_timeout_seconds": 1},
            "sinks": {"kafka": {"out": {"topic": self.out}}},
        }
        self.members[worker] = MemberProcess(self.folder, worker, settings)

    def feed(self, count: int) -> None:
        for n in range(self.fed, self.fed + count):
            self.producer.produce(self.topic, b"%d" % n, partition=n % PARTITIONS)
        self.fed += count
        assert self.producer.flush(20) == 0

    def committed(self) -> int:
        """Return how many messages are committed; no partition's offset may ever be lower than it was."""
        parts = [ck.TopicPartition(self.topic, n) for n in range(PARTITIONS)]
        try:
            answers = self.asker.committed(parts, timeout=20)
        except ck.KafkaException:
            return 0  # a fresh broker has no coordinator yet
        for found in answers:
            offset = max(0, found.offset)
            assert offset >= self.offsets[found.partition], f"the offset of {found.partition} moved back"
            self.offsets[found.partition] = offset
        return sum(self.offsets.values())

    def finish(self) -> None:
        """Let everything that was fed be committed, undisturbed."""
        for proxy in self.proxies.values():
            proxy.calm()
        for worker in ("w1", "w2"):
            self.replace_dead(worker)
        # A kill in the middle of a rebalance can leave a partition without an owner; the driver, which sees to that, is
        # not here, so another member comes or goes.
        third = self.members.get("w3")
        if third is not None and third.alive:
            third.signal(signal.SIGTERM)
        else:
            self.start("w3")
        wait_until(lambda: self.committed() == self.fed, 90, what=f"{self.fed} messages committed")

    def replace_dead(self, worker: str) -> None:
        """Do what the supervisor of engines does."""
        if not self.members[worker].alive:
            self.start(worker)

    def assert_exactly_once(self) -> None:
        values = [int(value) for value in read_all(self.broker.bootstrap, self.out)]
        counted = Counter(values)
        twice = sorted(value for value, count in counted.items() if count > 1)
        assert not twice, f"{len(twice)} results were seen more than once: {twice[:20]}"
        assert sorted(counted) == list(range(self.fed)), "results are missing"
        for partition in range(PARTITIONS):
            of_key = [value for value in values if value % PARTITIONS == partition]
            assert of_key == sorted(of_key), "results of a key came out of order"

    def end(self) -> None:
        for member in self.members.values():
            member.kill()
            print(f"--- {member.worker}", *member.log_path.read_text().splitlines()[-200:], sep="\n")
        self.asker.close()
        for proxy in self.proxies.values():
            proxy.close()


@pytest.fixture
def group(tmp_path, own_kafka):
    broker, proxies = proxied_broker(own_kafka, 3)
    made = Group(tmp_path, broker, proxies)
    yield made
    made.end()


class Trouble:
    """Lets things happen to a group, one after the other."""

    def __init__(self, group: Group, chance: random.Random) -> None:
        self.group, self.chance = group, chance
        self.counts: Counter[str] = Counter()

    def disturb(self, worker: str) -> None:
        """Make this member's coordinators slow: each exchange about a transaction may wait, or be cut."""
        chance = random.Random(self.chance.random())
        share = chance.choice((0.2, 0.5, 1.0))

        def judge(api: int) -> Fault | None:
            if api not in TRANSACTIONAL or chance.random() > share:
                return None
            return Fault(chance.choice(list(When)), chance.choice((0.1, 1.0, 2.0, 4.0)), chance.random() < 0.3)

        self.group.proxies[worker].judge = judge

    def happen(self) -> None:
        group, chance = self.group, self.chance
        worker = chance.choice(("w1", "w2"))
        what = chance.choices(("slow", "calm", "join", "crash", "freeze"), (4, 2, 5, 1, 2))[0]
        self.counts[what] += 1
        if what == "slow":
            self.disturb(worker)
        elif what == "calm":
            group.proxies[worker].calm()
        elif what == "join":
            self.join_or_leave()
        elif what == "crash":
            group.members[worker].kill()
            group.start(worker)
        else:
            self.freeze(worker)

    def join_or_leave(self) -> None:
        third = self.group.members.get("w3")
        if third is None or not third.alive:
            self.group.start("w3")
        elif self.chance.random() < 0.3:
            third.kill()
        else:
            third.signal(signal.SIGTERM)

    def freeze(self, worker: str) -> None:
        """Stop a member for longer than its session; its partitions belong to another member when it continues."""
        member = self.group.members[worker]
        member.signal(signal.SIGSTOP)
        try:
            self.work(self.chance.choice((0.5, 2.5, 4.0)))
        finally:
            member.signal(signal.SIGCONT)

    def work(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.group.feed(20)
            self.group.committed()
            time.sleep(0.05)  # the pace of the feed


def play(group: Group, seconds: float) -> None:
    print("seed", SEED)
    trouble = Trouble(group, random.Random(SEED))
    group.feed(200)
    for worker in ("w1", "w2"):
        group.start(worker)
    wait_until(lambda: group.committed() > 0, 60, what="a first transaction")
    until = time.monotonic() + seconds
    for worker in itertools.cycle(("w1", "w2")):
        if time.monotonic() > until:
            break
        trouble.happen()
        trouble.work(trouble.chance.uniform(0.3, 1.5))
        group.replace_dead(worker)
    group.finish()
    print("messages", group.fed, dict(trouble.counts))
    group.assert_exactly_once()
    for worker in ("w1", "w2"):
        assert "ended: fenced" not in group.members[worker].log_path.read_text(), "nobody had taken its place"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_rebalances_and_slow_coordinators_repeat_nothing(group: Group) -> None:
    play(group, sized(25.0, 60.0))
