"""A topic that is deleted and created again: its first messages are read, whatever offsets were before."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
import structlog
from confluent_kafka.admin import AdminClient
from tests.jsonl import read_lines
from tests.sources.engines import Engines
from tests.until import until, wait_until

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.core.topic_identity import split_mark
from tidemill.deadletters.letter import Letter, LetterKind, describe_sources, encode_letter
from tidemill.deadletters.opening import open_letters
from tidemill.deadletters.reader import FoundLetter
from tidemill.deadletters.redrive.history import read_history
from tidemill.deadletters.redrive.run import Redrive, RedriveOrder
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.kafka.topic_ids import TopicIds
from tidemill.sinks.payloads import FilePayload, KafkaPayload
from tidemill.sources.ranges import RangeReader
from tidemill.spark.bounded.plan import check_still_there, make_plan
from tidemill.testing.kafka import consume, produce, unique_name
from tidemill.triggers.producers.kafka import KafkaStreamProducer
from tidemill.triggers.shared_stream import AdvanceItem, AdvanceOutcome


class Copy(Handler[Any, Any]):
    """Every message into a file."""

    async def transform(self, messages):
        return [FilePayload(path="out", data={"value": m.value.decode()}) for m in messages]


def list_ids(broker: Any, topic: str) -> str:
    client = AdminClient({"bootstrap.servers": broker.bootstrap})
    found = client.describe_topics(ck.TopicCollection([topic]), request_timeout=60)[topic]
    return str(found.result(61).topic_id)


def recreate(broker: Any, topic: str, values: list[bytes], partitions: int = 1) -> None:
    """Delete a topic, create it again, and fill it, as fast as the broker does it."""
    client = AdminClient({"bootstrap.servers": broker.bootstrap})
    before = list_ids(broker, topic)
    client.delete_topics([topic])[topic].result(10)

    def create() -> bool:
        try:
            broker.create_topic(topic, partitions=partitions)
            return list_ids(broker, topic) != before
        except Exception:  # the old one is still on its way out
            return False

    wait_until(create)
    for partition in range(partitions):
        produce(broker.bootstrap, topic, values[partition::partitions], partition=partition)


def read_positions(broker: Any, group: str, topic: str) -> list[ck.TopicPartition]:
    consumer = ck.Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    try:
        return consumer.committed([ck.TopicPartition(topic, 0)], timeout=60)
    except ck.KafkaException:  # the broker is still loading the group
        return [ck.TopicPartition(topic, 0)]
    finally:
        consumer.close()


def write_position(broker: Any, group: str, position: ck.TopicPartition) -> None:
    """Commit as a process whose request arrives after the deletion."""
    consumer = ck.Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    try:
        consumer.commit(offsets=[position], asynchronous=False)
    finally:
        consumer.close()


class Place(Engines):
    """One topic and the engines that read it."""

    def __init__(self, broker: Any, folder: Path) -> None:
        super().__init__(broker, f"r-{uuid.uuid4().hex[:8]}", 1)
        self.folder = folder

    def settings(self, **more: Any) -> Settings:
        kafka = {
            "brokers": self.broker.bootstrap,
            "source_topic": self.topic,
            "consumer_group": self.topic,
            "session_timeout_ms": 6000,
            "heartbeat_interval_ms": 500,
            **more.pop("kafka", {}),
        }
        sinks = more.pop("sinks", {"filesystem": {"out": {"base_path": str(self.folder)}}})
        return Settings.model_validate({"kafka": kafka, "sinks": sinks, **more})

    def feed(self, values: list[bytes]) -> None:
        produce(self.broker.bootstrap, self.topic, values, partition=0)

    def values(self) -> Counter[str]:
        path = self.folder / "out"
        return Counter(line["value"] for line in read_lines(path)) if path.exists() else Counter()

    def committed(self) -> tuple[int, str | None]:
        """Return the committed offset, and the id beside it."""
        (found,) = read_positions(self.broker, self.topic, self.topic)
        return found.offset, split_mark(found.metadata or "")[0]

    def metadata(self) -> str:
        (found,) = read_positions(self.broker, self.topic, self.topic)
        return found.metadata or ""

    def commit(self, offset: int, metadata: str) -> None:
        write_position(self.broker, self.topic, ck.TopicPartition(self.topic, 0, offset, metadata))

    async def until_committed(self, offset: int) -> None:
        expected = (offset, list_ids(self.broker, self.topic))
        await until(lambda: self.committed() == expected)


@pytest.fixture
async def place(embedded_kafka, tmp_path):
    made = Place(embedded_kafka, tmp_path)
    yield made
    await made.end()


def numbers(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix}{n}".encode() for n in range(count)]


async def all_there(place: Place, prefix: str, count: int) -> None:
    wanted = {f"{prefix}{n}" for n in range(count)}
    await place.until(lambda: wanted <= place.values().keys())


@pytest.mark.parametrize("count", [500, 100, 30], ids=["longer", "as long", "shorter"])
async def test_a_topic_that_is_recreated_while_it_is_read_loses_no_message(place: Place, count: int) -> None:
    place.feed(numbers("old", 100))
    engine = place.start(Copy())
    await place.until_committed(100)
    await asyncio.to_thread(recreate, place.broker, place.topic, numbers("new", count))
    await all_there(place, "new", count)
    await place.until_committed(count)
    assert place.values()["old0"] == 1
    assert engine.progress().recreated_partitions <= 1


@pytest.mark.parametrize("count", [500, 100, 30], ids=["longer", "as long", "shorter"])
async def test_a_topic_that_is_recreated_while_nobody_reads_it_is_read_from_its_beginning(
    place: Place, count: int
) -> None:
    """A commit that arrives after the deletion is kept for the new topic: the group's offset outlives the topic."""
    place.feed(numbers("old", 100))
    place.start(Copy())
    await place.until_committed(100)
    old = place.metadata()
    await place.end()
    place.tasks, place.engines = [], []
    await asyncio.to_thread(recreate, place.broker, place.topic, numbers("new", count))
    place.commit(100, old)
    engine = place.start(Copy())
    await all_there(place, "new", count)
    await place.until_committed(count)
    assert engine.progress().recreated_partitions == 1


async def test_what_runs_for_the_old_topic_is_finished_and_not_committed_for_the_new_one(place: Place) -> None:
    started, released = asyncio.Event(), asyncio.Event()

    class Slow(Copy):
        async def transform(self, messages):
            if any(m.value == b"old99" for m in messages):
                started.set()
                await released.wait()
            return await super().transform(messages)

    place.feed(numbers("old", 100))
    place.start(Slow())
    await asyncio.wait_for(started.wait(), 30)
    await asyncio.to_thread(recreate, place.broker, place.topic, numbers("new", 300))
    released.set()
    await all_there(place, "new", 300)
    await place.until_committed(300)
    assert place.values()["old99"] == 1


async def test_with_transactions_the_results_of_both_topics_go_out(place: Place) -> None:
    out = place.broker.create_topic(f"{place.topic}-out")

    class Send(Handler[Any, Any]):
        async def transform(self, messages):
            return [KafkaPayload(data=m.value.decode()) for m in messages]

    more = {"kafka": {"exactly_once": True}, "sinks": {"kafka": {"out": {"topic": out}}}}
    place.feed(numbers("old", 100))
    place.start(Send(), **more)
    await place.until_committed(100)
    await asyncio.to_thread(recreate, place.broker, place.topic, numbers("new", 300))
    await place.until_committed(300)
    found = await asyncio.to_thread(consume, place.broker.bootstrap, out, 400)
    sent = {json.loads(message.value() or b"") for message in found}
    assert sent == {each.decode() for each in [*numbers("old", 100), *numbers("new", 300)]}


async def test_offsets_that_a_user_has_set_are_used_as_they_are(place: Place) -> None:
    place.feed(numbers("m", 100))
    place.commit(60, "")
    engine = place.start(Copy())
    await place.until_committed(100)
    assert sorted(place.values()) == sorted(f"m{n}" for n in range(60, 100))
    assert engine.progress().recreated_partitions == 0


# -- triggers, backfills and redrives ----------------------------------------------------------------------------


async def test_a_stream_of_triggers_reads_the_new_topic_whatever_was_clean_of_the_old_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_ID", "host")

    async def take(count: int) -> list[SourceMessage]:
        """Read as many messages, accept all but the first, and end the stream."""
        producer = KafkaStreamProducer(place.settings())
        producer.subscriber_joined("t")
        given = []
        async with asyncio.timeout(60):
            async for message, event in producer.open_stream():
                given.append(message)
                if len(given) > 1:
                    await producer.advance([AdvanceItem(event, AdvanceOutcome(1, 0, 0))])
                if len(given) == count:
                    break
        await producer.aclose()
        return given

    place.feed(numbers("old", 100))
    assert len(await take(100)) == 100
    old = place.metadata()
    assert "tidemill1;0;;1+99" in old, "beside the offset of the first message is that all others are done"
    await asyncio.to_thread(recreate, place.broker, place.topic, numbers("new", 120))
    place.commit(0, old)
    assert [m.value for m in await take(120)] == numbers("new", 120)


def test_ranges_are_not_read_from_another_topic_of_the_same_name(embedded_kafka: Any) -> None:
    topic = embedded_kafka.create_topic(unique_name("ranges"))
    produce(embedded_kafka.bootstrap, topic, numbers("old", 100))
    settings = Settings.model_validate({"kafka": {"brokers": embedded_kafka.bootstrap, "source_topic": topic}})
    plan = make_plan(settings, "earliest", "latest", lambda count: count, whole=True)
    assert plan.topic_id == list_ids(embedded_kafka, topic)
    check_still_there(settings, plan.pieces, plan.topic_id)

    recreate(embedded_kafka, topic, numbers("new", 200))

    with pytest.raises(RemoteError, match="was recreated"):
        check_still_there(settings, plan.pieces, plan.topic_id)
    reader = RangeReader(settings.kafka, plan.pieces, plan.topic_id)
    reader.open()
    try:
        with pytest.raises(RemoteError, match=r"was recreated since.*another folder"):
            while reader.read() is not None:
                pass
    finally:
        reader.close()


def test_a_redrive_starts_over_where_the_dead_letter_topic_is_another_one(embedded_kafka: Any) -> None:
    topic = embedded_kafka.create_topic(unique_name("in"))
    dlq = embedded_kafka.create_topic(f"{topic}_dlq")
    config = {"kafka": {"brokers": embedded_kafka.bootstrap, "source_topic": topic}}
    settings = Settings.model_validate(config)

    def letters(count: int, start: int) -> list[bytes]:
        return [
            encode_letter(
                Letter(
                    kind=LetterKind.TASK,
                    error="e",
                    sources=describe_sources([SourceMessage(topic, 0, n, None, b"%d" % n)]),
                )
            )
            for n in range(start, start + count)
        ]

    produce(embedded_kafka.bootstrap, dlq, letters(5, 0))
    assert Redrive(settings, RedriveOrder()).run().sent == 5
    assert Redrive(settings, RedriveOrder()).run().sent == 0
    name = Redrive(settings, RedriveOrder()).name
    (saved,) = read_positions(embedded_kafka, name, dlq)

    recreate(embedded_kafka, dlq, letters(8, 10))
    write_position(embedded_kafka, name, saved)

    with open_letters(settings) as box:
        history = read_history(settings, box)
        found = [each for each in box.stream({0: 0}, {0: 8}) if isinstance(each, FoundLetter)]
        assert [history.list_redriven(each) for each in found] == [[]] * 8, "none of them was sent"
    assert Redrive(settings, RedriveOrder()).run().sent == 8
    assert Redrive(settings, RedriveOrder()).run().sent == 0


# -- the id itself -----------------------------------------------------------------------------------------------


class Answers:
    """A client that answers as it is told, and counts."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.answer = answer
        self.asked = 0

    def describe_topics(self, topics: Any, request_timeout: float) -> Mapping[str, Any]:
        from concurrent.futures import Future

        self.asked += 1
        future: Future[Any] = Future()
        self.answer(future)
        return {"t": future}


class Described:
    def __init__(self, topic_id: Any, partitions: int = 1) -> None:
        self.topic_id = topic_id
        self.partitions = [None] * partitions


def topic_ids(answer: Callable[[Any], Any], clock: Callable[[], float] = lambda: 0.0) -> tuple[TopicIds, Answers]:
    ids = TopicIds({}, "t", clock)
    ids._client = client = Answers(answer)  # type: ignore[assignment]
    return ids, client


REFUSED = ck.KafkaException(ck.KafkaError(ck.KafkaError.TOPIC_AUTHORIZATION_FAILED))
MISSING = ck.KafkaException(ck.KafkaError(ck.KafkaError.UNKNOWN_TOPIC_OR_PART))


@pytest.mark.parametrize(
    ("answer", "warnings"),
    [
        (lambda future: future.set_exception(REFUSED), 1),
        (lambda future: future.set_result(Described(ck.Uuid(0, 0))), 1),
        (lambda future: future.set_exception(MISSING), 0),
        (lambda future: None, 0),
    ],
    ids=["refused", "no ids", "missing", "no answer"],
)
def test_an_id_that_is_not_known_is_said_once(answer: Callable[[Any], Any], warnings: int) -> None:
    ids, _ = topic_ids(answer)
    with structlog.testing.capture_logs() as lines:
        assert [ids.ask(0.01) for _ in range(3)] == [None] * 3
    assert len([line for line in lines if line["log_level"] == "warning"]) == warnings


def test_a_look_waits_for_nothing_and_is_rarer_the_more_partitions_there_are() -> None:
    now, open_answers = [0.0], []
    ids, client = topic_ids(open_answers.append, lambda: now[0])
    assert [ids.look() for _ in range(5)] == [None] * 5
    assert client.asked == 1
    open_answers[0].set_result(Described(ck.Uuid(1, 2), partitions=1_000))
    assert ids.look() == str(ck.Uuid(1, 2))
    now[0] = 1.0
    ids.look()
    assert client.asked == 2
    open_answers[1].set_result(Described(ck.Uuid(1, 2), partitions=1_000))
    assert ids.look() == str(ck.Uuid(1, 2))
    now[0] = 10.9
    ids.look()
    assert client.asked == 2
    now[0] = 11.1
    ids.look()
    assert client.asked == 3
