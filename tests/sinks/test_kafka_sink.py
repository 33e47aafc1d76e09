"""The Kafka sink against a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.sections.sink_settings import KafkaSinkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.broker import EmbeddedBroker, free_port
from tidemill.runtime.kafka.producer import Outcomes, Record
from tidemill.sinks.base import WAITS, Sink
from tidemill.sinks.kafka import KafkaSink
from tidemill.sinks.payloads import KafkaPayload
from tidemill.testing.contract import JsonSinkContract, deliver
from tidemill.testing.kafka import consume, unique_name

pytestmark = pytest.mark.kafka

QUICK = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}


def make_sink(bootstrap: str, topic: str, *, wait: float = 5.0, **client_config: Any) -> KafkaSink:
    settings = KafkaSinkSettings(topic=topic, client_config={**QUICK, **client_config})
    return KafkaSink("out", settings, KafkaSettings(brokers=bootstrap), topic_wait_seconds=wait)


async def delivered_at_last(sink: KafkaSink, payload: KafkaPayload) -> None:
    """Try for as long as a broker may need after its start."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(RemoteError):
                assert list(await deliver(sink, [payload])) == [None]
                return


class TestKafkaContract(JsonSinkContract):
    @pytest.fixture(autouse=True)
    def _topic(self, embedded_kafka: EmbeddedBroker) -> None:
        self.bootstrap = embedded_kafka.bootstrap
        self.topic = embedded_kafka.create_topic(unique_name("sink"))

    def make(self) -> Sink:
        return make_sink(self.bootstrap, self.topic)

    def make_unusable(self) -> Sink:
        return make_sink(self.bootstrap, unique_name("missing"), wait=0.0)

    def payload(self, data: Any, key: str = "k") -> Any:
        return KafkaPayload(key=key, data=data)

    def bad_payload(self) -> Any:
        return KafkaPayload(key=5, data=1)  # type: ignore[arg-type]

    def refused_payload(self) -> Any:
        return KafkaPayload(key="bad", data={"n": 666}, partition=99)

    async def received(self, count: int) -> list[bytes]:
        messages = await asyncio.to_thread(consume, self.bootstrap, self.topic, count)
        return [message.value() or b"" for message in messages]


async def test_keys_may_be_text_bytes_or_none_and_no_data_is_a_tombstone(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name("sink"))
    sink = make_sink(embedded_kafka.bootstrap, topic)
    await sink.connect()
    payloads = [KafkaPayload(key="\u00e9", data=1), KafkaPayload(key=b"\xff", data=2), KafkaPayload(data=3)]
    await deliver(sink, [*payloads, KafkaPayload(key="gone", data=None)])
    await sink.close()
    found = [(each.key(), each.value()) for each in consume(embedded_kafka.bootstrap, topic, 4)]
    assert found == [("\u00e9".encode(), b"1"), (b"\xff", b"2"), (None, b"3"), (b"gone", None)]


async def test_a_key_lands_where_javas_clients_would_put_it(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name("sink"), partitions=4)
    sink = make_sink(embedded_kafka.bootstrap, topic)
    await sink.connect()
    # Murmur2 of these keys, as Kafka's own test of its partitioner has them.
    await deliver(sink, [KafkaPayload(key=key, data=0) for key in ("21", "foobar")])
    await sink.close()
    found = {each.key(): each.partition() for each in consume(embedded_kafka.bootstrap, topic, 2)}
    assert found == {b"21": (-973932308 & 0x7FFFFFFF) % 4, b"foobar": (-790332482 & 0x7FFFFFFF) % 4}


async def test_a_missing_topic_is_named_with_what_to_do(embedded_kafka: EmbeddedBroker) -> None:
    topic = unique_name("missing")
    with pytest.raises(ConfigError, match=rf"{topic}.*does not exist.*--create"):
        await make_sink(embedded_kafka.bootstrap, topic, wait=0.0).connect()


async def test_a_topic_that_is_being_created_is_waited_for(embedded_kafka: EmbeddedBroker) -> None:
    topic = unique_name("late")
    sink = make_sink(embedded_kafka.bootstrap, topic)
    connecting = asyncio.ensure_future(sink.connect())
    await asyncio.sleep(0.3)
    assert not connecting.done()
    await asyncio.to_thread(embedded_kafka.create_topic, topic)
    await connecting
    assert list(await deliver(sink, [KafkaPayload(data=1)])) == [None]
    await sink.close()


async def test_no_broker_at_all_is_a_retryable_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.runtime.kafka.client.CALL_SECONDS", 1.0)
    with pytest.raises(RemoteError, match=r"sinks\.kafka\.out: no answer from Kafka") as caught:
        await make_sink(f"127.0.0.1:{free_port()}", "t").connect()
    assert caught.value.retryable


async def test_a_wrong_client_setting_is_named_without_its_secrets(embedded_kafka: EmbeddedBroker) -> None:
    sink = make_sink(embedded_kafka.bootstrap, "t", **{"sasl.password": "hunter2", "no.such.setting": "hunter2"})
    with pytest.raises(ConfigError, match=r"sinks\.kafka\.out: .*no\.such\.setting") as caught:
        await sink.connect()
    assert "hunter2" not in str(caught.value)


async def test_a_payload_larger_than_the_topic_accepts_is_oversize_and_the_others_arrive(
    embedded_kafka: EmbeddedBroker,
) -> None:
    topic = embedded_kafka.create_topic(unique_name("small"), config={"max.message.bytes": "5000"})
    sink = make_sink(embedded_kafka.bootstrap, topic)
    await sink.connect()
    payloads = [KafkaPayload(key=str(n), data="x" * (10_000 if n == 7 else 900)) for n in range(50)]
    answers = await deliver(sink, payloads)
    await sink.close()
    (refusal,) = [answer for answer in answers if answer is not None]
    assert answers[7] is refusal
    assert (refusal.oversize, refusal.retryable) == (True, False)
    assert len(consume(embedded_kafka.bootstrap, topic, 49)) == 49


async def test_only_the_large_payload_of_a_batch_that_the_broker_refuses_is_oversize(
    embedded_kafka: EmbeddedBroker,
) -> None:
    # As when the topic's limit cannot be read: the client itself would send anything, in one batch.
    topic = embedded_kafka.create_topic(unique_name("small"), config={"max.message.bytes": "5000"})
    sink = make_sink(
        embedded_kafka.bootstrap, topic, **{"message.max.bytes": 1_000_000, "batch.size": 1_000_000, "linger.ms": 50}
    )
    await sink.connect()
    answers = await deliver(sink, [KafkaPayload(key=str(n), data="x" * (6_000 if n == 3 else 400)) for n in range(20)])
    assert [index for index, answer in enumerate(answers) if answer is not None] == [3]
    assert answers[3] is not None
    assert answers[3].oversize
    assert list(await deliver(sink, [KafkaPayload(key="k", data="after")])) == [None]
    await sink.close()
    values = [each.value() for each in consume(embedded_kafka.bootstrap, topic, 20)]
    assert values[-1] == b'"after"'


async def test_a_record_that_the_topic_refuses_is_not_retryable_and_makes_no_other_fail(
    embedded_kafka: EmbeddedBroker,
) -> None:
    topic = embedded_kafka.create_topic(unique_name("compact"), config={"cleanup.policy": "compact"})
    sink = make_sink(embedded_kafka.bootstrap, topic, **{"linger.ms": 50})
    await sink.connect()
    bad, good = await deliver(sink, [KafkaPayload(data="no key"), KafkaPayload(key="k", data=1)])
    assert bad is not None
    assert not bad.retryable
    # The broker refused its neighbour in the same batch as well, so each was sent again alone.
    assert good is None
    await sink.close()


async def test_no_record_overtakes_a_refused_one_of_its_key_that_travelled_with_it(
    embedded_kafka: EmbeddedBroker,
) -> None:
    topic = embedded_kafka.create_topic(unique_name("small"), config={"max.message.bytes": "5000"})
    sink = make_sink(
        embedded_kafka.bootstrap, topic, **{"message.max.bytes": 1_000_000, "batch.size": 1_000_000, "linger.ms": 50}
    )
    await sink.connect()
    large = "x" * 6_000
    records = [("a", 1), ("k", large), ("k", 2), ("b", 3), (None, large), (None, 4), ("k", large), ("b", 5)]
    batch = [sink.encode(KafkaPayload(key=key, data=data)) for key, data in records]
    answers = list(await sink.send(batch))
    refused = [index for index, answer in enumerate(answers) if answer is not None and not answer.waits]
    assert refused == [1, 4]
    assert [index for index, answer in enumerate(answers) if answer is WAITS] == [2, 6]
    assert list(await sink.send([batch[2]])) == [None]
    await sink.close()
    assert [each.value() for each in consume(embedded_kafka.bootstrap, topic, 5)] == [b"1", b"3", b"4", b"5", b"2"]


@pytest.mark.parametrize("passing", [ck.KafkaError._MSG_TIMED_OUT, ck.KafkaError.INVALID_RECORD])
async def test_a_record_waits_for_one_of_its_key_that_is_refused_for_whatever_reason(passing: int) -> None:
    sent: list[list[bytes | None]] = []

    class Producer:
        """Refuses a batch as one, and alone what a test says."""

        trouble = None

        async def send(self, topic: str, records: Sequence[Record]) -> Outcomes:
            values = [record[1] for record in records]
            sent.append(values)
            if len(records) == 1:
                return [ck.KafkaError(passing) if values == [b'"first"'] else None]
            return [ck.KafkaError(passing), *[ck.KafkaError(ck.KafkaError.INVALID_RECORD)] * (len(records) - 1)]

    sink = make_sink("localhost:1", "t")
    sink._producer = Producer()  # type: ignore[assignment]
    answers = await deliver(
        sink, [KafkaPayload(key=key, data=data) for key, data in (("k", "first"), ("k", 2), ("b", 3), ("b", 4))]
    )
    assert answers[0] is not None
    assert answers[0].retryable is (passing == ck.KafkaError._MSG_TIMED_OUT)
    assert list(answers[1:]) == [WAITS, None, None]
    assert [b"2"] not in sent


@pytest.mark.long  # tests/deadletters/test_writer.py has it of letters
async def test_while_the_broker_is_down_batches_fail_as_retryable_and_arrive_once_it_is_back(
    own_kafka: Callable[..., EmbeddedBroker],
) -> None:
    broker = own_kafka()
    topic = broker.create_topic("t")
    sink = make_sink(broker.bootstrap, topic, **{"delivery.timeout.ms": 1_000})
    await sink.connect()
    await delivered_at_last(sink, KafkaPayload(key="k", data=0))
    broker.kill()
    started = time.monotonic()
    with pytest.raises(RemoteError, match="topic t: _MSG_TIMED_OUT") as caught:
        await deliver(sink, [KafkaPayload(key="k", data=1)] * 3)
    assert caught.value.retryable
    assert 0.5 < time.monotonic() - started < 5
    await asyncio.to_thread(broker.start)
    await delivered_at_last(sink, KafkaPayload(key="k", data=2))
    await sink.close()
    assert consume(broker.bootstrap, topic, 2)[-1].value() == b"2"


@pytest.mark.long  # test_producer.py has it of the producer
async def test_closing_gives_up_what_the_broker_never_confirmed(own_kafka: Callable[..., EmbeddedBroker]) -> None:
    broker = own_kafka()
    topic = broker.create_topic("t")
    sink = make_sink(broker.bootstrap, topic)
    await sink.connect()
    broker.kill()
    sending = asyncio.ensure_future(deliver(sink, [KafkaPayload(data=1)]))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await sink.close()
        with pytest.raises(RemoteError, match="PURGE"):
            await sending


@pytest.mark.alone
async def test_a_payload_is_confirmed_within_milliseconds(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name("fast"))
    sink = make_sink(embedded_kafka.bootstrap, topic)
    await sink.connect()
    seconds = []
    for number in range(100):
        started = time.perf_counter()
        assert list(await deliver(sink, [KafkaPayload(data=number)])) == [None]
        seconds.append(time.perf_counter() - started)
    await sink.close()
    assert sorted(seconds)[50] < 0.015


def test_credentials_go_only_to_the_brokers_they_belong_to() -> None:
    kafka = KafkaSettings(brokers="a:9092", client_config={"sasl.password": "hunter2", "fetch.min.bytes": 5})
    inherited = KafkaSink("i", KafkaSinkSettings(topic="t"), kafka)
    foreign = KafkaSink("f", KafkaSinkSettings(topic="t", brokers="b:9092"), kafka)
    assert inherited._config["bootstrap.servers"] == "a:9092"
    assert inherited._config["sasl.password"] == "hunter2"
    assert "fetch.min.bytes" not in inherited._config
    assert foreign._config["bootstrap.servers"] == "b:9092"
    assert "sasl.password" not in foreign._config


def test_acknowledgement_by_all_is_not_optional() -> None:
    settings = KafkaSinkSettings(
        topic="t", client_config={"acks": 1, "request.required.acks": 0, "enable.idempotence": False, "linger.ms": 7}
    )
    config = KafkaSink("i", settings, KafkaSettings())._config
    assert (config["acks"], config["enable.idempotence"], config["linger.ms"]) == ("all", True, 7)
    ck.Producer({**config, "log_level": 0})


AT = datetime.datetime(2024, 5, 1, 12, 30, 0, 999_999, tzinfo=datetime.UTC)
AT_MS = 1_714_566_600_999


async def test_headers_partition_and_timestamp_arrive_as_they_were_given(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name("full"), partitions=4)
    sink = make_sink(embedded_kafka.bootstrap, topic)
    await sink.connect()
    before = int(time.time() * 1000)
    pairs = [("trace", b"\xff\x00"), ("trace", "two"), ("null", None), ("empty", b"")]
    payloads = [
        KafkaPayload(key="k", data=1, headers={"a": "\u00e9", "b": b"\xff", "c": None}, partition=3, timestamp=AT),
        KafkaPayload(key="k", data=2, headers=pairs, partition=2, timestamp=AT_MS + 1),
        KafkaPayload(data=3, partition=1),
        KafkaPayload(data=4, partition=0, headers=[]),
        KafkaPayload(key="21", data=5),
    ]
    assert list(await deliver(sink, payloads)) == [None] * 5
    await sink.close()
    found = {each.value(): each for each in consume(embedded_kafka.bootstrap, topic, 5)}
    assert [found[b"%d" % n].partition() for n in (1, 2, 3, 4)] == [3, 2, 1, 0]
    assert found[b"1"].headers() == [("a", "\u00e9".encode()), ("b", b"\xff"), ("c", None)]
    assert found[b"2"].headers() == [("trace", b"\xff\x00"), ("trace", b"two"), ("null", None), ("empty", b"")]
    assert [found[b"%d" % n].timestamp()[1] for n in (1, 2)] == [AT_MS, AT_MS + 1]
    for n in (3, 4, 5):
        assert before <= found[b"%d" % n].timestamp()[1] <= int(time.time() * 1000)
        assert not found[b"%d" % n].headers()


async def test_a_partition_that_is_not_there_is_that_records_own_failure_and_a_new_one_is_found(
    embedded_kafka: EmbeddedBroker,
) -> None:
    topic = embedded_kafka.create_topic(unique_name("grows"), partitions=2)
    sink = make_sink(embedded_kafka.bootstrap, topic)
    await sink.connect()

    def records(*partitions: int | None) -> list[KafkaPayload]:
        return [KafkaPayload(key="k", data=n, partition=n) for n in partitions]

    # The first one is sent before the client knows the topic's partitions.
    for _ in range(2):
        answers = await deliver(sink, records(7, 1, None))
        assert [answer is None for answer in answers] == [False, True, True]
        assert answers[0] is not None
        assert (answers[0].retryable, answers[0].error) == (False, f"topic {topic} has no partition 7")
    (alone,) = await deliver(sink, records(2))
    assert alone is not None
    assert not alone.retryable
    admin = AdminClient({"bootstrap.servers": embedded_kafka.bootstrap})
    admin.create_partitions([NewPartitions(topic, 8)])[topic].result(30)
    async with asyncio.timeout(30):
        while any(await deliver(sink, records(7))):  # until the broker itself has it
            await asyncio.sleep(0.05)
    await sink.close()


async def test_a_timestamp_that_the_topic_refuses_makes_no_other_fail(embedded_kafka: EmbeddedBroker) -> None:
    config = {"message.timestamp.after.max.ms": "3600000"}
    topic = embedded_kafka.create_topic(unique_name("late"), config=config)
    sink = make_sink(embedded_kafka.bootstrap, topic, **{"linger.ms": 50})
    await sink.connect()
    times = [None, 253_402_300_799_000, None, 2**63 - 1, None]
    answers = await deliver(sink, [KafkaPayload(key=f"{n}", data=n, timestamp=each) for n, each in enumerate(times)])
    assert [answer is None for answer in answers] == [True, False, True, False, True]
    assert all(answer is None or not answer.retryable for answer in answers)
    await sink.close()
    assert [each.value() for each in consume(embedded_kafka.bootstrap, topic, 3)] == [b"0", b"2", b"4"]


async def test_where_the_broker_says_which_record_is_invalid_only_later_ones_of_its_key_wait(
    embedded_kafka: EmbeddedBroker,
) -> None:
    topic = embedded_kafka.create_topic(unique_name("late"), config={"message.timestamp.after.max.ms": "3600000"})
    sink = make_sink(embedded_kafka.bootstrap, topic, **{"linger.ms": 50})
    await sink.connect()
    late = 253_402_300_799_000
    given = [("a", None), ("k", None), ("k", late), ("k", None), ("b", late), ("a", None), (None, None)]
    answers = await deliver(sink, [KafkaPayload(key=key, data=n, timestamp=at) for n, (key, at) in enumerate(given)])
    assert [index for index, answer in enumerate(answers) if answer is WAITS] == [3]
    assert [index for index, answer in enumerate(answers) if answer is not None] == [2, 3, 4]
    await sink.close()
    assert [each.value() for each in consume(embedded_kafka.bootstrap, topic, 4)] == [b"0", b"1", b"5", b"6"]


def test_headers_count_as_bytes_and_a_named_partition_orders_what_has_no_key() -> None:
    sink = make_sink("localhost:1", "t")
    plain = sink.encode(KafkaPayload(key="k", data=1))
    headed = sink.encode(KafkaPayload(key="k", data=1, headers={"name": b"x" * 1_000}))
    assert headed.size_bytes == plain.size_bytes + 1_004
    keys = [
        sink.encode(KafkaPayload(key=key, data=1, partition=partition)).key
        for key, partition in ((b"k", 1), (b"k", 2), (None, 1), (None, 1), (None, 2), (None, None))
    ]
    assert keys == [b"k", b"k", 1, 1, 2, None]
