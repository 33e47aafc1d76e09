"""Saves the progress of a redrive: with Kafka in the offsets of the redrive's consumer group, with files in a journal.

`KafkaCursor` saves positions of the dead-letter topic together with records for the same brokers, in one transaction:
both or neither, even if the process is killed. Its transactional id is the name of the redrive. If two processes run
the same redrive, the older one is therefore refused before it sends anything twice. All calls block, so do not make
them on event loops.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import confluent_kafka as ck
import structlog

from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import REDRIVE_PREFIX, LetterCriteria, identify_redrive
from tidemill.core.errors import ConfigError, FencedError, RemoteError
from tidemill.core.topic_identity import add_mark, is_replaced, split_mark
from tidemill.deadletters.opening import Letters
from tidemill.deadletters.reader import LetterReader
from tidemill.deadletters.redrive.producer import (
    CALL_SECONDS,
    GIVE_UP_SECONDS,
    RedriveProducer,
    Refusals,
    ResentRecord,
    extend_config,
)
from tidemill.runtime.kafka.client import BackgroundCall
from tidemill.runtime.kafka.producer import make_producer_config, worth_retrying

log = structlog.get_logger(__name__)

#: librdkafka ignores the time limit of the call that saves positions, and waits forever if the group's coordinator has
#: disappeared. After this time the producer is replaced.
HANG_SECONDS = 10.0
#: The client itself repeats a request after this pause (20 % jitter); the first copy may still arrive and count for the
#: next transaction. After a call that takes nearly as long, the producer is replaced, which raises the epoch.
RETRY_SECONDS = 0.5
REPEATED_SECONDS = 0.35
#: Brokers abort the open transaction of a killed redrive after this time, unless the redrive starts again before.
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


class RedriveCursor(Protocol):
    """Saves the progress of a redrive."""

    def read(self, ranges: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, str]]:
        """Return the saved positions and their notes, without partitions that have none."""
        ...

    def open(self) -> None:
        """Make sure that no other process runs the same redrive; call it before `commit`."""

    def commit(self, records: Sequence[ResentRecord], positions: Mapping[int, int]) -> Refusals:
        """Save positions, together with records if there are any; see `KafkaCursor.commit`."""
        ...

    def close(self) -> None:
        """Release all resources."""


def name_redrive(settings: Settings, where: str, criteria: LetterCriteria) -> str:
    """Return the name of a redrive, from its letters, target and filters; see `identify_redrive`.

    The path of a folder is not part of the name. The cursor is stored in the folder, so the folder may be moved.
    """
    if settings.dlq.path:
        return REDRIVE_PREFIX + identify_redrive("", "files", where, criteria)
    return REDRIVE_PREFIX + identify_redrive(settings.dlq_topic, settings.dlq_brokers, where, criteria)


def make_cursor(
    settings: Settings,
    letters: Letters,
    name: str,
    overrides: Callable[[], Mapping[str, Any]],
    note: Callable[[int, int], str],
) -> RedriveCursor:
    """Return the cursor of a redrive, which is stored with the letters.

    Args:
        settings: The pipeline's settings.
        letters: The letters, opened for a consumer group of the redrive's name.
        name: The name of the redrive.
        overrides: Returns a Kafka producer's settings beyond the configuration.
        note: Returns the note that is saved with a position, by partition and position.
    """
    if isinstance(letters, LetterReader):
        return KafkaCursor(settings, letters, name, overrides, note)
    from tidemill.deadletters.redrive.folder_cursor import FolderCursor

    return FolderCursor(letters, name, note)


class KafkaCursor(RedriveProducer):
    """Sends records and saves positions in transactions.

    Args:
        settings: The pipeline's settings.
        letters: The dead-letter topic; its consumer is in the redrive's group.
        name: The redrive's name, which is its group and transactional id.
        overrides: Returns the producer's settings beyond the configuration; called by `open`.
        note: Returns the note that is saved with a position, by partition and position.
    """

    def __init__(
        self,
        settings: Settings,
        letters: LetterReader,
        name: str,
        overrides: Callable[[], Mapping[str, Any]],
        note: Callable[[int, int], str],
    ) -> None:
        super().__init__(make_producer_config(settings.kafka, letters.brokers, {}), "dlq redrive")
        self._settings = settings
        self._letters = letters
        self._name = name
        self._overrides = overrides
        self._note = note
        self._producer: ck.Producer
        self._opened = False
        self._topic_id: str | None = None
        self._may_be_repeated = False

    def read(self, ranges: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, str]]:
        """Return the committed offsets of the group and their notes; see `RedriveCursor.read`.

        Offsets of an earlier topic of the same name are left out.
        """
        self._topic_id = self._letters.find_topic_id()
        saved, found = {}, self._letters.read_committed(ranges)
        for number, (at, text) in found.items():
            topic_id, note = split_mark(text)
            if not is_replaced(topic_id, self._topic_id):
                saved[number] = (at, note)
        if len(saved) < len(found):
            text = "the dead-letter topic was deleted and created again; the redrive starts over"
            log.warning(text, topic=self._letters.topic)
        return saved

    def _make_own(self) -> ck.Producer:
        milliseconds = int(TRANSACTION_SECONDS * 1000)
        own = {"transactional.id": self._name, "transaction.timeout.ms": milliseconds}
        return self._make(**own, **{"retry.backoff.ms": int(RETRY_SECONDS * 1000)})

    def open(self) -> None:
        """Fence an older process of the same redrive, and abort its open transaction.

        Raises:
            ConfigError: The brokers do not allow transactions of this name.
            RemoteError: The brokers do not answer.
        """
        config = make_producer_config(self._settings.kafka, self._letters.brokers, self._overrides())
        self._config = extend_config(config)
        self._renew()
        self._opened = True

    def _renew(self) -> None:
        """Create a producer; its start aborts the open transaction of the previous one."""
        self._producer = self._make_own()
        deadline = time.monotonic() + GIVE_UP_SECONDS / 2
        self._retry(lambda: self._producer.init_transactions(CALL_SECONDS), deadline)

    def commit(self, records: Sequence[ResentRecord], positions: Mapping[int, int]) -> Refusals:
        """Send records and save positions, both or neither.

        Returns:
            The records that will never be accepted; if there are any, nothing was sent or saved.

        Raises:
            FencedError: Another process runs the same redrive.
            RemoteError: The brokers are unavailable; nothing was sent or saved.
        """
        deadline = time.monotonic() + GIVE_UP_SECONDS
        for attempt in range(_TRIES):
            try:
                errors = self._attempt(records, positions, deadline)
            except _HungError:
                # The hung producer's transaction was not committed.
                self._renew()
                continue
            except ck.KafkaException as error:
                if not error.args[0].txn_requires_abort():
                    raise self._convert_error(error.args[0]) from None
                self._heard = self._describe(error.args[0])
                self._abort(deadline)
                continue
            hopeless = {index: error for index, error in errors.items() if not worth_retrying(error)}
            if hopeless or not errors:
                return hopeless
            self._heard = self._describe(next(iter(errors.values())))
            self._check_deadline(deadline)
            time.sleep(0.1 * 2**attempt)
        raise self._describe_silence(f"{_TRIES} transactions were aborted")

    def _attempt(self, records: Sequence[ResentRecord], positions: Mapping[int, int], deadline: float) -> Refusals:
        if self._may_be_repeated:
            self._may_be_repeated = False
            self._renew()
        producer = self._producer
        self._retry(producer.begin_transaction, deadline)
        # A copy, because the abort also reports the records that it discards, which are not at fault.
        errors = dict(self._hand_over(producer, records, deadline, together=True))
        if errors:
            self._abort(deadline)
            return errors
        with self._measure():
            self._save(positions)
        with self._measure():
            self._retry(lambda: producer.commit_transaction(CALL_SECONDS), deadline)
        return {}

    @contextlib.contextmanager
    def _measure(self) -> Iterator[None]:
        """Record whether a call takes long enough for the client to have repeated it."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._may_be_repeated |= time.monotonic() - began >= REPEATED_SECONDS

    def _save(self, positions: Mapping[int, int]) -> None:
        topic, note = self._letters.topic, self._note
        offsets = [
            ck.TopicPartition(topic, number, at, add_mark(self._topic_id, note(number, at)))
            for number, at in positions.items()
        ]
        producer, metadata = self._producer, self._letters.get_group_metadata()
        call = BackgroundCall(
            "tidemill-cursor", lambda: producer.send_offsets_to_transaction(offsets, metadata, CALL_SECONDS)
        )
        if not call.ended.wait(HANG_SECONDS):
            self._heard = self._heard or "the call that saves the cursor does not return"
            raise _HungError
        if call.error is not None:
            raise call.error

    def _abort(self, deadline: float) -> None:
        with self._measure():
            self._retry(
                lambda: self._producer.abort_transaction(CALL_SECONDS), max(deadline, time.monotonic() + CALL_SECONDS)
            )

    def _retry(self, call: Callable[[], Any], deadline: float) -> None:
        """Repeat a call until it succeeds; errors that require an abort are raised."""
        while True:
            try:
                call()
            except ck.KafkaException as raised:
                error = raised.args[0]
                if error.fatal() or not (error.retriable() or error.code() == ck.KafkaError._TIMED_OUT):
                    if error.txn_requires_abort():
                        raise
                    raise self._convert_error(error) from None
                self._heard = self._heard or self._describe(error)
                if time.monotonic() > deadline:
                    raise self._describe_silence("no answer") from None
            else:
                return

    def _convert_error(self, error: ck.KafkaError) -> Exception:
        text = self._describe(error)
        if error.code() in _FENCED:
            return FencedError(
                f"dlq redrive: another process has started the same redrive ({self._name}); this one stops"
            )
        if error.code() in _FORBIDDEN:
            return ConfigError(
                f"dlq redrive: {text}; grant Write on the topics and on the transactional id, and Read on the group "
                f"{self._name!r}"
            )
        return RemoteError(f"dlq redrive: {text} at {self._brokers}; run the same command again to continue")

    def close(self) -> None:
        """Give up uncommitted records."""
        if self._opened:
            self._producer.purge()


class _HungError(Exception):
    """A call does not return."""
