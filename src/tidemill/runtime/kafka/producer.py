"""A Kafka producer for the event loop: records are sent in rounds, confirmations return once per round.

One thread per producer polls librdkafka; it calls the loop once per poll, never once per record. Invariants: every
record of a round gets exactly one outcome, even when the broker is down (`delivery.timeout.ms` is finite), when the
producer had to be replaced after a fatal error, and when it is closed. acks=all and idempotence cannot be switched off.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import confluent_kafka as ck
import structlog

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.errors import ConfigError, InvariantError, describe_error
from tidemill.runtime.kafka.client import CALL_SECONDS, LibraryLog, describe_client_error, make_client_config, scrub
from tidemill.runtime.log.setup import throttle

log = structlog.get_logger(__name__)


class FullRecord(NamedTuple):
    """A record with more than key and value.

    Attributes:
        key: The key.
        value: The value; None is a tombstone.
        headers: Names and values, in order.
        partition: The partition; -1 lets the key choose.
        timestamp: Milliseconds since the epoch; 0 is the time of sending.
    """

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()
    partition: int = -1
    timestamp: int = 0


#: (key, value), where a value of None is a tombstone; or all fields.
Record = tuple[bytes | None, bytes | None] | FullRecord
Outcomes = list[ck.KafkaError | None]

POLL_SECONDS = 0.25
#: How long librdkafka may take to return purged records.
PURGE_SECONDS = 2.0

#: No linger: a round is a batch already, and while one is in flight librdkafka collects the next by itself.
_DEFAULTS: Mapping[str, Any] = {
    "linger.ms": 0,
    "delivery.timeout.ms": 30_000,
    "reconnect.backoff.max.ms": 2_000,
    "socket.nagle.disable": True,
    "log.connection.close": False,
    # The partitioner of Java's clients, so that a key lands in the same partition whichever client wrote it.
    "partitioner": "murmur2_random",
}
_ALIASES: Mapping[str, str] = {
    "queue.buffering.max.ms": "linger.ms",
    "message.timeout.ms": "delivery.timeout.ms",
}
_FIXED: Mapping[str, Any] = {"acks": "all", "enable.idempotence": True}
_FIXED_ALIASES = ("request.required.acks",)

_HOPELESS = frozenset(
    {
        ck.KafkaError.MSG_SIZE_TOO_LARGE,
        ck.KafkaError.RECORD_LIST_TOO_LARGE,
        ck.KafkaError.INVALID_RECORD,
        ck.KafkaError.INVALID_TIMESTAMP,
        ck.KafkaError.POLICY_VIOLATION,
        ck.KafkaError.TOPIC_EXCEPTION,
        ck.KafkaError._INVALID_ARG,
    }
)


def make_producer_config(kafka: KafkaSettings, brokers: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a producer's configuration: the defaults, the user's overrides, and the fixed settings."""
    given = {_ALIASES.get(key, key): value for key, value in overrides.items() if key not in _FIXED_ALIASES}
    return make_client_config(kafka, brokers, {**_DEFAULTS, **given, **_FIXED})


def is_too_large(error: ck.KafkaError) -> bool:
    """Return whether a record was refused for its size, or for the size of its batch."""
    return error.code() in (ck.KafkaError.MSG_SIZE_TOO_LARGE, ck.KafkaError.RECORD_LIST_TOO_LARGE)


def worth_retrying(error: ck.KafkaError, partition: int = -1) -> bool:
    """Return whether the same record may be accepted later; only a record that is itself wrong never is.

    Args:
        error: The refusal.
        partition: The partition that the record names, -1 if none; a missing partition is then the record's fault.
    """
    if partition >= 0 and error.code() == ck.KafkaError._UNKNOWN_PARTITION:
        return False
    return error.code() not in _HOPELESS


class _Round:
    """Records that were handed over together.

    The poll thread writes `outcomes` and `reported` for accepted records, the loop writes `outcomes` for the others.
    The loop sets `accepted` once all were handed over. The side that sees the counts meet ends the round.
    """

    __slots__ = ("accepted", "future", "outcomes", "reported")

    def __init__(self, count: int, future: asyncio.Future[Outcomes]) -> None:
        self.outcomes: Outcomes = [None] * count
        self.reported = 0
        self.accepted = -1
        self.future = future

    def end(self) -> None:
        if not self.future.done():
            self.future.set_result(self.outcomes)


class LoopProducer:
    """One producer of one loop.

    Args:
        config: From `make_producer_config`.
        what: The producer's user, for logs and errors, e.g. 'sinks.kafka.out'.
    """

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        """Prepare the producer; `open` starts it."""
        self._config = dict(config)
        self._what = what
        self._ended: list[_Round] = []
        self._rounds: set[_Round] = set()
        self._fatal: str | None = None
        self._closing = False
        self._flush_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=f"tidemill-producer {what}", daemon=True)
        #: The client's last error, until a record is confirmed.
        self.trouble: str | None = None

    def open(self) -> None:
        """Start, in the running loop; librdkafka connects by itself.

        Raises:
            ConfigError: librdkafka rejects the configuration.
        """
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()
        self._producer = self._make()
        self._thread.start()

    def _make(self) -> ck.Producer:
        try:
            return ck.Producer({**self._config, "error_cb": self._on_error}, logger=LibraryLog())
        except (ck.KafkaException, TypeError, ValueError) as error:
            text = scrub(str(error), self._config)
            raise ConfigError(f"{self._what}: bad Kafka client configuration: {text}") from None

    def send(self, topic: str, records: Sequence[Record]) -> asyncio.Future[Outcomes]:
        """Send records; the future gets one outcome per record (None if confirmed), and never fails."""
        round_ = _Round(len(records), self._loop.create_future())
        if self._closing:
            round_.outcomes = [ck.KafkaError(ck.KafkaError._PURGE_QUEUE)] * len(records)
            round_.end()
            return round_.future
        accepted = 0
        produce, report = self._producer.produce, self._report
        for index, record in enumerate(records):
            try:
                if len(record) == 2:
                    produce(topic, record[1], record[0], on_delivery=partial(report, round_, index))
                else:
                    key, value, headers, partition, timestamp = record
                    produce(
                        topic, value, key, partition, on_delivery=partial(report, round_, index), timestamp=timestamp,
                        headers=list(headers),
                    )  # fmt: skip
                accepted += 1
            except ck.KafkaException as error:
                round_.outcomes[index] = self._note_refusal(error.args[0])
            except BufferError:
                round_.outcomes[index] = ck.KafkaError(ck.KafkaError._QUEUE_FULL)
        if accepted:
            self._rounds.add(round_)
        round_.accepted = accepted
        if round_.reported == accepted:
            self._loop.call_soon(self._end, (round_,))
        return round_.future

    async def partition_count(self, topic: str) -> int | None:
        """Return a topic's number of partitions from the brokers, and let the client learn of new ones; None without
        answer.
        """
        try:
            found = await asyncio.to_thread(self._producer.list_topics, topic, CALL_SECONDS)
        except ck.KafkaException as error:
            log.debug("no answer about a topic", topic=topic, error=scrub(describe_client_error(error), self._config))
            return None
        return len(found.topics[topic].partitions) or None

    def _note_refusal(self, error: ck.KafkaError) -> ck.KafkaError:
        if error.fatal() or error.code() == ck.KafkaError._FATAL:
            self._fatal = error.str()
        return error

    def _end(self, rounds: Sequence[_Round]) -> None:
        for round_ in rounds:
            self._rounds.discard(round_)
            round_.end()

    async def close(self, flush_seconds: float = 0.0) -> None:
        """Stop; records that are not confirmed within `flush_seconds` get an error as their outcome."""
        if not self._thread.is_alive():
            return
        self._flush_seconds = flush_seconds
        self._closing = True
        try:
            async with asyncio.timeout(flush_seconds + POLL_SECONDS + PURGE_SECONDS + 2.0):
                await self._closed.wait()
        except TimeoutError:
            log.warning("a Kafka producer did not end in time", client=self._what)
        for round_ in self._rounds:
            purged = ck.KafkaError(ck.KafkaError._PURGE_INFLIGHT)
            round_.outcomes = [purged] * len(round_.outcomes)
            round_.end()
        self._rounds.clear()

    # -- the poll thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._poll()
        except Exception as error:
            self._tell(self._on_failure, error)

    def _on_failure(self, error: Exception) -> None:
        """Raise in the loop, which the engine watches, because no further record would be confirmed."""
        raise InvariantError(
            f"the thread of the Kafka producer of {self._what} ended: {describe_error(error)}"
        ) from error

    def _poll(self) -> None:
        while not self._closing:
            try:
                self._producer.poll(POLL_SECONDS)
            except ck.KafkaException as error:
                # A fatal error is raised here in addition to the callback.
                self._on_error(error.args[0])
            self._hand_over()
            if self._fatal is not None:
                self._replace()
        self._purge(self._producer, self._flush_seconds)
        self._tell(self._closed.set)
        # Its threads and connections end with it. This may wait for the network, but nothing waits for this thread.
        del self._producer

    def _report(self, round_: _Round, index: int, error: ck.KafkaError | None, message: ck.Message) -> None:
        round_.outcomes[index] = error
        round_.reported += 1
        if error is None:
            self.trouble = None
        if round_.reported == round_.accepted:
            self._ended.append(round_)

    def _hand_over(self) -> None:
        if self._ended:
            ended, self._ended = self._ended, []
            self._tell(self._end, ended)

    def _tell(self, function: Any, *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self._closing = True  # the loop is closed

    def _on_error(self, error: ck.KafkaError) -> None:
        text = scrub(error.str(), self._config)
        self.trouble = text
        if error.fatal() or error.code() == ck.KafkaError._FATAL:
            self._fatal = text
        else:
            throttle(log, 10.0).warning("Kafka producer", client=self._what, error=text)

    def _replace(self) -> None:
        """Continue with a new producer. After a fatal error the old one never works again, and returns its records."""
        log.error("a Kafka producer failed and is replaced", client=self._what, error=self._fatal)
        old, self._producer = self._producer, self._make()
        self._fatal = None
        self._purge(old)

    def _purge(self, producer: ck.Producer, flush_seconds: float = 0.0) -> None:
        """Return every record that is not confirmed within `flush_seconds`."""
        for seconds in (flush_seconds, PURGE_SECONDS, PURGE_SECONDS):
            try:
                producer.flush(seconds)
            except ck.KafkaException as error:
                log.warning("Kafka producer", client=self._what, error=scrub(str(error), self._config))
            if len(producer) == 0:
                break
            producer.purge()
        self._hand_over()
