"""The trigger for messages of a Kafka topic, over a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import confluent_kafka as ck
import pytest
from tests.triggers.builtin.triggers_contract import first, made_again
from tests.until import until

from tidemill.core.errors import ConfigError
from tidemill.deadletters.letter import LetterKind, decode_letter
from tidemill.testing.kafka import committed_offsets, consume, produce, unique_name, wait_for_committed
from tidemill.triggers.base import TriggerEvent
from tidemill.triggers.builtin.kafka import KafkaTrigger
from tidemill.triggers.producers.kafka import kafka_claim
from tidemill.triggers.shared_stream import SharedStreamManager, route


class Topic:
    """A topic, triggers that share it, and what they fired and stored."""

    def __init__(self, broker: Any) -> None:
        self.bootstrap = broker.bootstrap
        self.name = unique_name("t")
        broker.create_topic(self.name, partitions=2)
        self.manager = SharedStreamManager()
        self.fired: dict[int, list[TriggerEvent]] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.store = asyncio.Event()
        self.store.set()

    def produce(self, *values: bytes, key: bytes | None = None, partition: int = 0) -> None:
        produce(self.bootstrap, self.name, values, key=key, partition=partition)

    def trigger(self, **kwargs: Any) -> KafkaTrigger:
        return KafkaTrigger(self.name, brokers=self.bootstrap, group=self.name, **kwargs)

    def start(self, **kwargs: Any) -> list[TriggerEvent]:
        number = len(self.tasks)
        self.fired[number] = []
        self.tasks.append(asyncio.ensure_future(self._run(number, self.trigger(**kwargs))))
        return self.fired[number]

    async def _run(self, number: int, trigger: KafkaTrigger) -> None:
        """Do what a host does: number each event, store it, then confirm it."""
        routed = route(self.manager, number, trigger)
        async for event in routed.events:
            assert routed.key is not None
            seq = self.manager.bind_pending_event(trigger_id=number, key=routed.key)
            await self.store.wait()
            self.fired[number].append(event)
            if seq is not None:
                self.manager.confirm_persisted([seq])

    async def until(self, condition: Callable[[], Any]) -> None:
        def met() -> Any:
            for task in self.tasks:
                if task.done():
                    task.result()
            return condition()

        await until(met)

    async def committed(self, total: int) -> None:
        await asyncio.to_thread(wait_for_committed, self.bootstrap, self.name, self.name, total, timeout_seconds=20)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.manager.stop_all()


@pytest.fixture
async def topic(embedded_kafka: Any) -> AsyncIterator[Topic]:
    made = Topic(embedded_kafka)
    yield made
    await made.close()


async def test_triggers_of_one_topic_and_group_share_a_consumer_and_select_for_themselves(topic):
    topic.produce(b'{"n": 1}', b'{"n": 2}', key=b"a")
    topic.produce(b'{"n": 3}', b"tide", key=b"b", partition=1)
    everything, large, of_b = (
        topic.start(),
        topic.start(where={"n": {"ge": 2}}, value_format="json"),
        topic.start(key="b"),
    )
    await topic.committed(4)
    assert len(topic.manager.report()) == 1
    assert len(everything) == 4
    assert sorted(event.payload["value"]["n"] for event in large) == [2, 3]
    assert [event.payload["value"] for event in of_b] == ['{"n": 3}', "tide"]


async def test_what_is_fired_and_its_identity_say_where_it_came_from(topic):
    producer = ck.Producer({"bootstrap.servers": topic.bootstrap})
    producer.produce(
        topic.name, b"\xff", b"k", headers=[("h", b"1"), ("n", None)], timestamp=1_700_000_000_123, partition=1
    )
    producer.flush(10)
    (event,) = await first(topic.trigger(), 1)
    assert event.payload == {
        "topic": topic.name,
        "partition": 1,
        "offset": 0,
        "timestamp": 1_700_000_000_123,
        "key": "k",
        "headers": [["h", "1"], ["n", None]],
        "value": {"base64": "/w=="},
    }
    assert event.identity == f"{topic.name}/1/0@1700000000123"


async def test_nothing_is_committed_before_what_was_fired_is_stored(topic):
    topic.store.clear()
    topic.produce(b"1", b"2")
    fired = topic.start()
    await topic.until(lambda: any(report.outstanding for report in topic.manager.report()))
    await asyncio.sleep(0.2)
    assert committed_offsets(topic.bootstrap, topic.name, topic.name)[0] <= 0
    topic.store.set()
    await topic.committed(2)
    assert len(fired) == 2


async def test_a_value_that_is_not_json_is_skipped_or_rejected_as_configured(topic):
    topic.produce(b"{", b'{"a": 1}')
    skipping, rejecting = topic.start(where={"a": 1}), topic.start(value_format="json", on_invalid="reject")
    await topic.committed(2)
    assert len(skipping) == len(rejecting) == 1
    (message,) = await asyncio.to_thread(consume, topic.bootstrap, f"{topic.name}_dlq", 1)
    assert decode_letter(message.value()).kind is LetterKind.REJECTED


async def test_the_same_message_has_the_same_identity_when_it_comes_again(topic):
    topic.produce(b"1")
    (one,) = await first(topic.trigger(), 1)
    (other,) = await first(topic.trigger(), 1)
    assert one.identity == other.identity


async def test_a_trigger_that_selects_otherwise_under_the_same_name_has_events_of_its_own(topic):
    topic.produce(b'{"a": 1}')
    plain, first_one, same, other, applied, read = [
        (await first(topic.trigger(**kwargs), 1))[0].identity
        for kwargs in (
            {},
            {"where": {"a": 1, "b": {"exists": False}}},
            {"where": {"b": {"exists": False}, "a": 1}, "on_invalid": "reject"},
            {"where": {"a": {"ge": 1}}},
            {"apply": "builtins.bool"},
            {"value_format": "json"},
        )
    ]
    assert first_one == same
    assert len({plain, first_one, other, applied, read}) == 5
    assert "#" not in plain
    assert all(identity.startswith(f"{plain}#") for identity in (first_one, other, applied, read))


async def test_secrets_of_the_client_come_from_the_environment_and_are_in_no_key(topic, monkeypatch):
    trigger = topic.trigger(client_config={"client.id": {"env": "CLIENT"}, "sasl.password": "hunter2"})
    assert "hunter2" not in f"{trigger!r} {trigger.shared_stream_key()}"
    with pytest.raises(ConfigError, match=r"client\.id comes from the environment variable CLIENT"):
        KafkaTrigger.create_shared_stream_producer(trigger.serialize()[1])
    monkeypatch.setenv("CLIENT", "tide")
    topic.produce(b"1")
    await first(topic.trigger(client_config={"client.id": {"env": "CLIENT"}}), 1)


def test_it_is_created_again_as_it_was():
    made_again(KafkaTrigger("t"))
    one = KafkaTrigger(
        "t",
        brokers="h:1",
        group="g",
        apply="json.dumps",
        key=("a", "b"),
        where={"a": [1]},
        value_format="json",
        on_invalid="reject",
        dlq_topic="d",
        max_redeliveries=0,
        client_config={"client.id": "x"},
    )
    assert made_again(one).shared_stream_key() == one.shared_stream_key()  # type: ignore[attr-defined]
    assert one.shared_stream_key() == KafkaTrigger("t", brokers="h:1", group="g").shared_stream_key()
    assert one.shared_stream_key() != KafkaTrigger("t", brokers="h:1", group="h").shared_stream_key()


def test_its_claim_is_topic_and_group_whatever_else_it_is_given():
    one = KafkaTrigger("orders", group="g", brokers="h:1", where={"a": 1})
    assert one.upstream_claim() == KafkaTrigger("orders", group="g").upstream_claim() == kafka_claim("orders", "g")
    assert one.upstream_claim() != KafkaTrigger("orders", group="h").upstream_claim()


@pytest.mark.parametrize(
    ("topic_name", "kwargs"),
    [
        ("a topic", {}),
        ("t", {"group": "a group"}),
        ("t", {"client_config": {"enable.auto.commit": True}}),
        ("t", {"max_redeliveries": -1}),
        ("t", {"dlq_topic": "a topic"}),
    ],
)
def test_arguments_that_make_no_sense_are_refused(topic_name, kwargs):
    with pytest.raises(ValueError, match=r"is not a valid topic name|is not a usable group name|(cannot|must not) be"):
        KafkaTrigger(topic_name, **kwargs)
