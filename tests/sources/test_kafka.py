"""Engines over a real broker, in this process: membership, commits, gaps, and what a broker refuses."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import uuid
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions
from tests.foreign_client import send_with_headers
from tests.jsonl import read_lines
from tests.sources.engines import Engines
from tests.sources.topic_ids import ScriptedIds
from tests.until import slack, until

from tidemill.config.settings import Settings
from tidemill.core.delivery.transaction import TransactionEnd
from tidemill.deadletters.letter import decode_letter
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.progress import StopReason
from tidemill.sinks.payloads import CollectResult, FilePayload, KafkaPayload
from tidemill.sources.base import CommitStatus
from tidemill.sources.kafka import KafkaSource
from tidemill.sources.membership import reap_member


class Copy(Handler[Any, Any]):
    """Every message into a file, after a moment if it says so."""

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(
                f"{m.partition}-{m.offset}",
                source_offsets=[m.offset],
                metadata={"value": m.value.decode()},
                precomputed=PrecomputedResult(),
            )
            for m in messages
        ]

    async def on_task_complete(self, result):
        await asyncio.sleep(0.002)
        return CollectResult(files=[FilePayload(path="out", data=result.task.metadata)])


class Transform(Handler[Any, Any]):
    """The same without tasks."""

    async def transform(self, messages):
        await asyncio.sleep(0.001)
        return [FilePayload(path="out", data={"value": m.value.decode()}) for m in messages]


class Place(Engines):
    """One topic and the engines that read it."""

    def __init__(self, broker: Any, folder: Path, partitions: int = 4) -> None:
        super().__init__(broker, f"s-{uuid.uuid4().hex[:8]}", partitions)
        self.folder = folder

    def settings(self, **more: Any) -> Settings:
        config: dict[str, Any] = {
            "kafka": {
                "brokers": self.broker.bootstrap,
                "source_topic": self.topic,
                "consumer_group": self.topic,
                "session_timeout_ms": 6000,
                "heartbeat_interval_ms": 500,
            },
            "sinks": {"filesystem": {"out": {"base_path": str(self.folder)}}},
            **more,
        }
        return Settings.model_validate(config)

    def feed(self, values: list[bytes | None], **record: Any) -> None:
        producer = ck.Producer({"bootstrap.servers": self.broker.bootstrap})
        failures: list[Any] = []

        def note(error: Any, _: object) -> None:
            if error is not None:
                failures.append(error)

        for n, value in enumerate(values):
            producer.produce(self.topic, value, partition=n % self.partitions, on_delivery=note, **record)
        assert producer.flush(20) == 0
        assert not failures

    def lines(self) -> Counter[str]:
        return Counter(line["value"] for line in read_lines(self.folder / "out"))

    def committed_at_the_broker(self, partitions: list[Any]) -> dict[Any, int]:
        consumer = ck.Consumer({"bootstrap.servers": self.broker.bootstrap, "group.id": self.topic})
        try:
            found = consumer.committed([ck.TopicPartition(*partition) for partition in partitions], timeout=60)
            return {(p.topic, p.partition): max(0, p.offset) for p in found}
        finally:
            consumer.close()

    def letters(self) -> list[Any]:
        consumer = ck.Consumer(
            {"bootstrap.servers": self.broker.bootstrap, "group.id": "letters", "enable.partition.eof": True}
        )
        consumer.assign([ck.TopicPartition(f"{self.topic}_dlq", 0, 0)])
        letters = []
        try:
            while True:
                record = consumer.poll(10)
                assert record is not None, "the dead-letter topic cannot be read"
                if record.error() is not None:
                    assert record.error().code() == ck.KafkaError._PARTITION_EOF, record.error()
                    return letters
                letters.append(decode_letter(record.value()))
        finally:
            consumer.close()


@pytest.fixture
async def place(embedded_kafka, tmp_path):
    made = Place(embedded_kafka, tmp_path)
    yield made
    await made.end()


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % n for n in range(start, start + count)]


async def test_a_header_name_that_is_not_utf8_costs_its_message_alone(place):
    """Programs in C, Go and Rust write such names; a second look at such a record would end the process."""
    place.partitions = 1
    for n in range(30):
        place.feed([b"%d" % n], headers=[("h", b"1")])
    send_with_headers(place.broker.bootstrap, place.topic, b"bad", [(b"trace", b"1"), (b"caf\xe9", b"2")])
    place.feed(numbers(30, 30))
    place.start(Copy())
    await place.committed(61)
    assert place.lines() == Counter(str(n) for n in range(60))
    (letter,) = await asyncio.to_thread(place.letters)
    assert letter.error == "UnreadableHeadersError: the name of a header is not UTF-8: b'caf\\xe9'"
    (source,) = letter.sources
    assert (source.value, source.headers, source.offset) == ("bad", [], 30)


async def test_messages_arrive_whole_with_key_headers_timestamp_and_tombstones(place):
    class Keep(Handler[Any, Any]):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        async def arrange(self, messages, pending):
            self.seen += messages
            return []

    handler = Keep()
    place.feed([b"\xff\x00", None], key=b"k", headers=[("h", b"1"), ("h", None)], timestamp=1_700_000_000_123)
    place.start(handler)
    await place.committed(2)
    first, second = sorted(handler.seen, key=lambda m: m.partition)
    assert (first.key, first.value, first.timestamp) == (b"k", b"\xff\x00", 1_700_000_000_123)
    assert first.headers == (("h", b"1"), ("h", None))
    assert second.value is None


async def test_a_result_larger_than_the_broker_accepts_is_dead_lettered_with_its_size(place):
    class Large(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [ExecutorTask("large", precomputed=PrecomputedResult(b"x" * 3_000_000))]

        async def on_task_complete(self, result):
            return CollectResult(kafka=[KafkaPayload(key="k", data=result.stdout_bytes)])

    place.broker.create_topic(f"{place.topic}-out", partitions=1)
    place.feed([b"1"])
    place.start(Large(), sinks={"kafka": {"out": {"topic": f"{place.topic}-out"}}})
    await place.committed(1)
    (letter,) = place.letters()
    assert letter.kind == "oversize"
    assert "3000000" in json.dumps(letter.original_payloads) + letter.error
    assert letter.sources[0].offset == 0


async def test_messages_that_the_broker_deleted_are_counted_as_a_gap(place):
    place.feed(numbers(40))
    first = place.start(Copy())
    await place.committed(40)
    await place.end()
    place.feed(numbers(40, 40))
    admin = AdminClient({"bootstrap.servers": place.broker.bootstrap})
    for future in admin.delete_records([ck.TopicPartition(place.topic, 0, 15)]).values():
        future.result(30)
    place.tasks.clear()
    place.engines.clear()
    second = place.start(Copy())
    await place.committed(80)
    await place.until(lambda: second.progress().gap == 5)
    assert first.progress().gap == 0


async def test_the_lag_is_that_of_the_topic_minus_what_is_committed_with_what_is_in_flight_beside_it(place):
    class Held(Copy):
        gate = asyncio.Event()

        async def on_task_complete(self, result):
            await self.gate.wait()
            return await super().on_task_complete(result)

    place.feed(numbers(40))
    first = place.start(Copy(), "first")
    await place.committed(40)
    await place.until(lambda: first.progress().lag == {f"{place.topic}/{n}": 0 for n in range(4)})
    await place.end()
    place.feed(numbers(80, 40))
    handler = Held()
    engine = place.start(handler, "second")
    await place.until(lambda: engine.progress().in_flight == 80)
    await place.until(lambda: sum(engine.progress().lag.values()) == 80)
    handler.gate.set()
    await place.until(lambda: sum(engine.progress().lag.values()) == 0)
    assert engine.progress().in_flight == 0


async def test_the_lag_of_partitions_that_are_not_read_is_known_within_a_second_and_kept_up(place):
    place.feed(numbers(40))
    engine = place.start(Copy())
    engine.pause()
    await place.until(lambda: engine.progress().partitions)
    await place.until(lambda: sum(engine.progress().lag.values()) == 40, slack(2))
    # Paused at the broker, as with a full buffer: no fetch tells of its end.
    engine.source.stop_fetching()
    await place.until(lambda: [buffer.paused for buffer in engine.source._buffers.values()] == [True] * 4)
    place.feed(numbers(40, 40))
    await place.until(lambda: sum(engine.progress().lag.values()) == 80)


@pytest.mark.parametrize("handler", [Copy, Transform])
async def test_a_second_engine_takes_its_share_and_nothing_is_repeated(place, handler):
    place.feed(numbers(3000))
    place.start(handler(), "a")
    await place.until(lambda: place.engines[0].counters.messages_done > 100)
    place.start(handler(), "b")
    await place.until(lambda: len(place.engines) == 2 and len(place.engines[1].progress().partitions) == 2)
    place.feed(numbers(1000, 3000))
    await place.committed(4000)
    assert place.lines() == Counter(str(n) for n in range(4000))
    assert place.engines[1].counters.messages_done > 0


async def test_partitions_added_to_the_topic_are_read_within_10_seconds(place):
    first, second = place.start(Copy(), "a"), place.start(Copy(), "b")
    await place.until(lambda: [len(e.progress().partitions) for e in (first, second)] == [2, 2])
    admin = AdminClient({"bootstrap.servers": place.broker.bootstrap})
    for future in admin.create_partitions([NewPartitions(place.topic, 8)]).values():
        future.result(30)
    await place.until(lambda: len(admin.list_topics(place.topic, 10).topics[place.topic].partitions) == 8)
    place.partitions = 8
    started = time.monotonic()
    await asyncio.to_thread(place.feed, numbers(80))
    await place.committed(80)
    took = time.monotonic() - started
    print(f"read after {took:.1f} s")
    assert took < slack(10)
    assert place.lines() == Counter(str(n) for n in range(80))
    assert [len(e.progress().partitions) for e in (first, second)] == [4, 4]


@pytest.mark.parametrize("handler", [Copy, Transform])
async def test_two_rebalances_in_a_row_lose_and_repeat_nothing(place, handler):
    place.feed(numbers(2000))
    place.start(handler(), "a")
    await place.until(lambda: place.engines[0].counters.messages_done > 50)
    second = place.start(handler(), "b")
    third = place.start(handler(), "c")
    await place.until(lambda: second.progress().partitions and third.progress().partitions)
    second.drain()
    third.drain()
    place.feed(numbers(1000, 2000))
    await place.committed(3000)
    assert place.lines() == Counter(str(n) for n in range(3000))


async def test_a_revoke_in_the_middle_of_windows_waits_for_them_and_repeats_nothing(place):
    class Slow(Copy):
        async def on_task_complete(self, result):
            await asyncio.sleep(1.0)
            return await super().on_task_complete(result)

    place.feed(numbers(80))
    first = place.start(Slow(), "w1")
    await place.until(lambda: first.progress().consumed == 80)
    assert not place.lines(), "no window is done yet"
    second = place.start(Slow(), "w2")
    await place.until(lambda: len(second.intake.partitions) == 2)
    place.feed(numbers(40, 80))
    await place.committed(120)
    assert place.lines() == Counter(str(n) for n in range(120))


async def test_kept_partitions_work_and_commit_while_one_task_of_a_revoked_one_runs(place):
    class Held(Copy):
        def __init__(self) -> None:
            self.gates = {str(n): asyncio.Event() for n in range(4)}

        async def on_task_complete(self, result):
            if gate := self.gates.get(result.task.metadata["value"]):
                await gate.wait()
            return await super().on_task_complete(result)

    handler = Held()
    place.feed(numbers(4))
    first = place.start(handler, "w1")
    await place.until(lambda: first.progress().consumed == 4)
    first.pause()
    place.feed(numbers(4000, 4))
    await place.until(lambda: sum(first.source.buffered(lane) for lane in first.intake.partitions) == 4000)
    second = place.start(Copy(), "w2")
    await place.until(lambda: any(lane.handover for lane in first.intake.partitions.values()))
    kept = [lane.partition for lane in first.intake.partitions.values() if lane.handover is None]
    assert len(kept) == 2
    for _, partition in kept:
        handler.gates[str(partition)].set()
    first.resume()
    # Within the callback: what was buffered of the kept ones is worked off, and the brokers have their offsets.
    await place.until(lambda: sum(place.committed_at_the_broker(kept).values()) == 2002)
    assert not second.intake.partitions
    for gate in handler.gates.values():
        gate.set()
    await place.committed(4004)
    assert place.lines() == Counter(str(n) for n in range(4004))


async def test_partitions_that_come_while_an_engine_is_paused_wait_until_it_resumes(place):
    first = place.start(Copy(), "w1")
    await place.until(lambda: len(first.intake.partitions) == 4)
    first.pause()
    second = place.start(Copy(), "w2")
    await place.until(lambda: len(second.intake.partitions) == 2)
    place.feed(numbers(400))
    await place.until(lambda: second.progress().messages_done == 200)
    second.drain()
    await place.until(lambda: len(first.intake.partitions) == 4)
    place.feed(numbers(400, 400))
    await place.until(lambda: sum(first.source.buffered(lane) for lane in first.intake.partitions) == 600)
    assert first.progress().consumed == 0
    first.resume()
    await place.committed(800)
    assert place.lines() == Counter(str(n) for n in range(800))


async def test_the_newest_of_two_with_one_id_wins_and_the_other_ends_as_fenced(place):
    place.feed(numbers(100))
    place.start(Copy())
    await place.committed(100)
    second = place.start(Copy())
    summary = await asyncio.wait_for(place.tasks[0], 30)
    assert summary.reason is StopReason.FENCED
    await place.until(lambda: len(second.progress().partitions) == 4)


async def test_a_drained_engine_leaves_so_that_others_have_its_partitions_at_once(place):
    place.feed(numbers(20))
    place.start(Copy(), "a")
    await place.committed(20)
    place.start(Copy(), "b")
    await place.until(lambda: len(place.engines[1].progress().partitions) == 2)
    started = time.monotonic()
    place.engines[0].drain()
    await place.until(lambda: len(place.engines[1].progress().partitions) == 4, slack(5))
    assert time.monotonic() - started < slack(4)


async def test_reaping_a_dead_member_frees_its_partitions(place):
    dead = KafkaSource(place.settings(), f"{place.topic}.dead.0")

    class Nobody:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    dead.start(Nobody())
    await place.until(lambda: len(dead._buffers) == 4)
    await dead.close(leave=False)
    alive = place.start(Copy(), "alive")
    await asyncio.to_thread(reap_member, place.settings(), f"{place.topic}.dead.0")
    await place.until(lambda: len(alive.progress().partitions) == 4, slack(5))


async def test_a_full_buffer_pauses_its_partition_and_loses_nothing(place, monkeypatch):
    monkeypatch.setattr("tidemill.sources.flow_control.BUFFER_MESSAGES", 50)
    place.feed(numbers(4000))
    place.start(Copy(), executor={"max_executors": 1, "window_size": 10})
    await place.committed(4000)
    assert place.lines() == Counter(str(n) for n in range(4000))


@pytest.mark.alone
async def test_a_source_that_was_full_continues_at_once_when_there_is_room(place, monkeypatch):
    """The client alone takes about half a second; without the request that wakes it this median is 0.4 s or more."""
    monkeypatch.setattr("tidemill.sources.flow_control.BUFFER_MESSAGES", 50)
    place.feed(numbers(40_000))
    engine = place.start(Copy())
    engine.pause()
    source, took = engine.source, []
    for _ in range(7):
        await place.until(lambda: [b.paused for b in source._buffers.values()] == [True] * 4)
        await asyncio.sleep(0.2)  # as long as work on a full buffer takes; the client's thread falls asleep
        start = time.monotonic()
        for tp in list(source._buffers):
            while source.pull(tp, 1000):
                pass
        await place.until(lambda: any(b.messages for b in source._buffers.values()))
        took.append(time.monotonic() - start)
    assert statistics.median(took) < 0.25


async def test_a_partition_that_was_paused_when_it_went_is_read_when_it_comes_back(place, monkeypatch):
    monkeypatch.setattr("tidemill.sources.flow_control.BUFFER_MESSAGES", 50)
    place.feed(numbers(4000))
    first = place.start(Copy(), "a")
    first.pause()
    await place.until(lambda: [b.paused for b in first.source._buffers.values()] == [True] * 4)
    second = place.start(Copy(), "b")
    second.pause()
    await place.until(lambda: len(second.progress().partitions) == 2)
    second.drain()
    await place.until(lambda: len(first.progress().partitions) == 4)
    first.resume()
    await place.committed(4000)
    assert place.lines() == Counter(str(n) for n in range(4000))


async def test_a_recreated_topic_is_read_from_its_beginning_although_the_buffer_has_old_messages(place):
    def buffered() -> int:
        return sum(engine.source.buffered(partition) for partition in list(engine.source._buffers))

    place.feed(numbers(40))
    engine = place.start(Copy())
    await place.committed(40)
    engine.pause()
    place.feed(numbers(20, 40))
    await place.until(lambda: buffered() == 20)
    admin = AdminClient({"bootstrap.servers": place.broker.bootstrap})
    for future in admin.delete_topics([place.topic]).values():
        future.result(30)
    await place.until(lambda: place.topic not in admin.list_topics(timeout=60).topics)
    place.broker.create_topic(place.topic, partitions=place.partitions)
    place.feed(numbers(8, 100))
    await place.until(lambda: engine.progress().recreated_partitions == 4)
    assert buffered() == 20
    engine.resume()
    await place.until(lambda: place.lines() == Counter(str(n) for n in [*range(60), *range(100, 108)]))


async def test_a_missing_topic_is_said_to_be_missing_for_as_long_as_it_is(embedded_kafka):
    settings = Settings.model_validate(
        {"kafka": {"brokers": embedded_kafka.bootstrap, "source_topic": f"no-{uuid.uuid4().hex[:8]}"}}
    )

    source = KafkaSource(settings, "x")
    source.start(Events())
    try:
        await until(lambda: source.describe_wait() is not None)
        await asyncio.sleep(1.5)  # it looks once a second whether the brokers answer, which they do
        assert "no longer exists" in source.describe_wait()
    finally:
        await source.close(leave=True)


# -- races in the hand-over, stepped by hand: no broker makes them happen when they should ---------------------

TP = ("t", 0)
POSITION = ck.TopicPartition("t", 0)


class ScriptedConsumer:
    """What the source's thread calls, without a broker; it never answers a question about watermarks."""

    def __init__(self) -> None:
        self.answers = True
        self.commits: list[Any] = []
        self.records: list[Any] = []

    def consumer_group_metadata(self):
        return b"in a form that nobody knows"

    def committed(self, partitions, timeout):
        if not self.answers:
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TIMED_OUT))
        return [ck.TopicPartition("t", 0, 0) for _ in partitions]

    def incremental_assign(self, partitions): ...
    def incremental_unassign(self, partitions): ...
    def resume(self, partitions): ...
    def commit(self, offsets, asynchronous):
        self.commits.append([(p.topic, p.partition, p.offset) for p in offsets])
        return [] if asynchronous else offsets

    def poll(self, timeout):
        return self.records.pop(0) if self.records else None

    def consume(self, count, timeout):
        records, self.records = self.records, []
        return records

    def offsets_for_times(self, partitions, timeout):
        raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TIMED_OUT))

    def get_watermark_offsets(self, partition, timeout=None, cached=False):
        raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TIMED_OUT))


class Events:
    """Keeps what the engine would be told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.never = False

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.told.append((name, *arguments))

    async def on_revoked(self, partitions):
        if self.never:
            await asyncio.Event().wait()
        return {}


def scripted() -> tuple[KafkaSource, ScriptedConsumer, Events]:
    source, consumer, events = KafkaSource(Settings(), "x", topic_ids=ScriptedIds()), ScriptedConsumer(), Events()
    source._consumer, source._events, source._loop = consumer, events, asyncio.get_running_loop()
    return source, consumer, events


def carry_out(source: KafkaSource) -> None:
    while source._commands:
        source._commands.popleft()()


async def test_a_commit_of_an_earlier_ownership_is_never_sent_in_a_later_one():
    source, consumer, _ = scripted()
    await asyncio.to_thread(source._on_assign, consumer, [POSITION])
    await asyncio.sleep(0)
    source._pending._committer._in_flight = {}
    source.commit({TP: 100})
    carry_out(source)
    source.commit({TP: 101})
    source._dead = True  # nothing is finished: what waits is useless
    await asyncio.to_thread(source._on_revoke, consumer, [POSITION])
    await asyncio.to_thread(source._on_assign, consumer, [POSITION])
    await asyncio.sleep(0)
    carry_out(source)
    source._pending._committer.on_commit(None, [])
    source._pending.send(consumer)
    assert consumer.commits == []
    source.commit({TP: 102})
    carry_out(source)
    source._pending.send(consumer)
    assert consumer.commits == [[("t", 0, 102)]]


async def test_nothing_is_pulled_of_an_ownership_that_the_engine_was_not_told_of():
    source, consumer, _ = scripted()
    source._on_assign(consumer, [POSITION])
    await asyncio.sleep(0)
    source._on_lost(consumer, [POSITION])
    source._on_assign(consumer, [POSITION])
    source._buffers[TP].messages.append(SourceMessage("t", 0, 5))
    assert source.pull(TP, 10) == []
    await asyncio.sleep(0)
    assert len(source.pull(TP, 10)) == 1


async def test_a_revoke_that_takes_too_long_is_told_as_a_loss():
    source, consumer, events = scripted()
    events.never = True
    source._revoke_seconds = -9.4
    await asyncio.to_thread(source._on_assign, consumer, [POSITION])
    await asyncio.to_thread(source._on_revoke, consumer, [POSITION])
    await asyncio.sleep(0.01)
    assert ("on_lost", [TP]) in events.told


async def test_a_gap_that_the_brokers_say_nothing_about_does_not_end_the_consumer():
    source, consumer, _ = scripted()
    await asyncio.to_thread(source._on_assign, consumer, [POSITION])
    record = SimpleNamespace(
        error=lambda: None,
        topic=lambda: "t",
        partition=lambda: 0,
        offset=lambda: 7,
        key=lambda: None,
        value=lambda: b"x",
        headers=lambda: None,
        timestamp=lambda: (1, 1),
    )
    consumer.records = [record]
    await asyncio.to_thread(source._fetch)
    await asyncio.sleep(0)
    assert [m.offset for m in source.pull(TP, 10)] == [7]
    source._check()
    assert source._buffers[TP].holes == [(0, 7)], "examined again at the next look"


async def test_what_an_asynchronous_commit_took_along_is_committed_again_within_a_revoke():
    """Its answer would come with a poll only, and until then nothing more of its partition would be committed."""
    source, consumer, events = scripted()
    await asyncio.to_thread(source._on_assign, consumer, [POSITION])
    await asyncio.sleep(0)
    source.commit({TP: 100})
    carry_out(source)
    source._pending.send(consumer)
    assert consumer.commits == [[("t", 0, 100)]]
    await asyncio.to_thread(source._on_revoke, consumer, [POSITION])
    assert consumer.commits == [[("t", 0, 100)]] * 2
    await asyncio.sleep(0)
    assert ("on_committed", {TP: 100}, CommitStatus.DONE) in events.told


async def test_no_commit_is_sent_within_a_revoke_to_a_coordinator_that_does_not_answer():
    source, consumer, _ = scripted()
    await asyncio.to_thread(source._on_assign, consumer, [POSITION])
    await asyncio.sleep(0)
    source.commit({TP: 100})
    consumer.answers = False
    await asyncio.to_thread(source._on_revoke, consumer, [POSITION])
    assert consumer.commits == []


async def test_an_open_transaction_of_revoked_partitions_is_ended_before_their_tasks_are_waited_for():
    order: list[str] = []

    class Transactions:
        busy, fatal, trouble = True, None, None

        def end_before(self, consumer, partitions, seconds):
            return []

        def give_up(self, consumer, partitions, seconds):
            order.append("given up" if partitions == [TP] else "something else")
            return [(TransactionEnd.ABORTED, {TP: 100})]

        def forget(self, partitions):
            order.append("forgotten")

        def step(self, consumer):
            order.append("step")

    source, consumer, events = scripted()
    source._pending._producer = Transactions()

    async def on_revoked(partitions):
        order.append("tasks")
        return {}

    events.on_revoked = on_revoked
    await asyncio.to_thread(source._on_assign, consumer, [POSITION])
    await asyncio.to_thread(source._on_revoke, consumer, [POSITION])
    assert order[0] == "given up"
    assert "tasks" in order
    assert order[-2:] == ["given up", "forgotten"], "the last one, too, has to end before another member begins there"
    await asyncio.sleep(0)
    assert ("on_committed", {TP: 100}, CommitStatus.AGAIN) in events.told


async def test_only_partitions_that_grew_or_are_full_are_looked_at():
    """A thousand partitions, of which one has messages, cost what one costs."""
    source, consumer, _ = scripted()
    positions = [ck.TopicPartition("t", n) for n in range(1000)]
    await asyncio.to_thread(source._on_assign, consumer, positions)
    looked_at: list[Any] = []

    class Watched(dict):
        def get(self, key, default=None):
            looked_at.append(key)
            return super().get(key, default)

    source._flow._buffers = Watched(source._buffers)
    source._flow.note_growth([("t", 7)])
    source._flow.regulate(consumer, fetching=True)
    assert looked_at == [("t", 7)]
