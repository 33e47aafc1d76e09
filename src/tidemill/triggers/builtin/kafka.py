"""Fires for messages of a Kafka topic; triggers with the same topic and group share one consumer.

The offset of a message is committed when every trigger of the group has resolved it and the fired events are stored;
`producers.kafka` describes the handling of failed and rejected messages.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any

from tidemill.config.kafka_names import check_brokers, check_group, check_topic, check_topic_or_empty, refuse_owned
from tidemill.config.sections.kafka_settings import OWNED_SOURCE_KEYS
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.builtin.arguments import resolve_environment
from tidemill.triggers.builtin.isolated import run_alone
from tidemill.triggers.builtin.selection import Left, OnInvalid, Selection, ValueFormat, encode_bytes
from tidemill.triggers.producers.kafka import kafka_claim, kafka_stream
from tidemill.triggers.shared_stream import SharedStreamProducer, reject_shared_stream_event

#: librdkafka settings that are set here, and what to use instead.
_OWNED_KEYS = {
    **dict.fromkeys(OWNED_SOURCE_KEYS, "tidemill sets this for its streams; remove it"),
    "bootstrap.servers": "set brokers",
    "metadata.broker.list": "set brokers",
    "group.id": "set group",
}


class KafkaTrigger(BaseEventTrigger):
    """Fires for every selected message of a topic.

    The payload has topic, partition, offset, timestamp, key, headers and value. The identity is the message's topic,
    partition, offset and timestamp, and a digest of the selection. So a message is stored once per trigger, however
    often it is delivered, and once more if a trigger of the same name later has another selection or function.

    Args:
        topic: The topic to read; it must exist.
        brokers: One or more `host:port`, separated by commas.
        group: The consumer group. Triggers with the same topic and group share one consumer and therefore all settings
            except the selection; the first trigger's settings apply.
        apply: See `Selection`.
        key: See `Selection`; compared with the message's key as UTF-8.
        where: See `Selection`.
        value_format: See `Selection`.
        on_invalid: See `Selection`.
        dlq_topic: The topic for rejected and failed messages; '' means `<topic>_dlq`.
        max_redeliveries: How often to redeliver a failed message.
        client_config: Settings for librdkafka, for example for security; write secrets as `{"env": NAME}`.

    Raises:
        ConfigError: The function in `apply` does not exist.
        TypeError: A value has the wrong type.
        ValueError: A value is not allowed.
    """

    def __init__(
        self,
        topic: str,
        *,
        brokers: str = "localhost:9092",
        group: str = "tidemill-triggers",
        apply: str | None = None,
        key: str | Sequence[str] | None = None,
        where: Mapping[str, Any] | None = None,
        value_format: ValueFormat = "text",
        on_invalid: OnInvalid = "skip",
        dlq_topic: str = "",
        max_redeliveries: int = 5,
        client_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments; do not connect yet."""
        super().__init__()
        # Checking here makes a wrong argument fail this trigger alone, instead of the stream with all its triggers.
        for name, check, value in (
            ("topic", check_topic, topic),
            ("brokers", check_brokers, brokers),
            ("dlq_topic", check_topic_or_empty, dlq_topic),
            ("group", check_group, group),
        ):
            try:
                check(value)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None
        refuse_owned(dict(client_config or {}), _OWNED_KEYS)
        if max_redeliveries < 0:
            raise ValueError(f"max_redeliveries must not be negative, got {max_redeliveries}")
        self._selection = Selection(apply=apply, key=key, where=where, value_format=value_format, on_invalid=on_invalid)
        self._kwargs = {
            "topic": topic,
            "brokers": brokers,
            "group": group,
            **self._selection.kwargs,
            "dlq_topic": dlq_topic,
            "max_redeliveries": max_redeliveries,
            "client_config": dict(client_config or {}),
        }
        self._key = ("kafka", brokers, topic, group)
        self._claim = kafka_claim(topic, group)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the classpath and arguments of this trigger."""
        return "tidemill.triggers.builtin.kafka.KafkaTrigger", dict(self._kwargs)

    def shared_stream_key(self) -> Hashable:
        """Return brokers, topic and group: two consumers in one group would each see half of the messages."""
        return self._key

    def upstream_claim(self) -> str:
        """Return topic and group, which no other running list may read."""
        return self._claim

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """Create the consumer."""
        return kafka_stream(
            kwargs["brokers"],
            kwargs["topic"],
            kwargs["group"],
            dlq_topic=kwargs["dlq_topic"],
            max_redeliveries=kwargs["max_redeliveries"],
            client_config=resolve_environment(kwargs["client_config"]),
        )

    async def filter_shared_stream(self, shared_stream: AsyncIterator[SourceMessage]) -> AsyncIterator[TriggerEvent]:
        """Fire for selected messages."""
        selection = self._selection
        async for message in shared_stream:
            fired = await selection.select(message, message.key, message.value, _describe)
            if fired is Left.OUT:
                continue
            if fired is Left.INVALID:
                if selection.rejects_invalid:
                    reject_shared_stream_event()
                continue
            # The timestamp tells apart messages of a topic that was deleted and created again, where offsets restart at
            # 0.
            position = f"{message.topic}/{message.partition}/{message.offset}@{message.timestamp}"
            yield TriggerEvent(fired, identity=position + selection.identity_suffix)

    def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire without sharing the consumer."""
        return run_alone(self)


def _describe(message: SourceMessage) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": message.timestamp,
        "key": encode_bytes(message.key),
        "headers": [[name, encode_bytes(value)] for name, value in message.headers],
    }
