"""Fires for messages of a Kafka topic; triggers of one topic and group share one consumer.

A message is committed when every trigger of its group is done with it and what they fired is stored; `producers.kafka`
describes what becomes of those that failed or were rejected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any

from tidemill.config.kafka_names import check_brokers, check_group, check_topic, check_topic_or_empty, refuse_owned
from tidemill.config.kafka_settings import OWNED_SOURCE_KEYS
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.builtin.arguments import resolve_environment
from tidemill.triggers.builtin.isolated import run_alone
from tidemill.triggers.builtin.selection import Left, OnInvalid, Selection, ValueFormat, encode_bytes
from tidemill.triggers.producers.kafka import kafka_claim, kafka_stream
from tidemill.triggers.shared_stream import SharedStreamProducer, reject_shared_stream_event

#: librdkafka's keys that are set here, and what to use instead.
_OWNED_KEYS = {
    **dict.fromkeys(OWNED_SOURCE_KEYS, "tidemill sets it for its streams; remove it"),
    "bootstrap.servers": "set brokers",
    "metadata.broker.list": "set brokers",
    "group.id": "set group",
}


class KafkaTrigger(BaseEventTrigger):
    """Fires for every message of a topic that is selected.

    What is fired holds topic, partition, offset, timestamp, key, headers and value. Its identity is the message's place
    and time, and a digest of what selects: a message is stored once per trigger, however often it is delivered, and
    once more for a trigger that selects or applies something else under the same name.

    Args:
        topic: The topic to read; it has to exist.
        brokers: host:port of one or more brokers, with commas.
        group: The consumer group. Triggers of one topic and group share one consumer, and so all but the selection:
            the first one's settings apply.
        apply: See `Selection`, as the next ones.
        key: Likewise; the message's key, as UTF-8.
        where: Likewise.
        value_format: Likewise.
        on_invalid: Likewise.
        dlq_topic: Where rejected and failed messages go; '' means `<topic>_dlq`.
        max_redeliveries: How often a failed message is redelivered.
        client_config: Passed to librdkafka, for example for security; secrets as `{"env": NAME}`.

    Raises:
        ConfigError: The function to apply does not exist.
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
        # A wrong argument is this trigger's own failure, not that of all triggers of its stream.
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
        """Return the arguments of this trigger."""
        return "tidemill.triggers.builtin.kafka.KafkaTrigger", dict(self._kwargs)

    def shared_stream_key(self) -> Hashable:
        """Return brokers, topic and group: two consumers of the same would each see half of the messages."""
        return self._key

    def upstream_claim(self) -> str:
        """Return topic and group: no other running list may read them."""
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
        """Fire for what is selected."""
        selection = self._selection
        async for message in shared_stream:
            fired = await selection.select(message, message.key, message.value, _describe)
            if fired is Left.OUT:
                continue
            if fired is Left.INVALID:
                if selection.rejects_invalid:
                    reject_shared_stream_event()
                continue
            # With its time, because a topic that was deleted and created again counts from 0.
            place = f"{message.topic}/{message.partition}/{message.offset}@{message.timestamp}"
            yield TriggerEvent(fired, identity=place + selection.identity_suffix)

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
