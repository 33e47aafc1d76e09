"""Kafka as a sink: one record per payload on one fixed topic, confirmed by all in-sync replicas.

Invariants: a payload is confirmed only by the broker's own confirmation. A record that is too large or invalid never
makes other records fail, although brokers refuse the whole record batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence, Set
from typing import ClassVar

import confluent_kafka as ck

from tidemill.config.kafka_names import describe_creation
from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.sections.sink_settings import KafkaSinkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.kafka.client import FRESH_TOPIC_SECONDS, TopicAdmin, make_client_config, scrub
from tidemill.runtime.kafka.producer import (
    FullRecord,
    LoopProducer,
    Outcomes,
    Record,
    is_too_large,
    make_producer_config,
    worth_retrying,
)
from tidemill.sinks.base import WAITS, Encoded, Refusal, Sink
from tidemill.sinks.kafka_records import to_record_bytes, to_record_headers, to_record_partition, to_record_timestamp
from tidemill.sinks.payloads import KafkaPayload


class KafkaSink(Sink):
    """One `sinks.kafka.<name>`.

    A payload's `data` of None writes a tombstone. Payloads with the same key stay in order; payloads without a key are
    not ordered.

    Args:
        name: The instance's name.
        settings: The instance's section.
        kafka: The `kafka` section, whose brokers and security settings may be inherited.
        topic_wait_seconds: How long to wait for a topic that was just created.
    """

    type: ClassVar[str] = "kafka"
    max_batch_count = 2_000

    def __init__(
        self,
        name: str,
        settings: KafkaSinkSettings,
        kafka: KafkaSettings,
        *,
        topic_wait_seconds: float = FRESH_TOPIC_SECONDS,
    ) -> None:
        super().__init__(name)
        self._what = f"sinks.kafka.{name}"
        self.topic = settings.topic
        self._topic_wait_seconds = topic_wait_seconds
        self._config = make_producer_config(kafka, settings.brokers, settings.client_config)
        self._admin_config = make_client_config(kafka, settings.brokers, settings.client_config)
        self._producer: LoopProducer | None = None

    async def connect(self) -> None:
        """Check the brokers and the topic, and start the producer.

        Raises:
            ConfigError: The topic does not exist, or a client setting is wrong.
            RemoteError: The brokers do not answer.
        """
        await self.look_up()
        self._producer = LoopProducer(self._config, self._what)
        self._producer.open()

    async def look_up(self) -> int | None:
        """Check the brokers and the topic; return the topic's largest batch size in bytes, or None if it is unknown.

        Raises:
            ConfigError: The topic does not exist, or a client setting is wrong.
            RemoteError: The brokers do not answer.
        """
        return await asyncio.to_thread(self._check)

    def _check(self) -> int | None:
        admin = TopicAdmin(self._admin_config, self._what)
        if not admin.exists(self.topic, self._topic_wait_seconds):
            brokers = self._config["bootstrap.servers"]
            raise ConfigError(
                f"{self._what}: topic {self.topic!r} does not exist at {brokers}; "
                f"{describe_creation(self.topic, brokers)}"
            )
        limit = admin.max_message_bytes(self.topic)
        if limit is not None:
            # A batch above the topic's limit is refused as a whole.
            self._config.setdefault("message.max.bytes", max(1_000, min(limit, 1_000_000_000)))
            self._config.setdefault("batch.size", max(1, min(limit, 1_000_000)))
        return limit

    def encode(self, payload: KafkaPayload) -> Encoded:
        """Return the record.

        Raises:
            TypeError: A field has a value of the wrong type.
            ValueError: A field has a value that is invalid in a record.
        """
        key = to_record_bytes("key", payload.key)
        value = None if payload.data is None else self.to_json(payload.data)
        size = (len(key) if key else 0) + (len(value) if value else 0)
        if payload.headers == () and payload.partition is None and payload.timestamp is None:
            return Encoded(key, (key, value), size)
        headers, partition = to_record_headers(payload.headers), to_record_partition(payload.partition)
        size += sum(len(name) + len(content or b"") for name, content in headers)
        # Records without a key that name the same partition stay in order.
        order = partition if key is None and partition >= 0 else key
        return Encoded(order, FullRecord(key, value, headers, partition, to_record_timestamp(payload.timestamp)), size)

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Produce, and wait for every confirmation.

        Raises:
            RemoteError: No record of the batch was accepted, and the payloads are not at fault.
        """
        outcomes = await self._produce([item.body for item in batch])
        await self._retry_new_partitions(batch, outcomes)
        # Not `count(None)`: a KafkaError raises when it is compared with None.
        if all(error is None for error in outcomes):
            return outcomes  # type: ignore[return-value]  # a list of None
        waiting = await self._resend_suspects(batch, outcomes)
        first = outcomes[0]
        passing = (
            error is not None and worth_retrying(error, _get_partition(item))
            for item, error in zip(batch, outcomes, strict=True)
        )
        if not waiting and first is not None and all(passing):
            raise RemoteError(self._describe(first))
        answers = [
            None if error is None else self._build_refusal(item, error)
            for item, error in zip(batch, outcomes, strict=True)
        ]
        return [WAITS if index in waiting else answer for index, answer in enumerate(answers)]

    async def _produce(self, records: Sequence[Record]) -> Outcomes:
        if self._producer is None:
            raise RemoteError(f"{self._what} is not connected")
        return await self._producer.send(self.topic, records)

    async def _resend_suspects(self, batch: Sequence[Encoded], outcomes: Outcomes) -> Set[int]:
        """Send records again that were refused with their whole record batch; only a record sent alone is surely at
        fault.

        Returns:
            The indexes of the records that were not sent because an earlier one with their key is refused.
        """
        waiting: set[int] = set()
        refused = [(index, error) for index, error in enumerate(outcomes) if error is not None]
        # If the broker names the invalid records, it reports the others of their batch as innocent.
        innocent = {index for index, error in refused if error.code() == ck.KafkaError._INVALID_DIFFERENT_RECORD}
        suspects = {index for index, error in refused if not worth_retrying(error)}
        if len(suspects) < 2 and not innocent:
            return waiting
        either = suspects | innocent
        held: set[Hashable] = set()
        together: list[int] = []
        for index, _ in refused:
            key = batch[index].key
            if index in either and key in held:
                waiting.add(index)
            elif index in innocent:
                together.append(index)
            else:
                # Without innocent records, any suspect may have been refused for another one's fault.
                if index in suspects and not innocent:
                    outcomes[index] = (await self._produce([batch[index].body]))[0]
                if outcomes[index] is not None and key is not None:
                    held.add(key)
        if together:
            again = await self._produce([batch[index].body for index in together])
            for index, outcome in zip(together, again, strict=True):
                outcomes[index] = outcome
        return waiting

    async def _retry_new_partitions(self, batch: Sequence[Encoded], outcomes: Outcomes) -> None:
        """Send records again if the client did not know their partition and the topic has that partition now."""
        unknown = [
            index
            for index, error in enumerate(outcomes)
            if error is not None
            and error.code() == ck.KafkaError._UNKNOWN_PARTITION
            and _get_partition(batch[index]) >= 0
        ]
        if unknown and self._producer is not None:
            count = await self._producer.partition_count(self.topic) or 0
            there = [index for index in unknown if _get_partition(batch[index]) < count]
            if there:
                again = await self._produce([batch[index].body for index in there])
                for index, outcome in zip(there, again, strict=True):
                    outcomes[index] = outcome

    def _build_refusal(self, item: Encoded, error: ck.KafkaError) -> Refusal:
        if error.code() == ck.KafkaError._UNKNOWN_PARTITION and _get_partition(item) >= 0:
            return Refusal(f"topic {self.topic} has no partition {_get_partition(item)}", retryable=False)
        return Refusal(self._describe(error), worth_retrying(error), is_too_large(error))

    def _describe(self, error: ck.KafkaError) -> str:
        trouble = self._producer.trouble if self._producer is not None else None
        why = f" ({trouble})" if trouble and worth_retrying(error) else ""
        return scrub(f"topic {self.topic}: {error.name()}: {error.str()}{why}", self._config)

    async def close(self) -> None:
        """Disconnect; unconfirmed records are abandoned."""
        if self._producer is not None:
            await self._producer.close()


def _get_partition(item: Encoded) -> int:
    """Return the partition that a record names, or -1."""
    return item.body.partition if isinstance(item.body, FullRecord) else -1
