"""Restores the messages of a letter byte for byte; a message that was too large for the letter is read from its topic.

Invariant: the restored message is the original one. Lengths, SHA-256 and the rest of the letter's content agree, or
`ContentLostError` says what is missing. All calls block, so do not make them on event loops.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import confluent_kafka as ck

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.deadletters.letter import LetterSource
from tidemill.deadletters.payloads import Blob
from tidemill.runtime.kafka.client import CALL_SECONDS, LibraryLog, advise_start, describe_client_error, scrub
from tidemill.runtime.kafka.record_headers import read_headers
from tidemill.runtime.kafka.source_message import SourceMessage

#: How long reading an existing message may take.
READ_SECONDS = 15.0

#: Reads the message at (topic, partition, offset); None if it no longer exists.
Read = Callable[[str, int, int], SourceMessage | None]


class ContentLostError(Exception):
    """The content of a message is neither in its letter nor in its topic; the text names the message."""


def restore_message(source: LetterSource, read: Read) -> SourceMessage:
    """Return a message as it was.

    Args:
        source: The message in the letter.
        read: Called for the message if the letter does not have all of its content.

    Raises:
        ContentLostError: The message cannot be restored.
        RemoteError: The brokers do not answer.
    """
    values = (source.key, source.value, *(value for _, value in source.headers))
    if not any(isinstance(value, Blob) and value.dropped for value in values):
        try:
            return SourceMessage(
                source.topic,
                source.partition,
                source.offset,
                _decode(source.key),
                _decode(source.value),
                tuple((name, _decode(value)) for name, value in source.headers),
                source.timestamp,
                headers_error=source.headers_error,
            )
        except ValueError as error:
            raise ContentLostError(f"{_locate(source)}: its letter has invalid base64: {error}") from None
    found = read(source.topic, source.partition, source.offset)
    if found is None:
        raise ContentLostError(f"{_locate(source)} is no longer in its topic, and was too large for the letter")
    _check(source, found)
    return found


def _decode(value: str | Blob | None) -> bytes | None:
    if isinstance(value, Blob):
        return value.to_bytes()
    return value.encode() if value is not None else None


def _check(source: LetterSource, found: SourceMessage) -> None:
    """Compare the message from the topic with the letter, because a topic may have been deleted and recreated."""
    same = found.timestamp == source.timestamp or source.timestamp < 0
    if not (isinstance(source.value, Blob) and source.value.length is None and source.value.dropped):
        names = [name for name, _ in source.headers] == [name for name, _ in found.headers]
        pairs = [(source.key, found.key), (source.value, found.value)]
        pairs += [(value, there) for (_, value), (_, there) in zip(source.headers, found.headers, strict=False)]
        same = same and names and all(_agree(value, there) for value, there in pairs)
    if not same:
        raise ContentLostError(f"{_locate(source)} is a different message now; the topic was recreated or rewritten")


def _agree(value: str | Blob | None, there: bytes | None) -> bool:
    if isinstance(value, Blob) and value.dropped:
        return there is not None and len(there) == value.length and hashlib.sha256(there).hexdigest() == value.sha256
    return _decode(value) == there


def _locate(source: LetterSource) -> str:
    return f"{source.topic}/{source.partition}/{source.offset}"


class SourceReader:
    """Reads single messages of topics by their position.

    Args:
        settings: The pipeline's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._brokers = settings.kafka.brokers
        self._config = {"bootstrap.servers": self._brokers, **settings.kafka.client_config}
        self._consumer: ck.Consumer | None = None

    def _connect(self) -> ck.Consumer:
        if self._consumer is None:
            own = {
                "group.id": "tidemill-dlq",
                "enable.auto.commit": False,
                # A removed offset then leads to another message, which the caller recognises.
                "auto.offset.reset": "earliest",
                # The messages were committed before they were dead-lettered; and reads must not wait for our open
                # transactions.
                "isolation.level": "read_uncommitted",
                "enable.partition.eof": True,
                "queued.min.messages": 1,
                "fetch.wait.max.ms": 20,
            }
            self._consumer = ck.Consumer({**self._config, **own}, logger=LibraryLog())
        return self._consumer

    def read(self, topic: str, partition: int, offset: int) -> SourceMessage | None:
        """Return the message at a position, None if it no longer exists.

        Raises:
            RemoteError: The brokers do not answer.
        """
        consumer = self._connect()
        position = f"{topic}/{partition}/{offset}"
        deadline = time.monotonic() + READ_SECONDS
        try:
            consumer.assign([ck.TopicPartition(topic, partition, offset)])
            while time.monotonic() < deadline:
                message = consumer.poll(0.1)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    return _convert(message) if message.offset() == offset else None
                if error.code() in (ck.KafkaError._PARTITION_EOF, *_NO_SUCH_PLACE):
                    return None
        except ck.KafkaException as error:
            text = scrub(describe_client_error(error), self._config)
            raise RemoteError(f"{position} cannot be read at {self._brokers}: {text}") from None
        raise RemoteError(
            f"{position}: no answer from Kafka at {self._brokers} within {READ_SECONDS:g} s; "
            f"{advise_start(self._brokers)}"
        )

    def find_range(self, topic: str, partition: int) -> tuple[int, int] | None:
        """Return the first offset and the end of a partition; None if the partition does not exist.

        Raises:
            RemoteError: The brokers do not answer.
        """
        try:
            found = self._connect().get_watermark_offsets(ck.TopicPartition(topic, partition), timeout=CALL_SECONDS)
        except ck.KafkaException as error:
            if error.args[0].code() in _NO_SUCH_PLACE:
                return None
            text = scrub(describe_client_error(error), self._config)
            raise RemoteError(f"{topic}/{partition} cannot be looked up at {self._brokers}: {text}") from None
        if found is None:
            advice = advise_start(self._brokers)
            raise RemoteError(f"{topic}/{partition}: no answer from Kafka at {self._brokers}; {advice}")
        return found

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()


_NO_SUCH_PLACE = (
    ck.KafkaError.UNKNOWN_TOPIC_OR_PART,
    ck.KafkaError._UNKNOWN_TOPIC,
    ck.KafkaError._UNKNOWN_PARTITION,
    ck.KafkaError._AUTO_OFFSET_RESET,
    ck.KafkaError.OFFSET_OUT_OF_RANGE,
)


def _convert(message: ck.Message) -> SourceMessage:
    kind, timestamp = message.timestamp()
    headers, headers_error = read_headers(message)
    return SourceMessage(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        message.key(),
        message.value(),
        headers,
        timestamp if kind else -1,
        headers_error=headers_error,
    )
