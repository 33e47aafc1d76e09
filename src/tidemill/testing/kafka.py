"""Real Kafka brokers for tests, tuned for short outages, and functions that inspect topics from outside.

Every function waits for its result up to a deadline, and then raises `TimeoutError`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.kafka.topic_reader import TopicReader

#: Broker properties for tests: members may be declared dead after 2 s.
FAST_PROPERTIES: Mapping[str, str] = {"group.min.session.timeout.ms": "2000"}

#: Client properties for tests: clients reconnect soon after an outage.
FAST_CLIENT: Mapping[str, str | int] = {
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
    "topic.metadata.refresh.fast.interval.ms": 50,
    "log_level": 0,
}


def new_broker(data_dir: Path | None = None, **options: Any) -> EmbeddedBroker:
    """Return a broker with the test properties, not started yet; `options` are passed to `EmbeddedBroker`."""
    properties = {**FAST_PROPERTIES, **options.pop("properties", {})}
    return EmbeddedBroker(data_dir, properties=properties, **options)


def unique_name(prefix: str = "topic") -> str:
    """Return a unique name for a topic or a group."""
    return f"{prefix}-{uuid.uuid4().hex[:10]}"


def produce(
    bootstrap: str,
    topic: str,
    values: Iterable[bytes | str | None],
    *,
    key: bytes | str | None = None,
    partition: int = -1,
    timeout_seconds: float = 30.0,
) -> int:
    """Write values in order; return their number once the broker has confirmed all of them.

    Args:
        bootstrap: The broker, as `host:port`.
        topic: An existing topic.
        values: The values to write; None writes a tombstone.
        key: The key of all records.
        partition: The partition; -1: chosen by the key, or any partition without a key.
        timeout_seconds: The timeout for all values together.
    """
    failures: list[KafkaError] = []

    def note_failure(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failures.append(error)

    settings: dict[str, Any] = {**FAST_CLIENT, "bootstrap.servers": bootstrap, "linger.ms": 1}
    producer = Producer(settings)
    count = 0
    for value in values:
        producer.produce(topic, value=value, key=key, partition=partition, on_delivery=note_failure)
        count += 1
        if count % 10_000 == 0:
            producer.flush(timeout_seconds)
    if producer.flush(timeout_seconds):
        raise TimeoutError(f"{topic}: not all of {count} records were confirmed in {timeout_seconds:g} s")
    if failures:
        raise KafkaException(failures[0])
    return count


def consume(bootstrap: str, topic: str, count: int, *, timeout_seconds: float = 30.0) -> list[Message]:
    """Wait for `count` messages in all partitions of a topic, and return them, in order within each partition."""
    with TopicReader(bootstrap, client_config=FAST_CLIENT) as reader:
        return reader.read(topic, count, timeout_seconds=timeout_seconds)


def committed_offsets(bootstrap: str, group: str, topic: str, *, timeout_seconds: float = 30.0) -> dict[int, int]:
    """Return the committed next offset of a group by partition; -1 where there is none."""
    deadline = time.monotonic() + timeout_seconds
    with TopicReader(bootstrap, group, FAST_CLIENT) as reader:
        while True:
            try:
                return reader.committed(topic)
            except KafkaException:  # the group has no coordinator yet, or is changing it
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.02)


def wait_for_committed(
    bootstrap: str, group: str, topic: str, total: int, *, timeout_seconds: float = 30.0
) -> dict[int, int]:
    """Wait until a group's committed offsets of a topic add up to `total`; return them by partition."""
    deadline = time.monotonic() + timeout_seconds
    offsets: dict[int, int] = {}
    with TopicReader(bootstrap, group, FAST_CLIENT) as reader:
        while True:
            try:
                offsets = reader.committed(topic)
            except KafkaException:  # the group has no coordinator yet, or is changing it
                if time.monotonic() > deadline:
                    raise
            if sum(max(offset, 0) for offset in offsets.values()) >= total:
                return offsets
            if time.monotonic() > deadline:
                raise TimeoutError(f"{group} committed {offsets} of {topic}, not {total}")
            time.sleep(0.02)
