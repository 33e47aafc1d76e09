"""Ranges of a real topic: exactly what was asked for, whatever is missing in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient
from tests.foreign_client import send_with_headers
from tests.until import wait_until

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.core.ranges import Offset, OffsetRange, PartitionEdge, TimeBound
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sources.ranges import RangeReader
from tidemill.spark.bounded.plan import check_still_there, look_up
from tidemill.testing.kafka import produce, unique_name


class Topic:
    def __init__(self, broker: Any, partitions: int = 2, **options: Any) -> None:
        self.broker = broker
        self.name = unique_name("ranges")
        broker.create_topic(self.name, partitions=partitions, **options)

    @property
    def kafka(self) -> KafkaSettings:
        return KafkaSettings(brokers=self.broker.bootstrap, source_topic=self.name)

    @property
    def settings(self) -> Settings:
        return Settings(kafka=self.kafka)

    def feed(self, count: int, partition: int = 0) -> None:
        produce(self.broker.bootstrap, self.name, [b"%d" % n for n in range(count)], partition=partition)

    def delete_below(self, offset: int, partition: int = 0) -> None:
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        where = ck.TopicPartition(self.name, partition, offset)
        for future in admin.delete_records([where]).values():
            future.result(30)

    def in_transaction(self, count: int, *, commit: bool) -> None:
        producer = ck.Producer({"bootstrap.servers": self.broker.bootstrap, "transactional.id": self.name})
        producer.init_transactions(20)
        producer.begin_transaction()
        for n in range(count):
            producer.produce(self.name, b"t%d" % n, partition=0)
        producer.flush(10)
        (producer.commit_transaction if commit else producer.abort_transaction)(20)

    def read(self, *ranges: OffsetRange, seconds: float = 20.0, between: Callable[[], None] | None = None) -> Read:
        reader = RangeReader(self.kafka, ranges)
        reader.open()
        found: list[SourceMessage] = []
        deadline = time.monotonic() + seconds
        try:
            while (messages := reader.read()) is not None:
                found += messages
                assert time.monotonic() < deadline, f"only {len(found)} messages"
        finally:
            reader.close()
        return Read([(message.partition, message.offset) for message in found], reader.gap)


class Read:
    def __init__(self, offsets: list[tuple[int, int]], gap: int) -> None:
        self.offsets = offsets
        self.gap = gap


@pytest.fixture
def topic(embedded_kafka: Any) -> Topic:
    return Topic(embedded_kafka)


def test_a_header_name_that_is_not_utf8_is_told_with_its_message(topic: Topic) -> None:
    topic.feed(1)
    send_with_headers(topic.broker.bootstrap, topic.name, b"bad", [(b"caf\xe9", b"1")])
    topic.feed(1)
    reader = RangeReader(topic.kafka, [OffsetRange(0, 0, 3)])
    reader.open()
    found: list[SourceMessage] = []
    try:
        while (messages := reader.read()) is not None:
            found += messages
    finally:
        reader.close()
    assert [m.headers_error for m in found] == [None, "the name of a header is not UTF-8: b'caf\\xe9'", None]
    assert (found[1].value, found[1].headers) == (b"bad", ())


def test_exactly_the_ranges_are_read_in_order_per_partition(topic: Topic) -> None:
    topic.feed(300)
    topic.feed(200, 1)
    read = topic.read(OffsetRange(0, 10, 250), OffsetRange(1, 199, 200))
    assert [o for p, o in read.offsets if p == 0] == list(range(10, 250))
    assert [o for p, o in read.offsets if p == 1] == [199]
    assert read.gap == 0


def test_a_range_without_offsets_is_at_its_end_at_once(topic: Topic) -> None:
    assert topic.read(OffsetRange(0, 5, 5)).offsets == []


def test_offsets_without_messages_keep_no_range_waiting_and_are_no_gap(topic: Topic) -> None:
    topic.feed(10)
    # The broker confirms the end of a transaction before it writes the marker.
    topic.in_transaction(5, commit=True)  # offsets 10 to 14, and 15 of the marker
    wait_until(
        lambda: look_up(topic.settings, PartitionEdge.EARLIEST, PartitionEdge.LATEST)[0].range == OffsetRange(0, 0, 16)
    )
    topic.in_transaction(3, commit=False)  # 16 to 19, none of them to be read
    wait_until(
        lambda: look_up(topic.settings, PartitionEdge.EARLIEST, PartitionEdge.LATEST)[0].range == OffsetRange(0, 0, 20)
    )
    assert [o for _, o in topic.read(OffsetRange(0, 8, 16)).offsets] == [8, 9, 10, 11, 12, 13, 14]
    assert topic.read(OffsetRange(0, 16, 20)).offsets == []
    topic.feed(1)
    at_the_end = topic.read(OffsetRange(0, 15, 20))
    assert (at_the_end.offsets, at_the_end.gap) == ([], 0)


def test_what_was_deleted_before_it_was_read_is_a_gap(topic: Topic) -> None:
    topic.feed(100)
    topic.delete_below(60)
    part = topic.read(OffsetRange(0, 50, 80))
    assert ([o for _, o in part.offsets], part.gap) == (list(range(60, 80)), 10)
    nothing = topic.read(OffsetRange(0, 20, 40))
    assert (nothing.offsets, nothing.gap) == ([], 20)
    topic.delete_below(100)
    all_gone = topic.read(OffsetRange(0, 90, 100))
    assert (all_gone.offsets, all_gone.gap) == ([], 10)


def test_spans_tell_what_was_deleted_and_what_does_not_exist_yet(topic: Topic) -> None:
    topic.feed(100)
    topic.delete_below(30)
    first, second = look_up(topic.settings, Offset(10), Offset(150))
    assert (first.range, first.deleted, first.beyond) == (OffsetRange(0, 30, 100), 20, 50)
    assert (second.range.size, second.deleted) == (0, 0)


def test_times_are_those_of_messages(topic: Topic) -> None:
    producer = ck.Producer({"bootstrap.servers": topic.broker.bootstrap})
    for n in range(10):
        producer.produce(topic.name, b"x", partition=0, timestamp=1_700_000_000_000 + n * 1_000)
    assert producer.flush(10) == 0
    between = look_up(topic.settings, TimeBound(1_700_000_002_500), TimeBound(1_700_000_005_000))
    assert between[0].range == OffsetRange(0, 3, 5)
    assert between[1].range.size == 0
    later = look_up(topic.settings, TimeBound(1_700_000_009_000), TimeBound(1_900_000_000_000))
    assert later[0].range == OffsetRange(0, 9, 10)


def test_a_topic_that_was_recreated_is_refused(topic: Topic) -> None:
    topic.feed(10)
    with pytest.raises(RemoteError, match=r"/0 ends before the planned offset 50.*recreated"):
        check_still_there(topic.settings, [OffsetRange(0, 40, 50)])
    check_still_there(topic.settings, [OffsetRange(0, 5, 10)])
    # The brokers say "out of range", and the reading begins again at the first offset.
    with pytest.raises(RemoteError, match=r"/0 begins again at offset 0, before 40.*recreated"):
        topic.read(OffsetRange(0, 40, 50))
