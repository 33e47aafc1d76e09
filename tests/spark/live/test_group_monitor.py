"""Partitions that nobody owns after a kill in the middle of a cooperative rebalance, with real members."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka as ck
import pytest
from tests.until import wait_until

from tidemill.config.settings import Settings
from tidemill.sources.membership import GroupViewer, find_present_members
from tidemill.spark.live.group_monitor import GroupWatch

MEMBER = """
import os, signal, sys
import confluent_kafka as ck
brokers, group, topic, name, dies = sys.argv[1:]
consumer = ck.Consumer({
    "bootstrap.servers": brokers, "group.id": group, "group.instance.id": name, "client.id": name,
    "heartbeat.interval.ms": 500,
    "partition.assignment.strategy": "cooperative-sticky",
})
def revoked(consumer, partitions):
    if dies == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
consumer.subscribe([topic], on_revoke=revoked)
while True:
    consumer.poll(0.1)
"""


Members = Callable[..., subprocess.Popen[bytes]]


def settings_of(broker: Any) -> Settings:
    topic = f"owned-{uuid.uuid4().hex[:8]}"
    broker.create_topic(topic, partitions=4)
    return Settings.model_validate(
        {"kafka": {"brokers": broker.bootstrap, "source_topic": topic, "consumer_group": topic}}
    )


@pytest.fixture
def settings(embedded_kafka: Any) -> Settings:
    return settings_of(embedded_kafka)


@pytest.fixture
def read_member_id() -> Iterator[Callable[[Settings], Members]]:
    started: list[subprocess.Popen[bytes]] = []

    def of(settings: Settings) -> Members:
        kafka = settings.kafka

        def start(name: str, dies: str = "lives") -> subprocess.Popen[bytes]:
            args = [sys.executable, "-c", MEMBER, kafka.brokers, kafka.consumer_group, kafka.source_topic, name, dies]
            started.append(subprocess.Popen(args, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            return started[-1]

        return start

    yield of
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def member(settings: Settings, read_member_id: Callable[[Settings], Members]) -> Members:
    return read_member_id(settings)


def test_what_a_killed_member_gave_up_and_nobody_got_is_distributed_again(settings, member):
    viewer = GroupViewer(settings)
    everything = frozenset(range(4))
    dying = member("a", "dies")

    def all_owned() -> bool:
        try:
            return viewer.look() == (True, everything, everything)
        except ck.KafkaException:
            return False  # a fresh group has no coordinator yet

    wait_until(all_owned)
    member("b")
    dying.wait(60)
    member("a")
    time.sleep(1.0)  # its replacement has to have joined: what is looked for would be there before, too
    wait_until(lambda: viewer.look().settled)
    view = viewer.look()
    assert view.partitions - view.owned, "nothing was left without an owner: is the watch still needed?"
    with GroupWatch(settings, look_seconds=0.1, patience_seconds=2.0) as watch:
        wait_until(all_owned)
        wait_until(lambda: watch.mended == 1)


def test_a_group_that_nobody_is_in_is_left_alone(settings):
    with GroupWatch(settings, look_seconds=0.05, patience_seconds=0.1) as watch:
        time.sleep(1.0)  # nothing happens that could be waited for
    assert watch.mended == 0


LOOKS = """
import sys
import confluent_kafka as ck
from tidemill.config.settings import Settings
from tidemill.sources.membership import GroupViewer
viewer = GroupViewer(Settings.model_validate_json(sys.argv[1]))
while True:
    try:
        print("settled" if viewer.look(1.0).settled else "moving", flush=True)
    except ck.KafkaException as error:
        print("unknown", error, flush=True)
"""


@pytest.mark.long
def test_looking_at_the_group_survives_its_broker(own_kafka, read_member_id):
    broker = own_kafka()
    settings = settings_of(broker)
    read_member_id(settings)("a", "lives")
    arguments = [sys.executable, "-c", LOOKS, settings.model_dump_json(exclude_unset=True)]
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as looks:
        try:
            assert any(line == "settled\n" for line in looks.stdout)
            broker.kill()
            assert any(line.startswith("unknown") for line in looks.stdout)
            time.sleep(3.0)  # several requests time out
            broker.start()
            assert any(line == "settled\n" for line in looks.stdout), looks.wait()
        finally:
            looks.kill()


def test_who_is_in_the_group_is_known_by_its_static_id(settings, member):
    member("a")
    wait_until(lambda: GroupViewer(settings).look().settled)
    assert find_present_members(settings, {"a", "b"}) == {"a"}
