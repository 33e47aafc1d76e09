"""The producer of a loop against a real broker: every record has one outcome, whatever happens."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.errors import ConfigError
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.kafka.producer import LoopProducer, is_too_large, make_producer_config, worth_retrying
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.testing.kafka import consume, unique_name

pytestmark = pytest.mark.kafka


def make_producer(bootstrap: str, **overrides: Any) -> LoopProducer:
    return LoopProducer(make_producer_config(KafkaSettings(brokers=bootstrap), "", overrides), "test")


async def test_every_record_of_a_round_is_confirmed_and_in_order(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    producer = make_producer(embedded_kafka.bootstrap)
    producer.open()
    rounds = [producer.send(topic, [(b"k", b"%d" % (r * 1000 + n)) for n in range(1000)]) for r in range(5)]
    assert await asyncio.gather(*rounds) == [[None] * 1000] * 5
    assert await producer.send(topic, []) == []
    await producer.close()
    values = [int(each.value() or b"") for each in consume(embedded_kafka.bootstrap, topic, 5000)]
    assert values == list(range(5000))


async def test_the_loop_hears_at_most_once_of_a_round(
    embedded_kafka: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    producer = make_producer(embedded_kafka.bootstrap)
    producer.open()
    await producer.send(topic, [(None, b"warm")])
    loop = asyncio.get_running_loop()
    calls = []
    real = loop.call_soon_threadsafe

    def counted(callback: Callable[..., Any], *args: Any, **options: Any) -> asyncio.Handle:
        calls.append(callback)
        return real(callback, *args, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    assert await producer.send(topic, [(None, b"x")] * 5000) == [None] * 5000
    # None: all records were confirmed before the last one was handed over.
    assert len(calls) <= 1
    await producer.close()


async def test_a_record_over_the_clients_limit_fails_alone(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    producer = make_producer(embedded_kafka.bootstrap, **{"message.max.bytes": 2000})
    producer.open()
    first, second, third = await producer.send(topic, [(None, b"a"), (None, b"x" * 3000), (None, b"c")])
    assert (first, third) == (None, None)
    assert second is not None
    assert is_too_large(second)
    assert not worth_retrying(second)
    (only,) = await producer.send(topic, [(None, b"x" * 3000)])
    assert only is not None
    await producer.close()


async def test_a_full_queue_is_an_outcome(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    producer = make_producer(embedded_kafka.bootstrap, **{"queue.buffering.max.messages": 10, "linger.ms": 100})
    producer.open()
    outcomes = await producer.send(topic, [(None, b"x")] * 50)
    codes = {error.code() for error in outcomes if error is not None}
    assert codes == {ck.KafkaError._QUEUE_FULL}
    assert sum(error is None for error in outcomes) >= 10
    assert all(worth_retrying(error) for error in outcomes if error is not None)
    await producer.close()


async def test_a_topic_that_does_not_exist_is_worth_retrying(embedded_kafka: EmbeddedBroker) -> None:
    overrides = {"delivery.timeout.ms": 1000, "topic.metadata.propagation.max.ms": 100}
    producer = make_producer(embedded_kafka.bootstrap, **overrides)
    producer.open()
    (error,) = await producer.send(unique_name("missing"), [(None, b"x")])
    assert error is not None
    assert worth_retrying(error)
    await producer.close()


async def test_after_a_fatal_error_a_new_producer_takes_over(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    producer = make_producer(embedded_kafka.bootstrap, **{"linger.ms": 200})
    producer.open()
    assert await producer.send(topic, [(None, b"1")]) == [None]
    waiting = producer.send(topic, [(None, b"2")])
    broken = producer._producer
    raise_fatal_error(broken)
    async with asyncio.timeout(30):
        (error,) = await waiting
        while producer._producer is broken:
            outcomes = await producer.send(topic, [(None, b"3")])
            assert outcomes == [None] or worth_retrying(outcomes[0])  # type: ignore[arg-type]
            await asyncio.sleep(0.01)
    assert error is None or worth_retrying(error)
    assert await producer.send(topic, [(None, b"4")]) == [None]
    assert producer.trouble is None
    await producer.close()


def raise_fatal_error(producer: ck.Producer) -> None:
    """Let librdkafka run into a fatal error, by its own test hook."""
    (library,) = (Path(ck.__file__).parent.parent / "confluent_kafka.libs").glob("librdkafka*")
    # The first field of the extension's object is the client's handle.
    handle = ctypes.c_void_p.from_address(id(producer) + object.__basicsize__)
    test_fatal_error = ctypes.CDLL(str(library)).rd_kafka_test_fatal_error
    test_fatal_error(handle, ck.KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, b"by the test")


async def test_closing_gives_every_record_an_outcome(own_kafka: Callable[..., EmbeddedBroker]) -> None:
    broker = own_kafka()
    topic = broker.create_topic("t")
    producer = make_producer(broker.bootstrap)
    producer.open()
    assert await producer.send(topic, [(None, b"1")]) == [None]
    broker.kill()
    waiting = producer.send(topic, [(None, b"2")] * 10)
    async with asyncio.timeout(30):
        await producer.close()
        outcomes = await waiting
    assert all(error is not None and worth_retrying(error) for error in outcomes)
    await producer.close()
    (late,) = await producer.send(topic, [(None, b"3")])
    assert late is not None


async def test_closing_with_time_flushes_first(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    producer = make_producer(embedded_kafka.bootstrap, **{"linger.ms": 500})
    producer.open()
    waiting = producer.send(topic, [(None, b"1")])
    await producer.close(flush_seconds=5.0)
    assert await waiting == [None]


async def test_closing_before_opening_does_nothing() -> None:
    await make_producer("127.0.0.1:1").close()


async def test_a_bad_configuration_is_named_and_its_secrets_are_not() -> None:
    producer = make_producer("127.0.0.1:1", **{"sasl.password": "hunter2", "linger.ms": "hunter2"})
    with pytest.raises(ConfigError, match=r"test: bad Kafka client configuration.*queue\.buffering\.max\.ms") as caught:
        producer.open()
    assert "hunter2" not in str(caught.value)


def test_aliases_of_librdkafka_override_our_defaults() -> None:
    overrides = {"queue.buffering.max.ms": 3, "message.timeout.ms": 4000, "request.required.acks": 1}
    config = make_producer_config(KafkaSettings(), "", overrides)
    assert (config["linger.ms"], config["delivery.timeout.ms"], config["acks"]) == (3, 4000, "all")
    assert not set(overrides) & set(config)


async def test_the_end_of_a_producers_thread_is_told_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(producer: LoopProducer) -> None:
        raise ConfigError("no room for another thread")

    monkeypatch.setattr(LoopProducer, "_hand_over", broken)
    told: asyncio.Queue[str] = asyncio.Queue()
    tasks = EngineTasks(told.put_nowait)
    tasks.watch()
    producer = make_producer("127.0.0.1:1")
    producer.open()
    text = await asyncio.wait_for(told.get(), 30)
    assert "the thread of the Kafka producer of test ended: ConfigError: no room for another thread" in text
    tasks.close()
    await producer.close()
