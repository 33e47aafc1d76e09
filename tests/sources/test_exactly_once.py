"""`kafka.exactly_once` over a real broker: what consumers with read_committed see, aborts, fencing, outages."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
from tests.sources.engines import Engines
from tests.sources.kafka_proxy import END_TXN, TXN_OFFSET_COMMIT, Fault, When, proxied_broker
from tests.sources.member import Copy, Transform

from tidemill.config.loading import load_settings
from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError
from tidemill.deadletters.letter import LetterKind, decode_letter
from tidemill.pipeline.handler.models import DeliveryAction
from tidemill.runtime.link.progress import StopReason
from tidemill.sinks.payloads import CollectResult, KafkaPayload
from tidemill.testing.kafka import consume

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]


class Place(Engines):
    """A source topic, a result topic, and the engines between them."""

    def __init__(self, broker: Any, partitions: int = 4, out_partitions: int = 2, **topic_config: str) -> None:
        super().__init__(broker, f"eos-{uuid.uuid4().hex[:8]}", partitions)
        self.session_timeout_ms = 6_000
        self.out = f"{self.topic}-out"
        broker.create_topic(self.out, partitions=out_partitions, config=topic_config or None)

    def settings(self, **more: Any) -> Settings:
        return Settings.model_validate(
            {
                "kafka": {
                    "brokers": self.broker.bootstrap,
                    "source_topic": self.topic,
                    "consumer_group": self.topic,
                    "session_timeout_ms": self.session_timeout_ms,
                    "heartbeat_interval_ms": 500,
                    "exactly_once": True,
                },
                "sinks": {"kafka": {"out": {"topic": self.out}}},
                **more,
            }
        )

    def feed(self, start: int, count: int) -> None:
        producer = ck.Producer({"bootstrap.servers": self.broker.bootstrap, "enable.idempotence": True})
        for n in range(start, start + count):
            producer.produce(self.topic, b"%d" % n, partition=n % self.partitions)
        assert producer.flush(20) == 0

    def visible(self, topic: str | None = None, isolation: str = "read_committed") -> list[bytes]:
        """Return what a consumer sees of a topic from its beginning to its end."""
        topic = topic or self.out
        consumer = ck.Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap,
                "group.id": "audit",
                "isolation.level": isolation,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        partitions = list(consumer.list_topics(topic, timeout=60).topics[topic].partitions)
        consumer.assign([ck.TopicPartition(topic, n, 0) for n in partitions])
        values, ended = [], set()
        deadline = time.monotonic() + 30
        try:
            while len(ended) < len(partitions):
                assert time.monotonic() < deadline, "the topic has no end: a transaction is open"
                record = consumer.poll(1.0)
                if record is None:
                    continue
                if record.error() is None:
                    values.append(record.value())
                elif record.error().code() == ck.KafkaError._PARTITION_EOF:
                    ended.add(record.partition())
        finally:
            consumer.close()
        return values

    def assert_exactly_once(self, count: int) -> None:
        values = [int(value) for value in self.visible()]
        assert sorted(values) == list(range(count))
        for partition in range(self.partitions):
            of_key = [value for value in values if value % self.partitions == partition]
            assert of_key == sorted(of_key), "results of a key came out of order"

    def letters(self) -> list[Any]:
        return [decode_letter(value) for value in self.visible(f"{self.topic}_dlq")]


@pytest.fixture
async def place(embedded_kafka):
    made = Place(embedded_kafka)
    yield made
    await made.end()


@pytest.mark.parametrize(
    # In the short run: rebalances below, which have more to go wrong.
    "handler",
    [Copy, pytest.param(Transform, marks=pytest.mark.nightly)],
)
async def test_each_result_is_seen_once_and_in_order_and_offsets_follow(place, handler):
    place.feed(0, 4_000)
    engine = place.start(handler())
    await place.committed(4_000)
    place.assert_exactly_once(4_000)
    assert engine.outbox.statistics().delivered == 4_000
    assert [summary.reason for summary in await place.end()] == [StopReason.DRAINED]
    place.start(handler())
    place.feed(4_000, 100)
    await place.committed(4_100)
    place.assert_exactly_once(4_100)


async def test_results_wait_until_their_messages_are_in_the_prefix(place):
    gate = asyncio.Event()

    class Held(Copy):
        async def on_task_complete(self, result):
            if result.task.metadata["value"] == "1":
                await gate.wait()
            return await super().on_task_complete(result)

    place.feed(0, 400)
    engine = place.start(Held())
    await place.committed(300)
    await place.until(lambda: engine.progress().messages_done == 399)
    assert sorted(int(value) for value in place.visible()) == [n for n in range(400) if n % 4 != 1]
    assert len(place.visible(isolation="read_uncommitted")) == 300, "something was sent ahead of its messages"
    gate.set()
    await place.committed(400)
    assert sorted(int(value) for value in place.visible()) == list(range(400))


async def test_window_payloads_go_out_with_their_window_and_only_then(place):
    gate = asyncio.Event()

    class Windows(Copy):
        async def on_window_complete(self, results, messages):
            await gate.wait()
            return CollectResult(kafka=[KafkaPayload(key="w", data=b"%d" % -len(messages))])

    place.feed(0, 40)
    engine = place.start(Windows())
    await place.until(lambda: engine.progress().tasks_done == 40)
    await asyncio.sleep(0.5)  # five times as long as a transaction collects
    assert place.visible() == []
    gate.set()
    await place.committed(40)
    values = [int(value) for value in place.visible()]
    assert sorted(value for value in values if value >= 0) == list(range(40))
    assert -sum(value for value in values if value < 0) == 40


class Poison(Copy):
    """Payloads without a key, which a compacted topic refuses with their whole batch, and some that are too large."""

    asked: list[tuple[str, int]]
    answer = DeliveryAction.DLQ

    def __init__(self) -> None:
        self.asked = []

    async def on_task_complete(self, result):
        number = int(result.task.metadata["value"])
        if number == 7:
            return CollectResult(kafka=[KafkaPayload(key="k", data=b"x" * 200_000)])
        key = None if number in (3, 50) else str(number % 4)
        return CollectResult(kafka=[KafkaPayload(key=key, data=b"%d" % number)])

    async def on_delivery_error(self, error):
        self.asked.append((error.error, error.attempt))
        return self.answer


@pytest.fixture
async def picky(embedded_kafka):
    made = Place(embedded_kafka, **{"cleanup.policy": "compact", "max.message.bytes": "100000"})
    yield made
    await made.end()


@pytest.mark.parametrize(
    "answer",
    [
        DeliveryAction.RETRY,  # until it is dead-lettered, too
        DeliveryAction.SKIP,
        pytest.param(DeliveryAction.DLQ, marks=pytest.mark.long),
    ],
)
async def test_what_the_topic_refuses_is_decided_about_and_the_rest_goes_out_once(picky, answer):
    handler = Poison()
    handler.answer = answer
    picky.feed(0, 100)
    engine = picky.start(handler, delivery={"max_retries": 2})
    await picky.committed(100)
    assert sorted(int(value) for value in picky.visible()) == [n for n in range(100) if n not in (3, 7, 50)]
    letters = picky.letters()
    if answer is DeliveryAction.SKIP:
        assert letters == []
        assert engine.outbox.statistics().skipped == 3
    else:
        assert sorted(letter.sources[0].offset * 4 + letter.sources[0].partition for letter in letters) == [3, 7, 50]
        kinds = {letter.sources[0].offset * 4 + letter.sources[0].partition: letter.kind for letter in letters}
        assert kinds == {3: LetterKind.DELIVERY, 7: LetterKind.OVERSIZE, 50: LetterKind.DELIVERY}
        assert engine.letters.statistics().written == 3
    refused = [attempt for error, attempt in handler.asked if "INVALID_RECORD" in error]
    assert max(refused) == (2 if answer is DeliveryAction.RETRY else 1)


async def test_an_innocent_record_of_another_partition_in_a_refused_batch_is_not_blamed(embedded_kafka):
    class Pair(Copy):
        """The results of both messages, the first of them bad, at the same time: one batch, one transaction."""

        both = asyncio.Barrier(2)

        async def on_task_complete(self, result):
            number = int(result.task.metadata["value"])
            await self.both.wait()
            return CollectResult(kafka=[KafkaPayload(key=None if number == 0 else "k", data=b"%d" % number)])

    place = Place(embedded_kafka, partitions=2, out_partitions=1, **{"cleanup.policy": "compact"})
    try:
        place.feed(0, 2)
        place.start(Pair())
        await place.committed(2)
        assert place.visible() == [b"1"]
        assert [letter.sources[0].partition for letter in place.letters()] == [0]
    finally:
        await place.end()


async def test_headers_partition_and_timestamp_go_out_with_the_transaction_and_a_missing_partition_is_dead_lettered(
    place,
):
    at = 1_714_566_600_999

    class Whole(Copy):
        """Message 5 names a partition that is not there."""

        async def on_task_complete(self, result):
            number = int(result.task.metadata["value"])
            partition = 99 if number == 5 else number % 2
            payload = KafkaPayload(
                key="k",
                data=b"%d" % number,
                headers={"n": b"%d\xff" % number},
                partition=partition,
                timestamp=at + number,
            )
            return CollectResult(kafka=[payload])

    place.feed(0, 40)
    place.start(Whole())
    await place.committed(40)
    assert sorted(int(value) for value in place.visible()) == [n for n in range(40) if n != 5]
    # Each transaction leaves a marker, which is not a message.
    for each in consume(place.broker.bootstrap, place.out, 39):
        number = int(each.value())
        assert each.partition() == number % 2
        assert each.headers() == [("n", b"%d\xff" % number)]
        assert each.timestamp()[1] == at + number
    (letter,) = place.letters()
    assert "_UNKNOWN_PARTITION" in letter.error


async def test_letters_go_out_with_the_offsets_of_their_messages(place):
    class Failing(Copy):
        async def on_task_complete(self, result):
            if int(result.task.metadata["value"]) % 10 == 0:
                raise ValueError("no")
            return await super().on_task_complete(result)

    place.feed(0, 200)
    place.start(Failing())
    await place.committed(200)
    letters = place.letters()
    assert len(letters) == 20
    assert {letter.kind for letter in letters} == {LetterKind.HOOK}
    assert len(place.visible()) == 180


@pytest.mark.parametrize(
    # In the short run: results of tasks go out once above, and in the revoke and the replacement below.
    "handler",
    [pytest.param(Copy, marks=pytest.mark.nightly), Transform],
)
async def test_rebalances_in_a_row_under_load_repeat_nothing(place, handler):
    place.feed(0, 2_000)
    first = place.start(handler(), "w1")
    await place.until(lambda: first.commits.statistics().committed)
    second = place.start(handler(), "w2")
    await place.until(lambda: second.intake.partitions)
    place.feed(2_000, 2_000)
    third = place.start(handler(), "w3")
    await place.until(lambda: third.intake.partitions)
    place.feed(4_000, 1_000)
    second.drain()
    place.feed(5_000, 1_000)
    await place.committed(6_000, 60)
    place.assert_exactly_once(6_000)


async def test_a_replacement_fences_the_zombie_and_nothing_is_seen_twice(place):
    place.feed(0, 1_000)
    zombie = place.start(Copy())
    await place.until(lambda: zombie.commits.statistics().committed)
    place.feed(1_000, 3_000)
    replacement = place.start(Copy())
    summary = await asyncio.wait_for(place.tasks[0], 30)
    assert summary.reason is StopReason.FENCED
    place.feed(4_000, 400)
    await place.until(lambda: replacement.commits.statistics().committed)
    await place.committed(4_400)
    place.assert_exactly_once(4_400)


async def test_what_a_killed_engine_left_open_is_aborted_before_its_successor_reads(place):
    config = {
        "bootstrap.servers": place.broker.bootstrap,
        "transactional.id": f"{place.topic}.w.0",
        "transaction.timeout.ms": 60_000,
    }
    dead = ck.Producer(config)
    await asyncio.to_thread(dead.init_transactions, 20)
    dead.begin_transaction()
    dead.produce(place.out, b"999999")
    dead.flush(10)
    place.feed(0, 100)
    place.start(Copy())
    await place.committed(100)
    place.assert_exactly_once(100)
    with pytest.raises(ck.KafkaException):
        dead.commit_transaction(10)


async def test_a_revoke_ends_the_last_transaction_of_its_partitions_first(place):
    class Slow(Copy):
        async def on_task_complete(self, result):
            await asyncio.sleep(0.3)
            return await super().on_task_complete(result)

    place.feed(0, 200)
    first = place.start(Slow(), "w1")
    await place.until(lambda: first.progress().tasks_done > 20)
    second = place.start(Slow(), "w2")
    await place.until(lambda: second.intake.partitions)
    await place.committed(200)
    place.assert_exactly_once(200)
    owners = [len(engine.intake.partitions) for engine in (first, second)]
    assert owners == [2, 2]


@pytest.mark.parametrize("hang_seconds", [1.5, pytest.param(2.0, marks=pytest.mark.nightly)])
async def test_offsets_of_an_aborted_transaction_that_arrive_late_do_not_count_for_the_next(
    own_kafka, monkeypatch, hang_seconds
):
    monkeypatch.setattr("tidemill.sources.transactional_producer.HANG_SECONDS", hang_seconds)
    broker, (proxy,) = proxied_broker(own_kafka, 1)
    place = Place(broker, partitions=1)

    def judge(api: int) -> Fault | None:
        # The first offsets arrive after those of the next transaction, and before its end.
        first = api == TXN_OFFSET_COMMIT and proxy.seen[TXN_OFFSET_COMMIT] == 1
        behind = api == END_TXN and proxy.seen[TXN_OFFSET_COMMIT] == 2
        return Fault(When.REQUEST, 60.0) if first or behind else None

    proxy.judge = judge
    try:
        place.feed(0, 100)
        place.start(Copy(), kafka={**place.settings().kafka.model_dump(), "brokers": proxy.address})
        await place.until(lambda: proxy.seen[TXN_OFFSET_COMMIT] == 1)
        place.feed(100, 100)
        await place.until(lambda: proxy.waiting(END_TXN))
        proxy.release(TXN_OFFSET_COMMIT)
        await place.until(lambda: proxy.passed[TXN_OFFSET_COMMIT] == 2)
        proxy.calm()
        await place.committed(200)
        place.assert_exactly_once(200)
        consumer = ck.Consumer({"bootstrap.servers": broker.bootstrap, "group.id": place.topic})
        (position,) = consumer.committed([ck.TopicPartition(place.topic, 0)], timeout=60)
        consumer.close()
        assert position.offset == 200, "the offset moved back"
    finally:
        await place.end()
        proxy.close()


@pytest.mark.long  # tests/sinks and tests/deadletters have brokers that go away, without transactions
@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.nightly), "kill"])
async def test_a_broker_that_restarts_delays_transactions_and_repeats_nothing(own_kafka, how):
    broker = own_kafka()
    place = Place(broker)
    place.session_timeout_ms = 45_000  # a lone broker needs five seconds to come back from a crash
    try:
        place.feed(0, 2_000)
        engine = place.start(Copy())
        # A lone broker that is killed between its word on a commit and its mark in the topic forgets the commit (a
        # plain producer shows it too), so what is out already has to be visible before.
        await place.committed(2_000)
        place.assert_exactly_once(2_000)
        place.feed(2_000, 2_000)
        await asyncio.to_thread(getattr(broker, how))
        await place.until(lambda: engine.source.describe_wait())
        await asyncio.to_thread(broker.start)
        await asyncio.to_thread(place.feed, 4_000, 2_000)
        await place.committed(6_000, 60)
        place.assert_exactly_once(6_000)
        assert not place.tasks[0].done()
        broker.kill()
        (summary,) = await place.end()
        assert summary.reason is StopReason.DRAINED, "one that waits for its transactions can be stopped"
    finally:
        await place.end()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"sinks": {"filesystem": {"f": {"base_path": "x"}}}}, r"sinks\.filesystem\.f is not a Kafka sink"),
        ({"dlq": {"on_send_failure": "drop"}}, r"dlq\.on_send_failure is drop"),
        ({"sinks": {"kafka": {"o": {"topic": "o", "brokers": "other:1"}}}}, r"sinks\.kafka\.o is on other brokers"),
        ({"dlq": {"brokers": "other:1"}}, r"dlq is on other brokers \(other:1\)"),
        (
            {"sinks": {"kafka": {"a": {"topic": "a"}, "b": {"topic": "b", "client_config": {"linger.ms": 1}}}}},
            r"sinks\.kafka\.b has a different client_config from sinks\.kafka\.a",
        ),
        ({"kafka": {"client_config": {"isolation.level": "read_uncommitted"}}}, r"isolation\.level read_uncommitted"),
    ],
)
def test_what_cannot_be_in_one_transaction_is_refused_at_the_start(tmp_path: Path, more: Any, text: str) -> None:
    config = {"sinks": {"kafka": {"out": {"topic": "out"}}}, **more}
    config["kafka"] = {"exactly_once": True, **more.get("kafka", {})}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=text) as caught:
        load_settings(tmp_path / "c.yaml", environ={})
    assert "kafka.exactly_once" in str(caught.value)


def test_the_same_brokers_by_name_are_the_same() -> None:
    sinks = {"kafka": {"out": {"topic": "out", "brokers": "b:1"}}}
    kafka = {"exactly_once": True, "brokers": "b:1"}
    assert Settings.model_validate({"kafka": kafka, "sinks": sinks, "dlq": {"brokers": "b:1"}}).kafka.exactly_once
