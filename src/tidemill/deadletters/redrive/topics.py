"""Sends the messages of dead letters again: to the topics they came from, or to one topic.

Invariants: a message keeps its original key, value and headers, except that unreadable headers are dropped on request.
Only tidemill's own headers, at the end, record its redrives. On the dead letters' own brokers, records and cursor are
one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tidemill.config.kafka_names import describe_creation
from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import UnsentReason
from tidemill.core.errors import ConfigError
from tidemill.deadletters.letter import HISTORY_HEADER, REDRIVES_HEADER, Letter, count_redrives, read_history_header
from tidemill.deadletters.redrive.cursor import RedriveCursor
from tidemill.deadletters.redrive.producer import PlainProducer, ResentRecord
from tidemill.deadletters.redrive.targets import NotSentError, Positions, RedriveItem, Unsent
from tidemill.deadletters.restore import ContentLostError, Read, SourceReader, restore_message
from tidemill.runtime.kafka.client import TopicAdmin, make_client_config
from tidemill.runtime.kafka.producer import make_producer_config
from tidemill.runtime.kafka.record_headers import UnreadableHeadersError, check_headers
from tidemill.runtime.kafka.source_message import Header, SourceMessage

#: How many of the latest letters the header's history holds, and how many characters of each error.
HISTORY_LETTERS = 10
HISTORY_ERROR = 300


class TopicTarget:
    """Sends messages to the topics they came from, or to one topic.

    Args:
        settings: The pipeline's settings.
        cursor: Saves positions, and sends if the brokers are the same; None sends nothing.
        topic: The topic to send to; '' is the topic that each message came from.
        drop_headers: Send a message with unreadable headers without them.
    """

    def __init__(
        self, settings: Settings, cursor: RedriveCursor | None, topic: str, *, drop_headers: bool = False
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._drop_headers = drop_headers
        self._cursor = cursor
        self._reader = SourceReader(settings)
        # Compares the broker names, not their addresses; at worst, a possible transaction is not used.
        self._same = not settings.dlq.path and settings.dlq_brokers == settings.kafka.brokers
        self._plain: PlainProducer | None = None
        self._partitions: dict[str, int] = {}
        self._admin = TopicAdmin(make_client_config(settings.kafka, "", {}), "dlq redrive")

    def open(self) -> None:
        """Connect the producer, and fence an older process of the same redrive."""
        if self._cursor is None:
            return
        self._cursor.open()
        if not self._same:
            config = make_producer_config(self._settings.kafka, "", limit_batches(self._settings, self._topic))
            self._plain = PlainProducer(config, "dlq redrive")

    def prepare(self, letter: Letter, partition: int, offset: int) -> RedriveItem:
        """Restore the letter's messages; see `RedriveTarget.prepare`."""
        try:
            records = make_records(letter, self._reader.read, self._topic or None, drop_headers=self._drop_headers)
        except ContentLostError as error:
            raise NotSentError(UnsentReason.LOST, str(error)) from None
        except UnreadableHeadersError as error:
            raise NotSentError(
                UnsentReason.HEADERS, f"{error}; --drop-headers sends the message without headers"
            ) from None
        for record in records:
            if record.partition >= self._count_partitions(record.topic):
                record.partition = -1
        targets = sorted({f"{r.topic}/{r.partition}" if r.partition >= 0 else r.topic for r in records})
        size = sum(len(record.key or b"") + len(record.value or b"") for record in records)
        return RedriveItem(letter, partition, offset, records, len(records), size, ", ".join(targets))

    def _count_partitions(self, topic: str) -> int:
        """Return how many partitions a topic has; the answer is cached."""
        if topic not in self._partitions:
            if topic == self._settings.dlq_topic and self._same:
                raise ConfigError(f"dlq redrive: messages would go to the dead-letter topic {topic!r} itself")
            count = self._admin.partition_count(topic)
            if count is None:
                brokers = self._settings.kafka.brokers
                raise ConfigError(
                    f"dlq redrive: topic {topic!r} does not exist at {brokers}; "
                    f"{describe_creation(topic, brokers)}, or send to another one with --to TOPIC"
                )
            self._partitions[topic] = count
        return self._partitions[topic]

    def send(self, items: Sequence[RedriveItem], positions: Positions) -> Unsent:
        """Send in one transaction, or before the cursor is saved; see `RedriveTarget.send`."""
        assert self._cursor is not None
        if self._plain is None:
            return self._send_in_transaction(items, positions)
        unsent = []
        for item, error in self._send_plain(self._plain, items):
            unsent.append((item, UnsentReason.REFUSED, error))
        self._cursor.commit((), positions)
        return unsent

    def _send_in_transaction(self, items: Sequence[RedriveItem], positions: Positions) -> Unsent:
        """Send all letters or none; if one is refused, halve the batch until that one is alone."""
        assert self._cursor is not None
        errors = self._cursor.commit([record for item in items for record in item.content], positions)
        if not errors:
            return []
        if len(items) > 1:
            half = len(items) // 2
            first = self._send_in_transaction(items[:half], _find_positions(items[:half]))
            return first + self._send_in_transaction(items[half:], positions)
        (item,) = items
        smaller = [drop_history(record) for record in item.content]
        if smaller != item.content and not self._cursor.commit(smaller, positions):
            return []
        self._cursor.commit((), positions)
        return [(item, UnsentReason.REFUSED, _describe_refusal(item.content, errors))]

    def _send_plain(self, plain: PlainProducer, items: Sequence[RedriveItem]) -> list[tuple[RedriveItem, str]]:
        records = [record for item in items for record in item.content]
        owners = [item for item in items for _ in item.content]
        errors = plain.send(records)
        again = sorted(errors)
        still = plain.send([drop_history(records[index]) for index in again]) if again else {}
        refused: dict[int, tuple[RedriveItem, str]] = {}
        for index, error in still.items():
            item = owners[again[index]]
            refused.setdefault(id(item), (item, _describe_refusal([records[again[index]]], {0: error})))
        return list(refused.values())

    def close(self) -> None:
        self._reader.close()
        if self._plain is not None:
            self._plain.close()


def limit_batches(settings: Settings, topic: str) -> dict[str, Any]:
    """Return producer overrides that keep batches within the topic's size limit, if the limit is known."""
    admin = TopicAdmin(make_client_config(settings.kafka, "", {}), "dlq redrive")
    limit = admin.max_message_bytes(topic or settings.kafka.source_topic)
    return {"batch.size": max(1, min(limit, 500_000))} if limit is not None else {"batch.num.messages": 1}


def _find_positions(items: Sequence[RedriveItem]) -> dict[int, int]:
    return {item.partition: item.offset + 1 for item in items}


def _describe_refusal(records: Sequence[ResentRecord], errors: Mapping[int, Any]) -> str:
    index, error = next(iter(errors.items()))
    return f"topic {records[index].topic}: {error.name()}: {error.str()}"


def make_records(letter: Letter, read: Read, topic: str | None, *, drop_headers: bool = False) -> list[ResentRecord]:
    """Return the records that send a letter's messages again, each once.

    Args:
        letter: The letter.
        read: Reads a message from its topic.
        topic: The topic to send to; None is the topic that each message came from.
        drop_headers: Send a message with unreadable headers without them.

    Raises:
        ContentLostError: A message cannot be restored.
        UnreadableHeadersError: The headers of a message cannot be read, and `drop_headers` is false.
        RemoteError: The brokers do not answer.
    """
    seen: set[tuple[str, int, int]] = set()
    records = []
    for source in letter.sources:
        position = (source.topic, source.partition, source.offset)
        if position in seen:
            continue
        seen.add(position)
        message = restore_message(source, read)
        if not drop_headers:
            check_headers(message)
        records.append(
            ResentRecord(
                topic or message.topic,
                -1 if topic else message.partition,
                message.key,
                message.value,
                make_headers(letter, message),
            )
        )
    return records


def make_headers(letter: Letter, message: SourceMessage) -> list[Header]:
    """Return a message's own headers, and those about its redrives."""
    own = [(name, value) for name, value in message.headers if name not in (REDRIVES_HEADER, HISTORY_HEADER)]
    history = [*read_history_header(message.headers), _make_entry(letter, message)][-HISTORY_LETTERS:]
    return [
        *own,
        (REDRIVES_HEADER, str(count_redrives(message.headers) + 1).encode()),
        (HISTORY_HEADER, msgspec.json.encode(history)),
    ]


def drop_history(record: ResentRecord) -> ResentRecord:
    """Return a record without its history, which is the only header that may be dropped."""
    headers = [(name, value) for name, value in record.headers if name != HISTORY_HEADER]
    return msgspec.structs.replace(record, headers=headers)


def _make_entry(letter: Letter, message: SourceMessage) -> dict[str, Any]:
    return {
        "letter_id": letter.letter_id,
        "kind": letter.kind.value,
        "error": letter.error[:HISTORY_ERROR].encode("utf-8", "replace").decode(),
        "timestamp": letter.timestamp,
        "attempt_count": letter.attempt_count,
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "message_timestamp": message.timestamp,
    }
