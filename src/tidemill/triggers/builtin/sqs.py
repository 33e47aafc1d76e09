"""Fires for messages of an SQS queue; triggers of one queue share one poll.

A message is deleted when every trigger of the queue has resolved it and the fired events are stored; `producers.sqs`
describes the handling of failed and rejected messages. Credentials are found the way the AWS SDK finds them, and are
not part of a trigger.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Mapping
from typing import Any

from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.builtin.isolated import run_alone
from tidemill.triggers.builtin.selection import Left, OnInvalid, Selection, ValueFormat, encode_bytes
from tidemill.triggers.producers.sqs import SqsStreamProducer
from tidemill.triggers.producers.sqs_client import SqsMessage, SqsSettings
from tidemill.triggers.shared_stream import SharedStreamProducer, reject_shared_stream_event


class SqsTrigger(BaseEventTrigger):
    """Fires for every selected message of a queue.

    The payload has queue, message_id, group_id, sent_ms, attributes and value (the body). The identity is the message's
    id and a digest of the selection. So a message is stored once per trigger, however often it is delivered, and once
    more if a trigger of the same name later has another selection or function.

    Args:
        queue: The name or URL of the queue. Triggers of one queue share one poll and therefore all settings except the
            selection; the first trigger's settings apply.
        apply: See `Selection`.
        where: See `Selection`.
        value_format: See `Selection`.
        on_invalid: See `Selection`.
        reject_queue: See `SqsSettings`.
        region: See `SqsSettings`.
        endpoint_url: See `SqsSettings`.
        visibility_seconds: See `SqsSettings`.
        wait_seconds: See `SqsSettings`.

    Raises:
        ConfigError: The function in `apply` does not exist.
        TypeError: A value has the wrong type.
        ValueError: A value is not allowed.
    """

    def __init__(
        self,
        queue: str,
        *,
        apply: str | None = None,
        where: Mapping[str, Any] | None = None,
        value_format: ValueFormat = "text",
        on_invalid: OnInvalid = "skip",
        reject_queue: str = "",
        region: str = "",
        endpoint_url: str = "",
        visibility_seconds: int = 60,
        wait_seconds: int = 20,
    ) -> None:
        """Check the arguments; do not connect yet."""
        super().__init__()
        self._selection = Selection(apply=apply, where=where, value_format=value_format, on_invalid=on_invalid)
        self._settings = {
            "queue": queue,
            "reject_queue": reject_queue,
            "region": region,
            "endpoint_url": endpoint_url,
            "visibility_seconds": visibility_seconds,
            "wait_seconds": wait_seconds,
        }
        SqsSettings(**self._settings)  # type: ignore[arg-type]  # values of several types, by name
        self._key = ("sqs", queue, region, endpoint_url)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the classpath and arguments of this trigger."""
        return "tidemill.triggers.builtin.sqs.SqsTrigger", {**self._settings, **self._selection.kwargs}

    def shared_stream_key(self) -> Hashable:
        """Return the queue and its endpoint: two polls of one queue would each see half of the messages."""
        return self._key

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """Create the producer."""
        return SqsStreamProducer(SqsSettings(**{name: kwargs[name] for name in SqsSettings.__slots__}))

    async def filter_shared_stream(self, shared_stream: AsyncIterator[SqsMessage]) -> AsyncIterator[TriggerEvent]:
        """Fire for selected messages."""
        selection = self._selection
        async for message in shared_stream:
            fired = await selection.select(message, None, message.body.encode(), _describe)
            if fired is Left.OUT:
                continue
            if fired is Left.INVALID:
                if selection.rejects_invalid:
                    reject_shared_stream_event()
                continue
            yield TriggerEvent(fired, identity=message.message_id + selection.identity_suffix)

    def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire without sharing the poll."""
        return run_alone(self)


def _describe(message: SqsMessage) -> dict[str, Any]:
    return {
        "queue": message.queue,
        "message_id": message.message_id,
        "group_id": message.group_id,
        "sent_ms": message.sent_ms,
        "attributes": {
            name: encode_bytes(value) if isinstance(value, bytes) else value
            for name, value in message.attributes.items()
        },
    }
