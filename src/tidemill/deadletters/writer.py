"""Dead letters: what a letter says, how it becomes bytes that the broker takes, and the topic it is written to.

Invariants: any letter can be encoded, whatever a user put into it; a letter that is too large loses bodies
before it loses anything else, and never its positions as long as they fit; a letter is confirmed by the broker
before `done` is called, and is tried again for ever until then, unless `dlq.on_send_failure` is `drop`: then a letter
that is not taken is counted as dropped, and logged. This module does not decide what is dead-lettered.
"""

from __future__ import annotations

import asyncio
import base64
import enum
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import confluent_kafka as ck
import msgspec
import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.core.retry import Backoff
from tidemill.deadletters.payloads import Blob as Blob
from tidemill.deadletters.payloads import digest_of, json_bytes, without_body
from tidemill.deadletters.payloads import payload_json as payload_json
from tidemill.runtime.kafka_client import TopicAdmin, client_config, scrubbed
from tidemill.runtime.log import limited
from tidemill.runtime.messages import SourceMessage
from tidemill.runtime.producer import LoopProducer, Outcomes, producer_config, too_large

log = structlog.get_logger(__name__)

SCHEMA_VERSION = 1
#: This much of the end of a task's stderr goes into its letter.
STDERR_BYTES = 4096
#: What a record costs beyond its value: headers of record and batch.
RECORD_OVERHEAD_BYTES = 512
#: A letter that is refused for its size is made no smaller than this.
_LEAST_LETTER_BYTES = 1_000
#: The header of a message that was dead-lettered and sent again: how often, as a decimal number.
REDRIVES_HEADER = "tidemill-redrives"
#: Its companion: what happened each time, as JSON, oldest first.
HISTORY_HEADER = "tidemill-history"


class LetterKind(enum.StrEnum):
    """What went wrong with the message."""

    PARSE = "parse"
    TOMBSTONE = "tombstone"
    ARRANGE = "arrange"
    TASK = "task"
    HOOK = "hook"
    DELIVERY = "delivery"
    OVERSIZE = "oversize"
    REJECTED = "rejected"
    FAILED = "failed"


class LetterSource(msgspec.Struct):
    """One source message; key, value and headers are text where they are UTF-8, else a `Blob`.

    An empty `Blob` as value means that nothing but the position is left.
    """

    topic: str
    partition: int
    offset: int
    key: str | Blob | None = None
    headers: list[tuple[str, str | Blob | None]] = []
    timestamp: int = -1
    value: str | Blob | None = None


class Letter(msgspec.Struct, kw_only=True):
    """One dead letter.

    Attributes:
        kind: What went wrong.
        error: In words.
        original_payloads: JSON strings, each a whole payload as a hook returned it.
        sink_name: The sink that refused them, '' where none did.
        sink_type: Its type.
        partition: The source partition, None where there is none.
        attempt_count: How often the task or the delivery was tried.
        redrives: How often the message was dead-lettered and sent again before.
        task_id: The task concerned.
        args: Its arguments.
        exit_code: What it returned.
        stderr: The end of its standard error.
        sources: The messages it worked for.
        timestamp: When the letter was written, ISO 8601, UTC.
        sources_dropped: How many more messages it worked for, whose positions did not fit.
    """

    kind: LetterKind
    error: str
    schema_version: int = SCHEMA_VERSION
    letter_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    original_payloads: list[str] = []
    sink_name: str = ""
    sink_type: str = ""
    timestamp: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    partition: int | None = None
    attempt_count: int = 0
    redrives: int = 0
    task_id: str | None = None
    args: list[str] = []
    exit_code: int | None = None
    stderr: str = ""
    sources: list[LetterSource] = []
    sources_dropped: int = 0


def text_or_blob(data: bytes | str | None) -> str | Blob | None:
    """Return bytes as text where they are UTF-8, else as base64."""
    if data is None or isinstance(data, str):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Blob(base64=base64.b64encode(data).decode())


def letter_sources(messages: Iterable[SourceMessage]) -> list[LetterSource]:
    """Return what a letter says about its source messages."""
    return [
        LetterSource(
            message.topic,
            message.partition,
            message.offset,
            text_or_blob(message.key),
            [(name, text_or_blob(value)) for name, value in message.headers],
            message.timestamp,
            text_or_blob(message.value),
        )
        for message in messages
    ]


def redrives_in(headers: Iterable[tuple[str, bytes | str | Blob | None]]) -> int:
    """Return how often a message was sent again before, by its headers; 0 where they do not say.

    Example:
        >>> redrives_in([("trace", b"1"), ("tidemill-redrives", b"2")])
        2
    """
    found = [value for name, value in headers if name == REDRIVES_HEADER]
    text = found[-1] if found else None
    if isinstance(text, str):
        text = text.encode()
    # Anybody can write headers: what is no small number counts for nothing.
    return int(text) if isinstance(text, bytes) and text.isdigit() and len(text) < 10 else 0


def redrives_of(messages: Iterable[SourceMessage]) -> int:
    """Return how often the most travelled of the messages was sent again before."""
    return max((redrives_in(message.headers) for message in messages if message.headers), default=0)


def stderr_tail(stderr: str | bytes) -> str:
    """Return the last 4 KiB."""
    data = stderr.encode("utf-8", "replace") if isinstance(stderr, str) else stderr
    return data[-STDERR_BYTES:].decode("utf-8", "replace")


def encode_letter(letter: Letter, limit_bytes: int | None = None) -> bytes:
    """Return a letter as JSON, shrunk where it is larger than `limit_bytes`.

    Bodies go first (length and SHA-256 stay), then everything of a source but its position, then arguments,
    payloads and most of stderr, and at the very last the sources that still do not fit.
    """
    encoded = json_bytes(letter)
    if limit_bytes is None or len(encoded) <= limit_bytes:
        return encoded
    for smaller in (_without_bodies, _positions_only, _bare):
        letter = smaller(letter)
        encoded = json_bytes(letter)
        if len(encoded) <= limit_bytes:
            return encoded
    while letter.sources and len(encoded) > limit_bytes:
        kept = letter.sources[: len(letter.sources) // 2]
        dropped = letter.sources_dropped + len(letter.sources) - len(kept)
        letter = msgspec.structs.replace(letter, sources=kept, sources_dropped=dropped)
        encoded = json_bytes(letter)
    return encoded


def decode_letter(data: bytes) -> Letter:
    """Return a letter as it was written.

    Raises:
        msgspec.ValidationError: The bytes are no letter.
    """
    return msgspec.json.decode(data, type=Letter)


def _digest(value: str | Blob | None) -> str | Blob | None:
    """Replace a body by its length and SHA-256, unless that is longer than the body."""
    if value is None or (isinstance(value, str) and len(value) <= 100):
        return value
    if isinstance(value, Blob):
        if value.base64 is None or len(value.base64) <= 100:
            return value
        return digest_of(value.data())
    return digest_of(value.encode("utf-8", "replace"))


def _without_bodies(letter: Letter) -> Letter:
    sources = [
        msgspec.structs.replace(
            source,
            key=_digest(source.key),
            value=_digest(source.value),
            headers=[(name, _digest(value)) for name, value in source.headers],
        )
        for source in letter.sources
    ]
    payloads = [without_body(payload) for payload in letter.original_payloads]
    return msgspec.structs.replace(letter, sources=sources, original_payloads=payloads)


def _positions_only(letter: Letter) -> Letter:
    sources = [
        LetterSource(s.topic, s.partition, s.offset, timestamp=s.timestamp, value=Blob()) for s in letter.sources
    ]
    return msgspec.structs.replace(letter, sources=sources)


def _bare(letter: Letter) -> Letter:
    return msgspec.structs.replace(
        letter, args=[], stderr=letter.stderr[-200:], error=letter.error[:500], original_payloads=[]
    )


class DeadLetters(Protocol):
    """Where letters go.

    Attributes:
        written: Letters that the broker confirmed.
        dropped: Letters that were given up because their topic did not take them.
    """

    written: int
    dropped: int

    async def open(self) -> None:
        """Make sure that letters can be written."""

    def put(self, letter: Letter, done: Callable[[], None]) -> None:
        """Write a letter; `done` is called once it is confirmed or dropped, on the loop and never inside this call."""

    def stalled(self) -> str | None:
        """Say why letters wait, None while they do not."""

    async def close(self) -> None:
        """Release everything; `done` of what is not confirmed is never called."""


def letter_topic_limit(topic: str, admin_config: Mapping[str, Any]) -> int | None:
    """Check that the dead-letter topic exists, or create it; blocking.

    Returns:
        The largest batch that it takes, in bytes; None where the brokers do not tell.

    Raises:
        ConfigError: It does not exist and we may not create it.
        RemoteError: The brokers do not answer.
    """
    admin = TopicAdmin(admin_config, "dlq")
    if not admin.exists(topic, wait_seconds=0.0):
        admin.create(topic)
        if not admin.exists(topic):
            raise RemoteError(f"dlq: topic {topic!r} was created, but is not there yet; try again")
        log.info("dead-letter topic created", topic=topic)
    return admin.max_message_bytes(topic)


class KafkaDeadLetters:
    """Letters as records of the dead-letter topic.

    Args:
        settings: The pipeline's settings.
        backoff: Between the tries of one letter.
    """

    def __init__(self, settings: Settings, backoff: Backoff | None = None) -> None:
        """Prepare; nothing is connected before `open`."""
        self._topic = settings.dlq_topic
        self._config = producer_config(settings.kafka, settings.dlq_brokers, {})
        self._admin_config = client_config(settings.kafka, settings.dlq_brokers, {})
        self._backoff = backoff or Backoff(0.1, 10.0, 2.0)
        self._limit = 1_000_000
        self._drops = settings.dlq.on_send_failure == "drop"
        self._waiting = 0
        self._failing: tuple[float, str] | None = None
        self._timers: set[asyncio.TimerHandle] = set()
        self._producer: LoopProducer | None = None
        self._closed = False
        self.written = 0
        self.dropped = 0

    async def open(self) -> None:
        """Check that the topic exists, or create it.

        Raises:
            ConfigError: It does not exist and we may not create it.
            RemoteError: The brokers do not answer.
        """
        await asyncio.to_thread(self._prepare)
        self._producer = LoopProducer(self._config, "dlq")
        self._producer.open()

    def _prepare(self) -> None:
        limit = letter_topic_limit(self._topic, self._admin_config)
        if limit is None:
            # One refusal for size concerns all records of a batch: keep innocent letters out of it.
            self._config["batch.num.messages"] = 1
        else:
            # librdkafka knows these bounds: at least 1000 bytes, at most a billion.
            self._limit = limit
            self._config["message.max.bytes"] = max(1_000, min(limit, 1_000_000_000))
            self._config["batch.size"] = max(1, min(limit, 1_000_000))

    def put(self, letter: Letter, done: Callable[[], None]) -> None:
        """Write a letter; see `DeadLetters.put`."""
        self._waiting += 1
        self._write(letter, done, 1, self._limit - RECORD_OVERHEAD_BYTES)

    def _write(self, letter: Letter, done: Callable[[], None], attempt: int, limit: int) -> None:
        assert self._producer is not None
        body = encode_letter(letter, limit)

        def answered(sent: asyncio.Future[Outcomes]) -> None:
            error = sent.result()[0]
            if self._closed:
                return
            if error is None:
                self.written += 1
                self._settled(done)
                return
            smaller = len(body) * 3 // 4 if too_large(error) else limit
            if self._drops and (smaller == limit or smaller < _LEAST_LETTER_BYTES):
                self._drop(letter, error, done)
            else:
                self._later(error, attempt, lambda: self._write(letter, done, attempt + 1, smaller))

        self._producer.send(self._topic, [(None, body)]).add_done_callback(answered)

    def _drop(self, letter: Letter, error: ck.KafkaError, done: Callable[[], None]) -> None:
        self.dropped += 1
        # The one trace of the message that is left: each is logged, and says where it was.
        log.error(
            "a dead letter is dropped: its topic does not take it",
            topic=self._topic,
            error=scrubbed(error.str(), self._config),
            letter_id=letter.letter_id,
            kind=letter.kind.value,
            sources=[f"{source.topic}/{source.partition}/{source.offset}" for source in letter.sources[:10]],
            source_count=len(letter.sources),
        )
        self._settled(done)

    def _settled(self, done: Callable[[], None]) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._failing = None
        done()

    def _later(self, error: ck.KafkaError, attempt: int, again: Callable[[], None]) -> None:
        text = scrubbed(error.str(), self._config)
        self._failing = (self._failing[0] if self._failing else time.monotonic(), text)
        limited(log, 10.0).error("a dead letter is not taken; trying again", topic=self._topic, error=text)

        def due() -> None:
            self._timers.discard(timer)
            again()

        delay = self._backoff.delay(attempt, random.getrandbits(32))
        timer = asyncio.get_running_loop().call_later(delay, due)
        self._timers.add(timer)

    def stalled(self) -> str | None:
        """Say how many letters wait, since when and why."""
        if self._failing is None:
            return None
        since, text = self._failing
        seconds = time.monotonic() - since
        return f"{self._waiting} letters wait for topic {self._topic} for {seconds:.0f} s: {text}"

    async def close(self) -> None:
        """Give up what is not confirmed yet, and disconnect."""
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        if self._producer is not None:
            await self._producer.close()
