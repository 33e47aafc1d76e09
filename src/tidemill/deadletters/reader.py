"""Reads the dead-letter topic: a stream of letters between two offsets, never the topic as a whole.

Invariants: memory does not grow with the topic. A record that is not a letter is reported at its position and does not
stop the reading. Only letters of committed transactions are visible. Reading joins no group and commits nothing.
All calls block, so do not make them on event loops.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any

import confluent_kafka as ck
import msgspec

from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import Facts
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.deadletters.letter import Letter, decode_letter
from tidemill.deadletters.payloads import Blob
from tidemill.runtime.kafka.client import (
    CALL_SECONDS,
    LibraryLog,
    TopicAdmin,
    advise_start,
    describe_client_error,
    make_client_config,
    scrub,
)
from tidemill.runtime.kafka.topic_ids import TopicIds

#: Brokers are considered unreachable if they send nothing for this long although letters remain.
SILENCE_SECONDS = 30.0
#: How long to wait for letters before the caller may do something else.
TICK_SECONDS = 0.1
#: A record's timestamp may be later than the letter's, by another clock; reading starts this much earlier.
CLOCK_SECONDS = 3600.0


class FoundLetter(msgspec.Struct):
    """One position of the topic: a letter, or why the record is not a letter.

    Attributes:
        partition: The partition.
        offset: The offset.
        letter: The letter, if the record is one.
        problem: Why the record is not a letter.
        size_bytes: The size of the record's value.
        file: The file, if letters are in files; `offset` is then the row.
    """

    partition: int
    offset: int
    letter: Letter | None
    problem: str = ""
    size_bytes: int = 0
    file: str = ""


class Reached(msgspec.Struct):
    """A partition was read to its end, `position`."""

    partition: int
    position: int


class LetterReader:
    """The dead-letter topic of a pipeline, for reading; use it in a `with` block.

    Args:
        settings: The pipeline's settings.
        group: The consumer group whose committed offsets `read_committed` returns.

    Raises:
        ConfigError: librdkafka rejects the configuration.
    """

    def __init__(self, settings: Settings, group: str = "tidemill-dlq") -> None:
        """Create the client, which connects at the first call."""
        self.topic = settings.dlq_topic
        self.location = f"topic {self.topic!r}"
        self.brokers = settings.dlq_brokers
        self._group = group
        self._config = make_client_config(settings.kafka, settings.dlq_brokers, {})
        self._heard = ""
        self._consumer = ck.Consumer(
            {
                **self._config,
                "group.id": group,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                # The queue holds whole letters of up to a megabyte.
                "queued.max.messages.kbytes": 16_384,
                "fetch.wait.max.ms": 50,
                "reconnect.backoff.max.ms": 2_000,
                "error_cb": self._on_error,
            },
            logger=LibraryLog(),
        )

    def __enter__(self) -> LetterReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._consumer.close()

    def find_ranges(self) -> dict[int, tuple[int, int]]:
        """Return the first offset and the end of each partition.

        Raises:
            ConfigError: The topic does not exist.
            RemoteError: The brokers do not answer.
        """
        admin = TopicAdmin(self._config, "dlq")
        if not admin.exists(self.topic, wait_seconds=1.0):
            raise ConfigError(
                f"dlq: topic {self.topic!r} does not exist at {self.brokers}: no pipeline has created it yet, or "
                "dlq.topic, kafka.source_topic or the brokers are wrong"
            )
        try:
            known = self._consumer.list_topics(self.topic, timeout=CALL_SECONDS).topics[self.topic].partitions
            return {
                number: self._consumer.get_watermark_offsets(
                    ck.TopicPartition(self.topic, number), timeout=CALL_SECONDS
                )
                for number in sorted(known)
            }
        except ck.KafkaException as error:
            raise self._make_error(error) from None

    def find_topic_id(self) -> str | None:
        """Return the id of the topic, None if it is unknown; a topic that is created again gets another id."""
        return TopicIds(self._config, self.topic).ask(CALL_SECONDS)

    def find_offsets_at(self, seconds: float, ranges: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Return where to start so that every letter written at a time or later is found."""
        at = max(0, int((seconds - CLOCK_SECONDS) * 1000))
        wanted = [ck.TopicPartition(self.topic, number, at) for number in ranges]
        try:
            answers = self._consumer.offsets_for_times(wanted, timeout=CALL_SECONDS)
        except ck.KafkaException as error:
            raise self._make_error(error) from None
        return {each.partition: each.offset if each.offset >= 0 else ranges[each.partition][1] for each in answers}

    def read_committed(self, ranges: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, str]]:
        """Return the group's committed offsets and their metadata, without partitions that have none."""
        wanted = [ck.TopicPartition(self.topic, number) for number in ranges]
        try:
            answers = self._consumer.committed(wanted, timeout=CALL_SECONDS)
        except ck.KafkaException as error:
            raise self._make_error(error) from None
        return {each.partition: (each.offset, each.metadata or "") for each in answers if each.offset >= 0}

    def get_group_metadata(self) -> Any:
        """Return the metadata that a transaction needs to commit offsets for the group."""
        return self._consumer.consumer_group_metadata()

    def stream(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[FoundLetter | Reached | None]:
        """Yield all records, in order within each partition; None now and then while no record arrives.

        Args:
            starts: The first offset to read, by partition.
            ends: The offset to stop at, by partition.

        Raises:
            RemoteError: The brokers stopped answering.
        """
        open_ends = {number: end for number, end in ends.items() if starts.get(number, 0) < end}
        for number in ends.keys() - open_ends.keys():
            yield Reached(number, ends[number])
        self._consumer.assign([ck.TopicPartition(self.topic, n, starts.get(n, 0)) for n in open_ends])
        # Partitions that an earlier call has read to their ends are still paused, and would send nothing.
        self._consumer.resume([ck.TopicPartition(self.topic, n) for n in open_ends])
        silent_seconds = 0.0
        while open_ends:
            # Only the time spent in here counts, because the caller may need long for the letters.
            began = time.monotonic()
            batch = self._consumer.consume(200, TICK_SECONDS)
            silent_seconds = 0.0 if batch else silent_seconds + time.monotonic() - began
            if silent_seconds > SILENCE_SECONDS:
                raise RemoteError(self._complete(f"no records arrive from topic {self.topic!r}"))
            for item in batch:
                yield from self._take(item, open_ends)
            if not batch:
                yield None
        self._consumer.unassign()

    def _take(self, message: ck.Message, open_ends: dict[int, int]) -> Iterator[FoundLetter | Reached]:
        number, offset, error = message.partition() or 0, message.offset() or 0, message.error()
        end = open_ends.get(number)
        if end is None:
            return
        if error is not None:
            if error.code() == ck.KafkaError._PARTITION_EOF:
                yield self._finish(number, end, open_ends)
            elif not error.retriable() and error.code() != ck.KafkaError._ALL_BROKERS_DOWN:
                raise self._make_error(ck.KafkaException(error))
            return
        if offset < end:
            yield _decode_message(message)
        # The last offsets may belong to transaction markers, which never arrive as messages.
        if offset >= end - 1:
            yield self._finish(number, end, open_ends)

    def _finish(self, number: int, end: int, open_ends: dict[int, int]) -> Reached:
        del open_ends[number]
        self._consumer.pause([ck.TopicPartition(self.topic, number)])
        return Reached(number, end)

    def _on_error(self, error: ck.KafkaError) -> None:
        if error.code() != ck.KafkaError._ALL_BROKERS_DOWN:
            self._heard = scrub(error.str(), self._config)

    def _make_error(self, error: ck.KafkaException) -> RemoteError:
        return RemoteError(self._complete(scrub(describe_client_error(error), self._config)))

    def _complete(self, said: str) -> str:
        heard = f" ({self._heard})" if self._heard else ""
        return f"dlq: {said} at {self.brokers}{heard}; {advise_start(self.brokers)}"


def _decode_message(message: ck.Message) -> FoundLetter:
    found = FoundLetter(message.partition() or 0, message.offset() or 0, None)
    value = message.value()
    if value is None:
        found.problem = "a tombstone"
        return found
    return decode_found(found, value)


def decode_found(found: FoundLetter, value: bytes) -> FoundLetter:
    """Fill in the letter at a position, or why the record is not a letter."""
    found.size_bytes = len(value)
    try:
        letter = decode_letter(value)
        datetime.fromisoformat(letter.timestamp)
        found.letter = letter
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        found.problem = f"not a letter: {error}"
    except ValueError:
        found.problem = f"not a letter: timestamp {letter.timestamp[:40]!r} is not a time"
    return found


def extract_facts(letter: Letter, *, text: bool = False) -> Facts:
    """Return the facts that decide whether a letter is sent again.

    Args:
        letter: The letter.
        text: Include all content that a text filter searches.
    """
    return Facts(
        letter.letter_id,
        letter.kind.value,
        letter.sink_type,
        letter.sink_name,
        letter.written_at,
        tuple(shown for source in letter.sources if (shown := show_bytes(source.key)) is not None),
        letter.redrives,
        len(letter.sources),
        len(letter.original_payloads),
        "\n".join(_list_texts(letter)) if text else "",
    )


def show_bytes(value: str | Blob | None) -> str | None:
    """Return a key, value or header as text, or as base64; None if it is missing or was dropped."""
    if isinstance(value, Blob):
        return value.base64 if value.base64 is not None else value.text
    return value


def _list_texts(letter: Letter) -> Iterator[str]:
    yield from (letter.letter_id, letter.error, letter.stderr, letter.task_id or "", *letter.args)
    yield from letter.original_payloads
    for source in letter.sources:
        for value in (source.key, source.value, *(value for _, value in source.headers)):
            yield show_bytes(value) or ""
