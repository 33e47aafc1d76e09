"""The Kafka producer of a shared stream: over a real broker, and over scripted parts where a race is needed."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from typing import Any

import confluent_kafka as ck
import pytest
from structlog.testing import capture_logs
from tests.foreign_client import send_with_headers
from tests.until import until

from tidemill.config.settings import Settings
from tidemill.core.errors import FencedError, RemoteError
from tidemill.core.retry import Backoff
from tidemill.core.streams.redelivery_items import RedeliveryLimits
from tidemill.deadletters.letter import LetterKind, decode_letter, encode_letter
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sources.base import CommitStatus, Fatal
from tidemill.testing.kafka import committed_offsets, consume, unique_name, wait_for_committed
from tidemill.testing.kafka import produce as produce_now
from tidemill.testing.scripted import ScriptedDeadLetters, ScriptedSource
from tidemill.triggers.producers.kafka import AbsentSubscriberError, KafkaStreamProducer, kafka_stream
from tidemill.triggers.producers.kafka_member import build_member_id
from tidemill.triggers.shared_stream import AdvanceItem, AdvanceOutcome, SubscriberObserver
from tidemill.triggers.stream_api import LIST_NAME, UPSTREAM_COUNTS, UpstreamCounts

CLEAN = AdvanceOutcome(1, 0, 0)
FAILED = AdvanceOutcome(2, 1, 0)
FAILED_BY_ALL = AdvanceOutcome(0, 1, 0)
REJECTED = AdvanceOutcome(1, 1, 1)
UNSEEN = AdvanceOutcome(0, 0, 0)
AT_ONCE = Backoff(0.001, 0.002)


class Stream:
    """A producer that is pulled, and what it gave."""

    def __init__(self, producer: KafkaStreamProducer) -> None:
        self.producer = producer
        self.given: list[Any] = []
        self.unread = 0
        self.pulling = asyncio.Event()
        self.pulling.set()
        self.task = asyncio.ensure_future(self._pull())
        self._news = asyncio.Event()

    async def _pull(self) -> None:
        async for event, payload in self.producer.open_stream():
            assert payload.held is event
            assert self.producer.get_advance_lane(payload) == (event.topic, event.partition)
            self.given.append(payload)
            self._news.set()
            await self.pulling.wait()

    async def take(self, count: int, seconds: float = 20.0) -> list[Any]:
        """Wait for the next `count` events."""
        async with asyncio.timeout(seconds):
            while len(self.given) < self.unread + count:
                if self.task.done():
                    self.task.result()
                self._news.clear()
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait([news, self.task], return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
        taken = self.given[self.unread : self.unread + count]
        self.unread += count
        return taken

    async def advance(
        self,
        *events: Any,
        outcome: AdvanceOutcome = CLEAN,
        failed_by: tuple[str, ...] | dict[str, str] = (),
        unread_by: tuple[str, ...] = (),
    ) -> None:
        """Tell outcomes, as the manager does."""
        failures = failed_by if isinstance(failed_by, dict) else dict.fromkeys(failed_by, "ValueError: no")
        for event in events:
            if failures or unread_by:
                self.producer.event_failed(event, failures, unread_by)
            await self.producer.advance([AdvanceItem(event, outcome)])

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.producer.aclose()


class Place:
    """A topic, and the streams over it."""

    def __init__(self, broker: Any, monkeypatch: pytest.MonkeyPatch, partitions: int = 1) -> None:
        self.broker = broker
        self.topic = unique_name("t")
        self.streams: list[Stream] = []
        self.monkeypatch = monkeypatch
        broker.create_topic(self.topic, partitions=partitions)

    def feed(self, *values: bytes, partition: int = 0) -> None:
        produce_now(self.broker.bootstrap, self.topic, values, partition=partition)

    def start(self, host: str = "host", kafka: dict[str, Any] | None = None, **limits: Any) -> Stream:
        config = {
            "brokers": self.broker.bootstrap,
            "source_topic": self.topic,
            "consumer_group": self.topic,
            "session_timeout_ms": 6000,
            "heartbeat_interval_ms": 500,
            **(kafka or {}),
        }
        self.monkeypatch.setenv("WORKER_ID", host)
        chosen = RedeliveryLimits(**{"backoff": AT_ONCE, **limits})
        stream = Stream(KafkaStreamProducer(Settings.model_validate({"kafka": config}), chosen))
        stream.producer.subscriber_joined("t")
        self.streams.append(stream)
        return stream

    async def committed(self, *expected: int) -> None:
        """Wait until that is committed."""
        await asyncio.to_thread(
            wait_for_committed, self.broker.bootstrap, self.topic, self.topic, sum(expected), timeout_seconds=20
        )
        found = committed_offsets(self.broker.bootstrap, self.topic, self.topic)
        assert [found[partition] for partition in range(len(expected))] == list(expected)

    async def letters(self, count: int) -> list[Any]:
        found = await asyncio.to_thread(consume, self.broker.bootstrap, f"{self.topic}_dlq", count)
        return [decode_letter(message.value()) for message in found]


@pytest.fixture
async def places(embedded_kafka, monkeypatch):
    made: list[Place] = []

    def make(partitions: int = 1) -> Place:
        made.append(Place(embedded_kafka, monkeypatch, partitions))
        return made[-1]

    yield make
    for place in made:
        for stream in place.streams:
            await stream.close()


def offsets(events: list[Any]) -> list[int]:
    return [event.offset for event in events]


# -- over a real broker ------------------------------------------------------------------------------------------


async def test_messages_come_whole_and_in_order_and_are_committed_when_they_are_clean(places):
    place = places()
    producer = ck.Producer({"bootstrap.servers": place.broker.bootstrap})
    producer.produce(place.topic, b"\xff", b"k", headers=[("h", b"1")], timestamp=1_700_000_000_123)
    producer.flush(10)
    place.feed(b"1", b"2")
    stream = place.start()
    first, second, third = await stream.take(3)
    message = first.held
    assert (message.key, message.value, message.headers, message.timestamp) == (
        b"k",
        b"\xff",
        (("h", b"1"),),
        1_700_000_000_123,
    )
    assert offsets([first, second, third]) == [0, 1, 2]
    await stream.advance(first, second)
    await place.committed(2)
    await stream.advance(third)
    await place.committed(3)


async def test_an_event_with_a_header_name_that_is_not_utf8_is_dead_lettered_and_given_to_nobody(places):
    place = places()
    place.feed(b"0")
    send_with_headers(place.broker.bootstrap, place.topic, b"bad", [(b"caf\xe9", b"1")])
    place.feed(b"2")
    stream = place.start()
    events = await stream.take(2)
    assert offsets(events) == [0, 2]
    await stream.advance(*events)
    await place.committed(3)
    (letter,) = await place.letters(1)
    assert (letter.kind, letter.error) == (LetterKind.PARSE, "the name of a header is not UTF-8: b'caf\\xe9'")
    assert letter.sources[0].offset == 1


async def test_no_commit_passes_a_failed_event_and_only_that_one_is_redelivered(places):
    place = places()
    place.feed(*(b"%d" % n for n in range(10)))
    stream = place.start()
    events = await stream.take(10)
    await stream.advance(*events[:4])
    stream.producer.subscriber_left("t")
    await stream.advance(events[4], outcome=FAILED, failed_by=("t",))
    await stream.advance(*events[5:])
    await place.committed(4)
    place.feed(b"10")
    await stream.advance(*await stream.take(1))
    stream.producer.subscriber_joined("t")
    (again,) = await stream.take(1)
    assert again.held is events[4].held
    assert committed_offsets(place.broker.bootstrap, place.topic, place.topic) == {0: 4}
    await stream.advance(again)
    await place.committed(11)
    assert len(stream.given) == 12


async def test_an_event_that_nobody_accepted_is_redelivered_once_the_trigger_that_failed_it_is_gone_for_good(places):
    place = places()
    place.feed(b"0")
    stream = place.start()
    stream.producer.subscriber_joined("u")
    (event,) = await stream.take(1)
    stream.producer.subscriber_left("u")
    await stream.advance(event, outcome=FAILED_BY_ALL, failed_by=("u",))
    with pytest.raises(TimeoutError):
        await stream.take(1, seconds=0.2)
    stream.producer.subscriber_gone("u")
    await stream.advance(*await stream.take(1))
    await place.committed(1)


async def test_an_event_that_others_accepted_is_committed_once_the_trigger_that_failed_it_is_gone_for_good(places):
    place = places()
    place.feed(b"0")
    stream = place.start()
    stream.producer.subscriber_joined("u")
    (event,) = await stream.take(1)
    stream.producer.subscriber_left("u")
    await stream.advance(event, outcome=FAILED, failed_by=("u",))
    stream.producer.subscriber_gone("u")
    await place.committed(1)
    with pytest.raises(TimeoutError):
        await stream.take(1, seconds=0.2)


async def test_the_stream_ends_uncommitted_when_a_trigger_that_failed_does_not_come_back(places):
    place = places()
    place.feed(b"0", b"1")
    stream = place.start(wait_seconds=0.3)
    first, second = await stream.take(2)
    stream.producer.subscriber_left("t")
    await stream.advance(first, outcome=FAILED, failed_by=("t",))
    await stream.advance(second)
    with pytest.raises(AbsentSubscriberError, match=r"offset 0 .* waits for t, which .* again within 0\.3 s"):
        await stream.take(1)
    await stream.close()
    assert committed_offsets(place.broker.bootstrap, place.topic, place.topic)[0] <= 0
    later = place.start()
    assert offsets(await later.take(1)) == [0], "what was clean before is not redelivered"


async def test_a_rejected_event_is_dead_lettered_at_once_and_then_committed(places):
    place = places()
    place.feed(b"bad", b"good")
    stream = place.start()
    bad, good = await stream.take(2)
    await stream.advance(bad, outcome=REJECTED, failed_by=("t",))
    await stream.advance(good)
    await place.committed(2)
    (letter,) = await place.letters(1)
    assert letter.kind is LetterKind.REJECTED
    assert letter.error == "a trigger rejected the event; errors of this delivery: trigger t: ValueError: no"
    assert (letter.sources[0].offset, letter.sources[0].value, letter.partition) == (0, "bad", 0)


async def test_an_event_that_fails_after_its_last_redelivery_is_dead_lettered(places):
    place = places()
    place.feed(b"bad", b"good")
    stream = place.start(max_redeliveries=2)
    bad, good = await stream.take(2)
    await stream.advance(good)
    for _ in range(2):
        await stream.advance(bad, outcome=FAILED)
        (bad,) = await stream.take(1)
    await stream.advance(bad, outcome=FAILED, failed_by=("t",))
    await place.committed(2)
    (letter,) = await place.letters(1)
    assert (letter.kind, letter.attempt_count) == (LetterKind.FAILED, 3)
    assert letter.error == "the event failed 3 times, most recently in trigger t: ValueError: no"
    assert len(stream.given) == 4


async def test_a_stream_with_a_single_subscriber_counts_failures_over_its_restarts(places):
    """The only subscriber ends when it fails, and its stream with it; the next stream goes on counting."""
    place = places()
    place.feed(b"bad", b"good")
    seen: Counter[int] = Counter()
    for _ in range(3):
        stream = place.start(max_redeliveries=2)
        (bad,) = await stream.take(1)
        seen[bad.offset] += 1
        if not seen[1]:
            (good,) = await stream.take(1)
            seen[good.offset] += 1
            await stream.advance(good)
        stream.producer.subscriber_left("t")
        await stream.advance(bad, outcome=FAILED, failed_by=("t",))
        await stream.close()
    assert seen == {0: 3, 1: 1}
    await place.committed(2)
    (letter,) = await place.letters(1)
    assert (letter.kind, letter.attempt_count) == (LetterKind.FAILED, 3)


async def test_partitions_do_not_wait_for_each_other(places):
    place = places(partitions=2)
    place.feed(b"a0", b"a1", partition=0)
    place.feed(b"b0", b"b1", partition=1)
    stream = place.start()
    events = await stream.take(4)
    for event in events:
        if event.lane[1] == 0 and event.offset == 0:
            await stream.advance(event, outcome=FAILED, failed_by=("t",))
        else:
            await stream.advance(event)
    await asyncio.to_thread(wait_for_committed, place.broker.bootstrap, place.topic, place.topic, 2)
    assert committed_offsets(place.broker.bootstrap, place.topic, place.topic)[1] == 2


async def test_a_stream_that_is_not_pulled_stays_in_its_group_beyond_the_poll_interval(places):
    place = places()
    place.feed(*(b"%d" % n for n in range(20)))
    stream = place.start(kafka={"session_timeout_ms": 2000, "heartbeat_interval_ms": 300, "max_poll_interval_ms": 2000})
    stream.pulling.clear()
    (first,) = await stream.take(1)
    await asyncio.sleep(3.5)  # what is shown is that this time passes without harm
    await stream.advance(first)
    await place.committed(1)
    stream.pulling.set()
    await stream.advance(*await stream.take(19))
    await place.committed(20)
    assert len(stream.given) == 20


async def test_a_second_stream_under_the_same_name_ends_the_first(places):
    place = places()
    place.feed(b"0")
    first = place.start("same")
    (event,) = await first.take(1)
    second = place.start("same")
    assert offsets(await second.take(1)) == [0]
    with pytest.raises(FencedError, match="same member id"):
        await first.take(1)
    with pytest.raises(FencedError):
        await first.advance(event)
    await first.close()
    place.feed(b"1")
    await second.take(1)


async def test_a_second_host_takes_its_share_and_no_event_is_lost(places):
    place = places(partitions=4)
    for partition in range(4):
        place.feed(*(b"%d" % n for n in range(100)), partition=partition)
    first = place.start("a")
    done: set[tuple[int, int]] = set()

    async def work(stream: Stream) -> None:
        while True:
            (event,) = await stream.take(1)
            await stream.advance(event)
            done.add((event.lane[1], event.offset))

    workers = [asyncio.ensure_future(work(first))]
    await until(lambda: len(done) >= 100)
    second = place.start("b")
    workers.append(asyncio.ensure_future(work(second)))
    await until(lambda: len(second.producer._lanes) >= 2 and len(first.producer._lanes) <= 2)
    for partition in range(4):
        place.feed(*(b"%d" % n for n in range(100, 150)), partition=partition)
    await place.committed(150, 150, 150, 150)
    assert done == {(partition, offset) for partition in range(4) for offset in range(150)}
    for worker in workers:
        worker.cancel()


async def test_with_every_hundredth_event_failing_all_end_clean_or_dead_lettered_and_clean_ones_come_once(places):
    place = places(partitions=4)
    count = 5_000
    for partition in range(4):
        place.feed(*(b"%d" % n for n in range(count // 4)), partition=partition)
    stream = place.start(max_redeliveries=3)
    chance = random.Random(5)
    clean: Counter[tuple[int, int]] = Counter()
    failures: Counter[tuple[int, int]] = Counter()
    started = time.perf_counter()
    while len(clean) + sum(times == 4 for times in failures.values()) < count:
        (event,) = await stream.take(1)
        where = (event.lane[1], event.offset)
        hopeless = event.offset % 1000 == 7
        if hopeless or (event.offset % 100 == 0 and chance.random() < 0.7 and failures[where] < 3):
            failures[where] += 1
            await stream.advance(event, outcome=FAILED)
        else:
            clean[where] += 1
            await stream.advance(event)
    print(f"{count / (time.perf_counter() - started):.0f} events/s")
    await place.committed(*[count // 4] * 4)
    assert set(clean.values()) == {1}
    assert {where for where in failures if where not in clean} == {(p, n) for p in range(4) for n in (7, 1007)}
    assert len(await place.letters(8)) == 8


@pytest.mark.parametrize("name", ["", "/lists/a", "x" * 5_000, "\ud800 ü/\n"])
def test_a_member_id_holds_list_group_and_topic_in_characters_that_kafka_allows(name, monkeypatch):
    def member(listed: str, group: str = "g", topic: str = "t", host: str = "h") -> str:
        monkeypatch.setenv("WORKER_ID", host)
        token = LIST_NAME.set(listed)
        try:
            return build_member_id(Settings.model_validate({"kafka": {"source_topic": topic, "consumer_group": group}}))
        finally:
            LIST_NAME.reset(token)

    longest = member(name, "g" * 100, "t" * 249, "h" * 100)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,249}", longest)
    ids = {member(name), member(name + "b"), member(name, "g2"), member(name, "g", "t2")}
    assert len(ids) == 4
    assert (member(name, host="i") == member(name)) is bool(name), "without a list the host tells members apart"


def test_a_list_that_changes_hands_keeps_its_member_whatever_the_hosts_are_called(monkeypatch):
    monkeypatch.setenv("WORKER_ID", "not a name for Kafka")
    token = LIST_NAME.set("orders.yaml")
    try:
        producer = kafka_stream("localhost:1", "orders", "order-triggers")
    finally:
        LIST_NAME.reset(token)
    assert isinstance(producer, KafkaStreamProducer)


def test_the_producer_is_told_its_subscribers():
    assert issubclass(KafkaStreamProducer, SubscriberObserver)


async def test_a_stream_that_was_never_opened_closes_at_once():
    producer = kafka_stream("localhost:1", "orders", "group", dlq_topic="letters", max_redeliveries=1)
    await producer.aclose()


# -- over scripted parts -----------------------------------------------------------------------------------------


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def message(offset: int, partition: int = 0) -> SourceMessage:
    return SourceMessage("topic", partition, offset, value=b"%d" % offset)


class Scripted:
    """A stream over a scripted source and scripted letters."""

    def __init__(self, *messages: SourceMessage, **limits: Any) -> None:
        self.source = ScriptedSource(messages)
        self.letters = ScriptedDeadLetters()
        self.clock = Clock()
        self.counts = UpstreamCounts()
        UPSTREAM_COUNTS.set(self.counts)
        producer = KafkaStreamProducer(
            Settings(),
            RedeliveryLimits(**{"backoff": AT_ONCE, **limits}),
            source=self.source,
            letters=self.letters,
            clock=self.clock,
        )
        producer.subscriber_joined("t")
        self.stream = Stream(producer)

    async def commit(self, offset: int, partition: int = 0) -> None:
        await until(lambda: self.source.committed.get(("topic", partition)) == offset)


@pytest.fixture
async def scripted():
    made: list[Scripted] = []

    def make(*messages: SourceMessage, **limits: Any) -> Scripted:
        made.append(Scripted(*messages, **limits))
        return made[-1]

    yield make
    for one in made:
        await one.stream.close()


async def test_a_rejected_event_holds_the_floor_until_its_letter_is_confirmed(scripted):
    one = scripted(message(0), message(1))
    one.letters.hold = True
    bad, good = await one.stream.take(2)
    await one.stream.advance(bad, outcome=REJECTED)
    await one.stream.advance(good)
    await one.commit(0)
    assert one.stream.producer.describe_wait() == "held by the test"
    assert one.counts == UpstreamCounts()
    one.letters.confirm()
    await one.commit(2)
    assert one.counts == UpstreamCounts(dead_lettered={"rejected": 1})


async def test_a_commit_that_failed_is_repeated_and_never_moves_back(scripted):
    one = scripted(message(0), message(1))
    one.source.answers.extend([CommitStatus.AGAIN, CommitStatus.AGAIN])
    first, second = await one.stream.take(2)
    await one.stream.advance(first)
    await until(lambda: one.source.commits)
    await one.stream.advance(second)
    await one.commit(2)
    floors = [commit["topic", 0] for commit in one.source.commits]
    assert floors == sorted(floors)


async def test_closing_commits_what_is_clean_and_leaves_the_group(scripted):
    one = scripted(message(0), message(1))
    first, second = await one.stream.take(2)
    await one.stream.advance(second)
    await one.stream.advance(first)
    await one.stream.close()
    assert one.source.committed == {("topic", 0): 2}
    assert one.source.left is True


async def test_revoked_partitions_are_committed_as_far_as_they_are_clean_and_then_forgotten(scripted):
    one = scripted(message(0), message(1), message(2), message(0, 1))
    events = sorted(await one.stream.take(4), key=lambda event: (event.lane[1], event.offset))
    await one.stream.advance(events[0], events[2], events[3])
    assert await one.source.revoke(("topic", 0)) == {("topic", 0): 1}
    assert one.source.notes["topic", 0] == "tidemill1;1;;1+1"
    await one.stream.advance(events[1])
    await one.commit(1, partition=1)
    assert one.source.committed["topic", 0] == 1


async def test_a_lost_partition_takes_its_events_and_redeliveries_along(scripted):
    one = scripted(message(0), message(1))
    first, second = await one.stream.take(2)
    one.stream.producer.subscriber_left("t")
    await one.stream.advance(first, outcome=FAILED, failed_by=("t",))
    one.source.lose(("topic", 0))
    await one.stream.advance(second)
    one.stream.producer.subscriber_gone("t")
    one.stream.producer.on_assigned([("topic", 0)])
    one.source.feed(message(0), message(1))
    assert offsets(await one.stream.take(2)) == [0, 1]
    assert not one.source.commits


async def test_a_note_that_cannot_be_read_is_reported_once_with_its_partition(scripted):
    one = scripted(message(0, 1), message(0, 2), message(0, 3))
    one.source.notes = {("topic", 1): "tidemill1;8;-9+2;", ("topic", 2): "tidemill1;0;0+2;"}
    with capture_logs() as logs:
        await one.stream.take(3)
        one.stream.producer.on_lost([("topic", 1)])
        one.source.notes["topic", 1] = "tidemill1;8;-9+2;"
        one.stream.producer.on_assigned([("topic", 1)])
    (told,) = [entry for entry in logs if "cannot read the metadata of a committed offset" in entry["event"]]
    assert (told["log_level"], told["topic"], told["partition"]) == ("warning", "topic", 1)
    assert told["note"] == "tidemill1;8;-9+2;"


async def test_a_topic_that_goes_back_ends_the_stream_instead_of_losing_messages(scripted):
    one = scripted(message(5), message(6))
    await one.stream.advance(*await one.stream.take(2))
    one.source.feed(message(0))
    with pytest.raises(RemoteError, match="went back to offset 0"):
        await one.stream.take(1)


async def test_a_failed_consumer_ends_the_stream(scripted):
    one = scripted(message(0))
    await one.stream.take(1)
    one.stream.producer.on_fatal(Fatal.FAILED, "no broker")
    with pytest.raises(RemoteError, match="no broker"):
        await one.stream.take(1)
    await one.stream.close()
    assert one.source.left is False


async def test_an_unread_event_is_delivered_to_the_next_subscriber(scripted):
    one = scripted(message(0), wait_seconds=30.0)
    (event,) = await one.stream.take(1)
    await one.stream.advance(event, outcome=UNSEEN)
    one.stream.producer.subscriber_joined("u")
    one.clock.now += 1
    (again,) = await one.stream.take(1)
    await one.stream.advance(again, outcome=UNSEEN)
    one.clock.now += 31
    one.source.feed()
    with pytest.raises(AbsentSubscriberError, match="no trigger subscribed for the event at offset 0"):
        await one.stream.take(1)
    assert not one.letters.letters


async def test_unread_events_are_redelivered_and_never_dead_lettered(scripted):
    one = scripted(*(message(n) for n in range(20)), max_redeliveries=1)
    producer = one.stream.producer
    clean: list[int] = []
    while len(clean) < 20:
        batch = await one.stream.take(20 - len(clean))
        # As a trigger that ends after each event does it.
        await one.stream.advance(batch[0])
        clean.append(batch[0].offset)
        producer.subscriber_left("t")
        await one.stream.advance(*batch[1:], outcome=AdvanceOutcome(0, 1, 0), unread_by=("t",))
        producer.subscriber_joined("t")
        one.clock.now += 1
        one.source.feed()
    await one.commit(20)
    assert sorted(clean) == list(range(20))
    assert not one.letters.letters


async def test_an_event_that_one_failed_and_another_left_unread_waits_for_both_and_counts(scripted):
    one = scripted(message(0), max_redeliveries=0)
    for who in ("u", "v"):
        one.stream.producer.subscriber_joined(who)
    (event,) = await one.stream.take(1)
    one.stream.producer.subscriber_left("v")
    await one.stream.advance(event, outcome=AdvanceOutcome(0, 1, 0), unread_by=("v",))
    with pytest.raises(TimeoutError):
        await one.stream.take(1, seconds=0.1)
    one.stream.producer.subscriber_joined("v")
    one.clock.now += 1
    one.source.feed()
    (event,) = await one.stream.take(1)
    await one.stream.advance(
        event, outcome=AdvanceOutcome(1, 2, 0), failed_by={"u": "KeyError: 'total'"}, unread_by=("v",)
    )
    await one.commit(1)
    (letter,) = one.letters.letters
    assert (letter.kind, letter.attempt_count) == (LetterKind.FAILED, 1)
    assert letter.error == "the event failed once, in trigger u: KeyError: 'total'"


async def test_a_letter_names_the_trigger_that_rejected_the_event_if_known(scripted):
    one = scripted(*(message(n) for n in range(3)), max_redeliveries=0)
    unknown, known, failed = await one.stream.take(3)
    await one.stream.advance(unknown, outcome=AdvanceOutcome(1, 0, 1))
    await one.stream.advance(
        known, outcome=AdvanceOutcome(1, 1, 1), failed_by={"t": "it rejected the event"}, unread_by=("u",)
    )
    await one.stream.advance(failed, outcome=AdvanceOutcome(1, 1, 0))
    await one.commit(3)
    assert [letter.error for letter in one.letters.letters] == [
        "a trigger rejected the event",
        "the event was rejected by trigger t: it rejected the event",
        "the event failed once",
    ]


async def test_a_letter_names_the_trigger_that_failed_the_last_delivery_within_bounds_and_without_secrets(scripted):
    one = scripted(SourceMessage("topic", 0, 0, headers=(("tidemill-redrives", b"2"),)), max_redeliveries=0)
    (event,) = await one.stream.take(1)
    odd = {"t": "\ud800\0 password=hunter2 " + "x" * 10_000, "n" * 1000: "y"}
    await one.stream.advance(event, outcome=FAILED, failed_by=odd | {f"m{n}": "z" for n in range(100)})
    await one.commit(1)
    (letter,) = one.letters.letters
    assert decode_letter(encode_letter(letter)) == letter
    assert "trigger t: ?\ufffd password=*** xxx" in letter.error
    assert "hunter2" not in letter.error
    assert letter.error.endswith("; and 97 more triggers")
    assert len(letter.error) < 2_000
    assert letter.redrives == 2


async def test_the_wait_for_a_failed_subscriber_stands_still_while_nothing_is_pulled(scripted):
    one = scripted(message(0), message(1), message(2), wait_seconds=60.0)
    one.stream.pulling.clear()
    (event,) = await one.stream.take(1)
    one.stream.producer.subscriber_left("t")
    await one.stream.advance(event, outcome=FAILED, failed_by=("t",))
    one.clock.now += 3600
    one.stream.pulling.set()
    await one.stream.take(2)
    one.clock.now += 58
    one.source.feed()
    with pytest.raises(TimeoutError):
        await one.stream.take(1, seconds=0.1)
    one.clock.now += 3
    one.source.feed()
    with pytest.raises(AbsentSubscriberError, match="waits for t, which failed it"):
        await one.stream.take(1)


async def test_open_events_are_bounded_while_one_waits_for_its_redelivery(scripted):
    one = scripted(*(message(n) for n in range(500)), max_open=100)
    events = await one.stream.take(100)
    one.stream.producer.subscriber_left("t")
    await one.stream.advance(*events, outcome=FAILED_BY_ALL, failed_by=("t",))
    with pytest.raises(TimeoutError):
        await one.stream.take(200, seconds=0.2)
    assert len(one.stream.given) < 100 + 64
    one.stream.producer.subscriber_gone("t")
    one.clock.now += 1
    await one.stream.advance(*one.stream.given[100:])
    async with asyncio.timeout(30):
        while one.stream.unread < 600:
            await one.stream.advance(*await one.stream.take(1))
    await one.commit(500)
