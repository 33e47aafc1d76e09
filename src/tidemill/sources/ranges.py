"""Reads offset ranges of a topic without a consumer group, so that a live pipeline is not affected.

Invariants: only messages inside the ranges are returned, each at most once and in order per partition. A range ends
when a message at or after its end, or the partition's own end, was read, so that offsets without a message (compaction,
transactions) never stall it. Messages that the broker deleted are counted as a gap. A range never ends normally if its
topic was replaced by another one of the same name after the range was planned.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import confluent_kafka as ck
import structlog

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.errors import RemoteError
from tidemill.core.ranges import OffsetRange
from tidemill.core.topic_identity import is_replaced
from tidemill.runtime.kafka.client import LibraryLog, make_client_config
from tidemill.runtime.kafka.record_headers import read_headers
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.log.setup import throttle
from tidemill.sources.gaps import count_deleted
from tidemill.sources.topic_watch import ASK_SECONDS, open_topic_ids

log = structlog.get_logger(__name__)

#: How many messages are taken from the client at once, and how long to wait if there are none.
BATCH_MESSAGES = 500
READ_SECONDS = 0.05
#: The interval of checks for gaps and unreachable brokers.
CHECK_SECONDS = 1.0
#: The maximum of the option (24 h): the limit between polls is only for group members.
_NO_POLL_LIMIT_MS = 86_400_000


def make_reader_config(kafka: KafkaSettings) -> dict[str, Any]:
    """Return the configuration of a consumer with a manual assignment; the group's name is never sent to a broker."""
    return make_client_config(
        kafka,
        kafka.brokers,
        {
            "fetch.wait.max.ms": 50,
            "fetch.queue.backoff.ms": 20,
            # Messages fetched after a range's end are discarded.
            "queued.min.messages": 5_000,
            "queued.max.messages.kbytes": 16_384,
            **kafka.client_config,
            "group.id": f"{kafka.consumer_group}.bounded",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "max.poll.interval.ms": _NO_POLL_LIMIT_MS,
        },
    )


class _Progress:
    """The progress of reading one range."""

    __slots__ = ("end", "expected", "holes", "start")

    def __init__(self, part: OffsetRange) -> None:
        self.start = part.start
        self.end = part.end
        self.expected = part.start
        #: Jumps that were not examined yet: the expected offset, and the actual one.
        self.holes: list[tuple[int, int]] = []


class RangeReader:
    """A `RecordReader` of ranges of one topic, at most one per partition.

    Args:
        kafka: The `kafka` section.
        ranges: The ranges to read.
        topic_id: The id of the topic that the ranges were planned for; None: unknown.
    """

    def __init__(self, kafka: KafkaSettings, ranges: Sequence[OffsetRange], topic_id: str | None = None) -> None:
        self._topic = kafka.source_topic
        self._config = make_reader_config(kafka)
        self._topic_id = topic_id
        self._ids = open_topic_ids(kafka)
        self._open = {part.partition: _Progress(part) for part in ranges if part.size > 0}
        self._finished: list[tuple[int, _Progress]] = []
        self._gap = 0
        self._wait: str | None = None
        self._next_check = 0.0
        self._consumer: ck.Consumer | None = None

    @property
    def gap(self) -> int:
        """The number of messages that the broker deleted before they were read."""
        return self._gap

    def describe_wait(self) -> str | None:
        """Return why no messages arrive, while the brokers are unreachable."""
        return self._wait

    def open(self) -> None:
        """Connect and assign the partitions."""
        self._consumer = ck.Consumer({**self._config, "error_cb": self._on_error}, logger=LibraryLog())
        self._consumer.assign(
            [ck.TopicPartition(self._topic, number, progress.start) for number, progress in self._open.items()]
        )
        self._next_check = time.monotonic() + CHECK_SECONDS

    def close(self) -> None:
        """Disconnect."""
        if self._consumer is not None:
            self._consumer.close()

    def read(self) -> Sequence[SourceMessage] | None:
        """Return the next messages of all ranges; None when all are read.

        Raises:
            RemoteError: The topic is not the one that the ranges were planned for.
        """
        assert self._consumer is not None
        if not self._open:
            self._compare(self._ids.ask(ASK_SECONDS) if self._topic_id is not None else None)
            self._count_gaps()
            return None
        messages: list[SourceMessage] = []
        for record in self._consumer.consume(BATCH_MESSAGES, READ_SECONDS):
            # The client's types allow None; records and partition ends have both.
            partition: Any = record.partition()
            offset: Any = record.offset()
            if (error := record.error()) is not None:
                if error.code() == ck.KafkaError._PARTITION_EOF:
                    self._at_end(partition, offset)
                else:
                    self._on_record_error(error)
                continue
            progress = self._open.get(partition)
            if progress is None or not self._expect(partition, progress, offset):
                continue
            headers, headers_error = read_headers(record)
            messages.append(
                SourceMessage(
                    self._topic,
                    partition,
                    offset,
                    record.key(),
                    record.value(),
                    headers,
                    record.timestamp()[1],
                    headers_error=headers_error,
                )
            )
            if offset + 1 >= progress.end:
                self._finish(partition)
        if messages:
            self._wait = None
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + CHECK_SECONDS
            self._check()
        return messages

    def _expect(self, partition: int, progress: _Progress, offset: int) -> bool:
        """Advance to a record; return whether it belongs to the range."""
        if offset < progress.expected:
            if offset < progress.start:
                raise self._make_recreated(f"/{partition} begins again at offset {offset}, before {progress.start}: it")
            return False  # fetched twice
        if offset > progress.expected:
            progress.holes.append((progress.expected, min(offset, progress.end)))
        if offset >= progress.end:
            self._finish(partition)
            return False
        progress.expected = offset + 1
        return True

    def _at_end(self, partition: int, offset: int) -> None:
        """Handle the current end of a partition; if it is after the end of the range, the range is read."""
        progress = self._open.get(partition)
        if progress is not None and offset >= progress.end:
            progress.holes.append((progress.expected, progress.end))
            self._finish(partition)

    def _finish(self, partition: int) -> None:
        assert self._consumer is not None
        self._finished.append((partition, self._open.pop(partition)))
        if self._open:
            self._consumer.pause([ck.TopicPartition(self._topic, partition)])

    # -- errors ------------------------------------------------------------------------------------------------

    def _make_recreated(self, text: str) -> RemoteError:
        advice = "was recreated since the ranges were planned; start over, with another folder for the outcomes"
        return RemoteError(f"topic {self._topic!r}{text} {advice}", retryable=False)

    def _compare(self, topic_id: str | None) -> None:
        if is_replaced(self._topic_id, topic_id):
            raise self._make_recreated("")

    def _check(self) -> None:
        self._compare(self._ids.look() if self._topic_id is not None else None)
        if any(progress.holes for _, progress in self._read_so_far()):
            self._count_gaps()
        if self._wait is not None and self._consumer is not None:
            try:
                topic = self._consumer.list_topics(self._topic, timeout=0.5).topics[self._topic]
            except ck.KafkaException:
                return
            if topic.error is None:
                self._wait = None

    def _read_so_far(self) -> list[tuple[int, _Progress]]:
        return [*self._open.items(), *self._finished]

    def _count_gaps(self) -> None:
        assert self._consumer is not None
        for partition, progress in self._read_so_far():
            if not progress.holes:
                continue
            deleted = count_deleted(self._consumer, self._topic, partition, progress.holes, 5.0)
            if deleted is None:
                return
            progress.holes = []
            self._gap += deleted

    def _on_record_error(self, error: ck.KafkaError) -> None:
        if error.code() == ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
            self._wait = f"topic {self._topic!r} no longer exists; create it again or stop the run"
        throttle(log, 10.0).warning("consumer error", error=error.str())

    def _on_error(self, error: ck.KafkaError) -> None:
        if error.code() == ck.KafkaError._ALL_BROKERS_DOWN:
            self._wait = f"no broker is reachable ({self._config['bootstrap.servers']}); waiting for one"
        throttle(log, 10.0).warning("client error", error=error.str())
