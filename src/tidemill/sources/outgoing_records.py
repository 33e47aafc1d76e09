"""Sends the records of one transaction to the producer; used on the consumer's thread only."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import confluent_kafka as ck
import structlog

from tidemill.core.delivery.transaction import TransactionAnswer, judge_records
from tidemill.runtime.kafka.client import describe_client_error, scrub
from tidemill.runtime.kafka.producer import is_too_large, worth_retrying
from tidemill.sources.base import Outgoing

log = structlog.get_logger(__name__)

#: After a transaction has failed, the producer sends nothing, and a flush waits without an error; abort after this
#: time.
FLUSH_SECONDS = 5.0


class RecordRefusedError(Exception):
    """The producer refused a record, so the transaction must be aborted.

    Attributes:
        record_error: Why the record itself is wrong; None: it may not be.
        text: The client's error.
    """

    def __init__(self, record_error: str | None, text: str) -> None:
        super().__init__(text)
        self.record_error = record_error
        self.text = text


class OutgoingRecords:
    """The records of the open transaction.

    Args:
        config: The producer's configuration, whose secrets are removed from errors.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._records: list[Outgoing] = []
        self._sent = 0
        self._flush_began: float | None = None

    def begin(self, records: list[Outgoing]) -> None:
        """Set the records of a new transaction."""
        self._records, self._sent, self._flush_began = records, 0, None

    def judge(self) -> None:
        """Set the verdicts of records that may have caused a failure, when the transaction ends; forget all records."""
        suspects = [record for record in self._records if record.error is not None]
        for record, verdict in zip(suspects, judge_records([each.isolated for each in suspects]), strict=True):
            record.verdict = verdict
        self._records = []

    def send(self, producer: ck.Producer, seconds_left: Callable[[], float]) -> TransactionAnswer:
        """Send records from where the last call stopped; flushes before and after isolated records.

        Args:
            producer: The producer.
            seconds_left: Returns how many seconds a call may wait.

        Raises:
            RecordRefusedError: A record was refused.
            confluent_kafka.KafkaException: The producer failed for good.
        """
        produce, failed, records = producer.produce, self._on_delivery, self._records
        is_behind_isolated = self._sent > 0 and records[self._sent - 1].isolated
        for record in itertools.islice(records, self._sent, None):
            if (record.isolated or is_behind_isolated) and producer.flush(seconds := seconds_left()):
                return self._answer_flushing(seconds)
            is_behind_isolated = record.isolated
            self._flush_began = None
            try:
                produce(
                    record.topic, record.value, record.key, on_delivery=partial(failed, record), **_get_extras(record)
                )
            except BufferError:
                producer.poll(seconds_left())
                return TransactionAnswer.AGAIN
            except ck.KafkaException as error:
                if error.args[0].fatal():
                    raise
                # The record is too large, or an earlier one failed together with the transaction.
                failed(record, error.args[0], None)
                raise RecordRefusedError(record.error, scrub(describe_client_error(error), self._config)) from error
            self._sent += 1
        return TransactionAnswer.DONE

    def _answer_flushing(self, seconds: float) -> TransactionAnswer:
        now = time.monotonic()
        if self._flush_began is None:
            self._flush_began = now - seconds
        if now - self._flush_began < FLUSH_SECONDS:
            return TransactionAnswer.AGAIN
        self._flush_began = None
        return TransactionAnswer.ABORT

    def _on_delivery(self, record: Outgoing, error: ck.KafkaError | None, message: ck.Message | None) -> None:
        if error is None:
            return
        text = scrub(f"topic {record.topic}: {error.name()}: {error.str()}", self._config)
        if worth_retrying(error, record.partition):
            log.debug("a record of a transaction was not accepted", error=text)
        else:
            record.error = text
            record.oversize = is_too_large(error)


_NO_EXTRAS: dict[str, Any] = {}


def _get_extras(record: Outgoing) -> dict[str, Any]:
    """Return the fields of a record other than key and value; most records have none."""
    if not record.headers and record.partition < 0 and not record.timestamp:
        return _NO_EXTRAS
    return {"partition": record.partition, "timestamp": record.timestamp, "headers": list(record.headers)}
