"""Reads topics and consumer groups from outside: never joins a group, never commits, changes nothing.

Every call has a deadline and raises `TimeoutError` if no answer arrived in time, or `KafkaException` with the broker's
error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

_CALL_TIMEOUT_SECONDS = 10.0
_WITHOUT_LEADER = frozenset({KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE})


class TopicReader:
    """A client that only reads; use it in a `with` block, from one thread.

    Args:
        bootstrap: The brokers.
        group: The group whose committed offsets `committed` returns.
        client_config: Further settings of librdkafka, for example security.
    """

    def __init__(
        self, bootstrap: str, group: str = "tidemill-reader", client_config: Mapping[str, Any] | None = None
    ) -> None:
        """Create the client; it connects at the first call."""
        settings: dict[str, Any] = {
            # Outages show as missing answers; librdkafka's own log lines about them add nothing.
            "log_level": 0,
            "reconnect.backoff.max.ms": 500,
            "fetch.wait.max.ms": 50,
            **(client_config or {}),
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
        }
        self._consumer = Consumer(settings)

    def __enter__(self) -> TopicReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._consumer.close()

    def partitions(self, topic: str) -> list[int]:
        """Return the numbers of a topic's partitions; empty if the topic does not exist."""
        metadata = self._consumer.list_topics(topic, timeout=_CALL_TIMEOUT_SECONDS)
        return sorted(metadata.topics[topic].partitions)

    def end_offsets(self, topic: str) -> dict[int, int]:
        """Return the offset that the next message of each partition will get."""
        return {number: self._range(topic, number)[1] for number in self.partitions(topic)}

    def committed(self, topic: str) -> dict[int, int]:
        """Return the group's committed next offset of each partition; -1 if there is none."""
        wanted = [TopicPartition(topic, number) for number in self.partitions(topic)]
        answers = self._consumer.committed(wanted, timeout=_CALL_TIMEOUT_SECONDS)
        return {answer.partition: max(answer.offset, -1) for answer in answers}

    def read(self, topic: str, count: int | None = None, *, timeout_seconds: float = 30.0) -> list[Message]:
        """Return messages from the beginning of all partitions, in order within each.

        Args:
            topic: The topic.
            count: The minimum number of messages to wait for; None reads those that exist at the call.
            timeout_seconds: The limit for all of them together.
        """
        deadline = time.monotonic() + timeout_seconds
        ranges = {number: self._range(topic, number) for number in self.partitions(topic)}
        self._consumer.assign([TopicPartition(topic, number, low) for number, (low, _) in ranges.items()])
        missing = {number: end for number, (low, end) in ranges.items() if low < end}
        found: list[Message] = []
        while missing if count is None else len(found) < count:
            if time.monotonic() > deadline:
                text = f"{topic}: only {len(found)} messages arrived within {timeout_seconds:g} s"
                read = [self._describe_position(topic, number) for number, (low, end) in ranges.items() if low < end]
                raise TimeoutError("; ".join([text, *read]))
            batch = [message for message in self._consumer.consume(1000, 0.1) if message.error() is None]
            found += batch
            # Control records of transactions have offsets too, so positions decide, not the number of messages.
            for number, end in list(missing.items()):
                if self._consumer.position([TopicPartition(topic, number)])[0].offset >= end:
                    del missing[number]
        self._consumer.unassign()
        return found

    def _describe_position(self, topic: str, partition: int) -> str:
        """Return how far a partition was read, which shows whether an open transaction is in the way."""
        where = TopicPartition(topic, partition)
        position = self._consumer.position([where])[0].offset
        _, end = self._consumer.get_watermark_offsets(where, cached=True)
        return f"partition {partition}: read to {position}, committed to {self._range(topic, partition)[1]}, end {end}"

    def _range(self, topic: str, partition: int) -> tuple[int, int]:
        where = TopicPartition(topic, partition)
        deadline = time.monotonic() + _CALL_TIMEOUT_SECONDS
        while True:
            try:
                low, high = self._consumer.get_watermark_offsets(where, timeout=_CALL_TIMEOUT_SECONDS)
            except KafkaException as error:
                # The only broker is fenced for a moment if the machine is too busy for its heartbeats.
                if error.args[0].code() not in _WITHOUT_LEADER or time.monotonic() > deadline:
                    raise
            else:
                return low, high
            time.sleep(0.05)
