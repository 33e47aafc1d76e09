"""Kafka as a sink: one record per payload on one fixed topic, confirmed by all in-sync replicas.

Invariants: a payload is confirmed only by the broker's own confirmation; a record that is too large or not valid never
takes others down with it, although brokers refuse the whole batch it travelled in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from typing import ClassVar

import confluent_kafka as ck

from tidemill.config.settings import KafkaSettings, KafkaSinkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.kafka_client import FRESH_TOPIC_SECONDS, TopicAdmin, client_config, scrubbed
from tidemill.runtime.producer import (
    LoopProducer,
    Outcomes,
    Record,
    producer_config,
    too_large,
    worth_retrying,
)
from tidemill.sinks.base import WAITS, Encoded, Refusal, Sink, to_json
from tidemill.sinks.payloads import KafkaPayload


class KafkaSink(Sink):
    """One `sinks.kafka.<name>`.

    A payload's `data` of None writes a tombstone. Payloads of one key stay in order; those without a key have none.

    Args:
        name: The instance's name.
        settings: Its section.
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
        """Prepare; nothing is connected before `connect`."""
        super().__init__(name)
        self._what = f"sinks.kafka.{name}"
        self.topic = settings.topic
        self._topic_wait_seconds = topic_wait_seconds
        self._config = producer_config(kafka, settings.brokers, settings.client_config)
        self._admin_config = client_config(kafka, settings.brokers, settings.client_config)
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
        """Check the brokers and the topic; return the largest batch that it takes, in bytes, None if nobody says.

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
                f"{self._what}: topic {self.topic!r} does not exist at {brokers}; create it, for example with "
                f"kafka-topics.sh --bootstrap-server {brokers} --create --topic {self.topic} --partitions 4"
            )
        limit = admin.max_message_bytes(self.topic)
        if limit is not None:
            # A batch over the topic's limit is refused as a whole, so none may be larger than that.
            self._config.setdefault("message.max.bytes", max(1_000, min(limit, 1_000_000_000)))
            self._config.setdefault("batch.size", max(1, min(limit, 1_000_000)))
        return limit

    def encode(self, payload: KafkaPayload) -> Encoded:
        """Return key and value as bytes."""
        key: bytes | None
        if payload.key is None or isinstance(payload.key, bytes):
            key = payload.key
        elif isinstance(payload.key, str):
            key = payload.key.encode()
        else:
            raise TypeError(f"the key of a KafkaPayload is bytes, str or None, not {type(payload.key).__name__}")
        value = None if payload.data is None else to_json(payload.data)
        return Encoded(key, (key, value), (len(key) if key else 0) + (len(value) if value else 0))

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Produce, and wait for every confirmation.

        Raises:
            RemoteError: Nothing of the batch came through, and that was not the payloads' fault.
        """
        outcomes = await self._produced([item.body for item in batch])
        # Not `count(None)`: a KafkaError raises when it is compared with None.
        if all(error is None for error in outcomes):
            return outcomes  # type: ignore[return-value]  # a list of None
        waiting = await self._resent_alone(batch, outcomes)
        first = outcomes[0]
        if not waiting and first is not None and all(error is not None and worth_retrying(error) for error in outcomes):
            raise RemoteError(self._text(first))
        answers = [None if error is None else self._refusal(error) for error in outcomes]
        return [WAITS if index in waiting else answer for index, answer in enumerate(answers)]

    async def _produced(self, records: Sequence[Record]) -> Outcomes:
        if self._producer is None:
            raise RemoteError(f"{self._what} is not connected")
        return await self._producer.send(self.topic, records)

    async def _resent_alone(self, batch: Sequence[Encoded], outcomes: Outcomes) -> Set[int]:
        """Send each record again that was refused with its whole batch: only alone it is its own fault.

        Returns:
            Those that were not, since one before them with their key is refused.
        """
        waiting: set[int] = set()
        refused = [index for index, error in enumerate(outcomes) if error is not None]
        suspects = {index for index in refused if not worth_retrying(outcomes[index])}  # type: ignore[arg-type]
        if len(suspects) < 2:
            return waiting
        held: set[bytes] = set()
        for index in refused:
            item = batch[index]
            if index in suspects and item.key in held:
                waiting.add(index)
                continue
            if index in suspects:
                outcomes[index] = (await self._produced([item.body]))[0]
            if outcomes[index] is not None and item.key is not None:
                held.add(item.key)
        return waiting

    def _refusal(self, error: ck.KafkaError) -> Refusal:
        return Refusal(self._text(error), worth_retrying(error), too_large(error))

    def _text(self, error: ck.KafkaError) -> str:
        trouble = self._producer.trouble if self._producer is not None else None
        why = f" ({trouble})" if trouble and worth_retrying(error) else ""
        return scrubbed(f"topic {self.topic}: {error.name()}: {error.str()}{why}", self._config)

    async def close(self) -> None:
        """Disconnect; records without a confirmation are given up."""
        if self._producer is not None:
            await self._producer.close()
