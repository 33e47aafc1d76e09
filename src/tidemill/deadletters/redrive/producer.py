"""Sends what a redrive sends, and saves its cursor: in one transaction where both are on the same brokers.

`CursorProducer` saves positions of the dead-letter topic for the redrive's group, together with records for the same
brokers: both or neither, also when the process is killed. Its transactional id is the redrive's name, so that of two
processes that do the same redrive the older one is refused before it sends anything twice. `PlainProducer` sends to
other brokers, where no transaction reaches: there the cursor follows the confirmations, and what was sent in between
is sent again after a crash. Blocking: not for event loops.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import confluent_kafka as ck
import msgspec

from tidemill.core.errors import ConfigError, FencedError, RemoteError
from tidemill.runtime.kafka_client import BackgroundCall, LibraryLog, reason, scrubbed
from tidemill.runtime.messages import Header
from tidemill.runtime.producer import worth_retrying

#: One call may take this long before the same one is made again.
CALL_SECONDS = 5.0
#: librdkafka ignores the time limit of the call that saves positions, and waits for ever where the group's coordinator
#: went away: after so long its producer is replaced.
HANG_SECONDS = 10.0
#: A batch that is not through after this long ends the redrive, to be continued later.
PATIENCE_SECONDS = 60.0
#: The client repeats requests by itself after this pause, a fifth of it at random, and the first copy may still arrive
#: and count for the next transaction. A call that takes nearly as long costs its producer, which raises the epoch.
RETRY_SECONDS = 0.5
REPEATED_SECONDS = 0.35
#: Brokers give up what a killed redrive left open after this long, unless it starts again before.
TRANSACTION_SECONDS = 60.0
_TRIES = 5

_FENCED = frozenset({ck.KafkaError._FENCED, ck.KafkaError.INVALID_PRODUCER_EPOCH, ck.KafkaError.PRODUCER_FENCED})
_FORBIDDEN = frozenset(
    {
        ck.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ck.KafkaError.GROUP_AUTHORIZATION_FAILED,
        ck.KafkaError.TOPIC_AUTHORIZATION_FAILED,
        ck.KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)


class Outgoing(msgspec.Struct):
    """One record to send; `partition` -1: by the key."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[Header]


#: Index of a record that will never be taken, and why.
Refusals = dict[int, ck.KafkaError]


def redrive_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a producer's configuration that leaves it to the brokers what is too large."""
    own = {
        # The limit is on what is sent, after compression; only the brokers know both.
        "message.max.bytes": 1_000_000_000,
        "queue.buffering.max.kbytes": 2_000_000,
        "compression.type": "lz4",
    }
    return {"batch.size": 500_000, **config, **own}


class _Sender:
    """What both have in common: handing records over and waiting for all confirmations."""

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        self._config = redrive_config(config)
        self._what = what
        self._brokers = config["bootstrap.servers"]
        self._heard = ""

    def _make(self, **own: Any) -> ck.Producer:
        try:
            return ck.Producer({**self._config, **own, "error_cb": self._on_error}, logger=LibraryLog())
        except (ck.KafkaException, TypeError, ValueError) as error:
            raise ConfigError(f"{self._what}: bad Kafka client configuration: {self._scrubbed(error)}") from None

    def _handed_over(
        self, producer: ck.Producer, records: Sequence[Outgoing], deadline: float, *, together: bool = False
    ) -> Refusals:
        """Return the errors by the record's index, once each has its answer; `together`: at the first error."""
        errors: Refusals = {}
        for index, record in enumerate(records):
            report = partial(_report, errors, index)
            while index not in errors:
                try:
                    producer.produce(
                        record.topic,
                        record.value,
                        record.key,
                        partition=record.partition,
                        headers=record.headers,  # type: ignore[arg-type]
                        on_delivery=report,
                    )
                    break
                except BufferError:
                    self._in_time(deadline)
                    producer.poll(0.1)
                except ck.KafkaException as error:
                    if error.args[0].fatal():
                        raise
                    errors[index] = error.args[0]
        # A transaction with an error is lost, and its other records have no answer before it is aborted.
        while producer.flush(0.1) and not (together and errors):
            self._in_time(deadline)
        return errors

    def _in_time(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise self._no_answer("no confirmation")

    def _no_answer(self, text: str) -> RemoteError:
        heard = f" ({self._heard})" if self._heard else ""
        return RemoteError(
            f"{self._what}: {text} from Kafka at {self._brokers}{heard}; once it is up, the same command goes on"
        )

    def _on_error(self, error: ck.KafkaError) -> None:
        if error.code() != ck.KafkaError._ALL_BROKERS_DOWN:
            self._heard = self._scrubbed(error)

    def _scrubbed(self, error: Exception | ck.KafkaError) -> str:
        text = error.str() if isinstance(error, ck.KafkaError) else reason(error)
        return scrubbed(text, self._config)


def _report(errors: dict[int, ck.KafkaError], index: int, error: ck.KafkaError | None, message: Any) -> None:
    if error is not None:
        errors[index] = error


class PlainProducer(_Sender):
    """Sends records, each confirmed or refused by itself.

    Args:
        config: From `producer_config`.
        what: Whose producer it is, for errors.
    """

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        """Make the client."""
        super().__init__(config, what)
        self._producer = self._make()

    def send(self, records: Sequence[Outgoing]) -> Refusals:
        """Send records and wait; return those that will never be taken.

        Raises:
            RemoteError: Some were not taken although they could be; those may have to be sent again.
        """
        errors = self._handed_over(self._producer, records, time.monotonic() + PATIENCE_SECONDS)
        suspects = sorted(index for index, error in errors.items() if not worth_retrying(error))
        if len(suspects) > 1:
            # Brokers refuse whole batches: only alone a record is itself what is wrong.
            for index in suspects:
                alone = self._handed_over(self._producer, [records[index]], time.monotonic() + PATIENCE_SECONDS)
                del errors[index]
                if 0 in alone:
                    errors[index] = alone[0]
        later = [error for error in errors.values() if worth_retrying(error)]
        if later:
            raise self._no_answer(f"{self._scrubbed(later[0])}:")
        return errors

    def close(self) -> None:
        """Give up what is not confirmed."""
        self._producer.purge()
        self._producer.flush(1.0)


class CursorProducer(_Sender):
    """Records and positions in transactions.

    Args:
        config: From `producer_config`, for the brokers of the dead-letter topic.
        name: The redrive's: its group and transactional id.
        topic: The dead-letter topic.
        group_metadata: Returns that of a consumer of the group.
        note: Returns what is kept beside a position, by partition and position.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        name: str,
        topic: str,
        group_metadata: Callable[[], Any],
        note: Callable[[int, int], str] = lambda partition, position: "",
    ) -> None:
        """Make the client; nothing is fenced before `open`."""
        super().__init__(config, "dlq redrive")
        self._name = name
        self._topic = topic
        self._group_metadata = group_metadata
        self._note = note
        self._producer = self._own()
        self._may_be_repeated = False

    def _own(self) -> ck.Producer:
        milliseconds = int(TRANSACTION_SECONDS * 1000)
        own = {"transactional.id": self._name, "transaction.timeout.ms": milliseconds}
        return self._make(**own, **{"retry.backoff.ms": int(RETRY_SECONDS * 1000)})

    def open(self) -> None:
        """Fence an older process of the same redrive, and end what it left open.

        Raises:
            ConfigError: The brokers do not allow transactions of this name.
            RemoteError: They do not answer.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS / 2
        self._again(lambda: self._producer.init_transactions(CALL_SECONDS), deadline)

    def commit(self, records: Sequence[Outgoing], positions: Mapping[int, int]) -> Refusals:
        """Send records and save positions, both or neither.

        Returns:
            The records that will never be taken; if there are any, nothing was sent nor saved.

        Raises:
            FencedError: Another process does the same redrive.
            RemoteError: The brokers do not take it now; nothing was sent nor saved.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        for attempt in range(_TRIES):
            try:
                errors = self._transaction(records, positions, deadline)
            except _HungError:
                # Its transaction was not committed, and the new one's start aborts it.
                self._producer = self._own()
                self.open()
                continue
            except ck.KafkaException as error:
                if not error.args[0].txn_requires_abort():
                    raise self._ended(error.args[0]) from None
                self._heard = self._scrubbed(error.args[0])
                self._abort(deadline)
                continue
            hopeless = {index: error for index, error in errors.items() if not worth_retrying(error)}
            if hopeless or not errors:
                return hopeless
            self._heard = self._scrubbed(next(iter(errors.values())))
            self._in_time(deadline)
            time.sleep(0.1 * 2**attempt)
        raise self._no_answer(f"{_TRIES} transactions were aborted")

    def _transaction(self, records: Sequence[Outgoing], positions: Mapping[int, int], deadline: float) -> Refusals:
        if self._may_be_repeated:
            self._may_be_repeated = False
            self._producer = self._own()
            self.open()
        producer = self._producer
        self._again(producer.begin_transaction, deadline)
        # Copied: what the abort throws away is reported, too, and is nobody's fault.
        errors = dict(self._handed_over(producer, records, deadline, together=True))
        if errors:
            self._abort(deadline)
            return errors
        with self._timed():
            self._save(positions)
        with self._timed():
            self._again(lambda: producer.commit_transaction(CALL_SECONDS), deadline)
        return {}

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Note whether a call takes long enough to have been repeated."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._may_be_repeated |= time.monotonic() - began >= REPEATED_SECONDS

    def _save(self, positions: Mapping[int, int]) -> None:
        topic, note = self._topic, self._note
        offsets = [ck.TopicPartition(topic, number, at, note(number, at)) for number, at in positions.items()]
        producer, metadata = self._producer, self._group_metadata()
        call = BackgroundCall(
            "tidemill-cursor", lambda: producer.send_offsets_to_transaction(offsets, metadata, CALL_SECONDS)
        )
        if not call.ended.wait(HANG_SECONDS):
            self._heard = self._heard or "the call that saves the cursor does not come back"
            raise _HungError
        if call.error is not None:
            raise call.error

    def _abort(self, deadline: float) -> None:
        with self._timed():
            self._again(
                lambda: self._producer.abort_transaction(CALL_SECONDS), max(deadline, time.monotonic() + CALL_SECONDS)
            )

    def _again(self, call: Callable[[], Any], deadline: float) -> None:
        """Make a call until it succeeds; abortable errors are the caller's."""
        while True:
            try:
                call()
            except ck.KafkaException as raised:
                error = raised.args[0]
                if error.fatal() or not (error.retriable() or error.code() == ck.KafkaError._TIMED_OUT):
                    if error.txn_requires_abort():
                        raise
                    raise self._ended(error) from None
                self._heard = self._heard or self._scrubbed(error)
                if time.monotonic() > deadline:
                    raise self._no_answer("no answer") from None
            else:
                return

    def _ended(self, error: ck.KafkaError) -> Exception:
        text = self._scrubbed(error)
        if error.code() in _FENCED:
            return FencedError(f"dlq redrive: another process has begun the same redrive ({self._name}); this one ends")
        if error.code() in _FORBIDDEN:
            return ConfigError(
                f"dlq redrive: {text}; grant Write on the topics and on the transactional id, and Read on the group "
                f"{self._name!r}"
            )
        return RemoteError(f"dlq redrive: {text} at {self._brokers}; the same command goes on where this one ended")

    def close(self) -> None:
        """Give up what is open."""
        self._producer.purge()


class _HungError(Exception):
    """A call that never comes back."""
