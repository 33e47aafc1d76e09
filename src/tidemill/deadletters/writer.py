"""Writes dead letters to their topic.

Invariants: `done` is called once the broker confirmed a letter. Until then the letter is retried indefinitely, unless
`dlq.on_send_failure` is `drop`; then a letter that the topic refuses is counted as dropped, and logged. A letter that
is larger than the topic accepts is shrunk until it fits.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import confluent_kafka as ck
import msgspec
import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.core.retry import Backoff
from tidemill.core.wording import format_count
from tidemill.deadletters.letter import Letter, encode_letter
from tidemill.runtime.kafka.client import TopicAdmin, make_client_config, scrub
from tidemill.runtime.kafka.producer import LoopProducer, Outcomes, is_too_large, make_producer_config
from tidemill.runtime.log.setup import throttle

log = structlog.get_logger(__name__)

#: The overhead of a record: the headers of the record and of its batch.
RECORD_OVERHEAD_BYTES = 512
#: A letter that is refused for its size is not shrunk below this.
_LEAST_LETTER_BYTES = 1_000


class LetterStatistics(msgspec.Struct, frozen=True):
    """The numbers of letters that were written or dropped.

    Attributes:
        written: Confirmed letters.
        kinds: Confirmed letters by kind; the mapping changes as more are confirmed.
        dropped: Letters that were given up because their topic refused them.
    """

    written: int
    kinds: Mapping[str, int]
    dropped: int = 0


class DeadLetters(Protocol):
    """Writes letters to their destination."""

    async def open(self) -> None:
        """Connect, and check that letters can be written."""

    def put(self, letter: Letter, done: Callable[[], None]) -> None:
        """Write a letter; `done` is called once it is confirmed or dropped, on the loop, never inside this call."""

    def statistics(self) -> LetterStatistics:
        """Return how many letters were written or dropped so far."""
        ...

    def describe_wait(self) -> str | None:
        """Return why letters wait; None if none do."""

    async def close(self) -> None:
        """Release everything; `done` of unconfirmed letters is never called."""


def prepare_letter_topic(topic: str, admin_config: Mapping[str, Any]) -> int | None:
    """Check that the dead-letter topic exists, or create it; blocking.

    Returns:
        The topic's largest batch size in bytes; None if the brokers do not report it.

    Raises:
        ConfigError: The topic does not exist and may not be created.
        RemoteError: The brokers do not answer.
    """
    admin = TopicAdmin(admin_config, "dlq")
    if not admin.exists(topic, wait_seconds=0.0):
        admin.create(topic)
        if not admin.exists(topic):
            raise RemoteError(f"dlq: topic {topic!r} was created, but is not available yet; try again")
        log.info("dead-letter topic created", topic=topic)
    return admin.max_message_bytes(topic)


#: The topic was deleted while the pipeline was running.
_MISSING = (ck.KafkaError.UNKNOWN_TOPIC_OR_PART, ck.KafkaError._UNKNOWN_TOPIC)


class KafkaDeadLetters:
    """Letters as records of the dead-letter topic.

    Args:
        settings: The pipeline's settings.
        backoff: The backoff between the attempts to write one letter.
    """

    def __init__(self, settings: Settings, backoff: Backoff | None = None) -> None:
        self._topic = settings.dlq_topic
        self._config = make_producer_config(settings.kafka, settings.dlq_brokers, {})
        self._admin_config = make_client_config(settings.kafka, settings.dlq_brokers, {})
        self._backoff = backoff or Backoff(0.1, 10.0, 2.0)
        self._limit = 1_000_000
        self._drops = settings.dlq.on_send_failure == "drop"
        self._waiting = 0
        self._failing: tuple[float, str] | None = None
        self._timers: set[asyncio.TimerHandle] = set()
        self._producer: LoopProducer | None = None
        self._closed = False
        self._written = 0
        self._dropped = 0
        self._kinds: Counter[str] = Counter()

    async def open(self) -> None:
        """Check that the topic exists, or create it.

        Raises:
            ConfigError: The topic does not exist and may not be created.
            RemoteError: The brokers do not answer.
        """
        await asyncio.to_thread(self._prepare)
        self._producer = LoopProducer(self._config, "dlq")
        self._producer.open()

    def _prepare(self) -> None:
        limit = prepare_letter_topic(self._topic, self._admin_config)
        if limit is None:
            # A refusal for size concerns all records of a batch, so each letter gets a batch of its own.
            self._config["batch.num.messages"] = 1
        else:
            # librdkafka accepts values from 1000 bytes to a billion.
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
                self._written += 1
                self._kinds[letter.kind.value] += 1
                self._settle(done)
                return
            smaller = len(body) * 3 // 4 if is_too_large(error) else limit
            if self._drops and (smaller == limit or smaller < _LEAST_LETTER_BYTES):
                self._drop(letter, error, done)
            else:
                self._retry_later(error, attempt, lambda: self._write(letter, done, attempt + 1, smaller))

        self._producer.send(self._topic, [(None, body)]).add_done_callback(answered)

    def _drop(self, letter: Letter, error: ck.KafkaError, done: Callable[[], None]) -> None:
        self._dropped += 1
        # The log is the only remaining trace of the messages, so it names their positions.
        log.error(
            "a dead letter is dropped, because its topic refuses it",
            topic=self._topic,
            error=scrub(error.str(), self._config),
            letter_id=letter.letter_id,
            kind=letter.kind.value,
            sources=[f"{source.topic}/{source.partition}/{source.offset}" for source in letter.sources[:10]],
            source_count=len(letter.sources),
        )
        self._settle(done)

    def _settle(self, done: Callable[[], None]) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._failing = None
        done()

    def _retry_later(self, error: ck.KafkaError, attempt: int, again: Callable[[], None]) -> None:
        text = scrub(error.str(), self._config)
        if error.code() in _MISSING:
            text += "; create the topic again, or restart the pipeline, which creates it"
        self._failing = (self._failing[0] if self._failing else time.monotonic(), text)
        throttle(log, 10.0).error("a dead letter is refused; trying again", topic=self._topic, error=text)

        def due() -> None:
            self._timers.discard(timer)
            again()

        delay = self._backoff.compute_delay(attempt, random.getrandbits(32))
        timer = asyncio.get_running_loop().call_later(delay, due)
        self._timers.add(timer)

    def statistics(self) -> LetterStatistics:
        return LetterStatistics(self._written, self._kinds, self._dropped)

    def describe_wait(self) -> str | None:
        """Return how many letters wait, for how long and why; None if none do."""
        if self._failing is None:
            return None
        since, text = self._failing
        seconds = time.monotonic() - since
        return f"{format_count(self._waiting, 'letter')} waiting for topic {self._topic} for {seconds:.0f} s: {text}"

    async def close(self) -> None:
        """Give up unconfirmed letters, and disconnect."""
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        if self._producer is not None:
            await self._producer.close()
