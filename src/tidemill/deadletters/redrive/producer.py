"""Sends the records of a redrive, and waits until each of them is confirmed or refused.

`PlainProducer` sends without transactions, to brokers other than those of the dead letters. The cursor then follows the
confirmations; records sent in between are sent again after a crash. All calls block, so do not make them on event
loops.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import confluent_kafka as ck
import msgspec

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.kafka.client import LibraryLog, describe_client_error, scrub
from tidemill.runtime.kafka.producer import worth_retrying
from tidemill.runtime.kafka.source_message import Header

#: How long one call may take before it is repeated.
CALL_SECONDS = 5.0
#: A batch that is not confirmed after this time ends the redrive, which can be continued later.
GIVE_UP_SECONDS = 60.0


class ResentRecord(msgspec.Struct):
    """One record to send; with `partition` -1, the key decides."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[Header]


#: By the index of a record that will never be accepted, the reason.
Refusals = dict[int, ck.KafkaError]


def extend_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a producer's configuration that leaves size limits to the brokers."""
    own = {
        # The limit applies to the compressed size; only the brokers know both.
        "message.max.bytes": 1_000_000_000,
        "queue.buffering.max.kbytes": 2_000_000,
        "compression.type": "lz4",
    }
    return {"batch.size": 500_000, **config, **own}


class RedriveProducer:
    """The base of a redrive's producers: hands records to the client, and waits for all confirmations."""

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        self._config = extend_config(config)
        self._what = what
        self._brokers = config["bootstrap.servers"]
        self._heard = ""

    def _make(self, **own: Any) -> ck.Producer:
        try:
            return ck.Producer({**self._config, **own, "error_cb": self._on_error}, logger=LibraryLog())
        except (ck.KafkaException, TypeError, ValueError) as error:
            raise ConfigError(f"{self._what}: bad Kafka client configuration: {self._describe(error)}") from None

    def _hand_over(
        self, producer: ck.Producer, records: Sequence[ResentRecord], deadline: float, *, together: bool = False
    ) -> Refusals:
        """Return errors by record index once every record has its answer; with `together`, stop at the first."""
        errors: Refusals = {}
        for index, record in enumerate(records):
            report = partial(_note_answer, errors, index)
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
                    self._check_deadline(deadline)
                    producer.poll(0.1)
                except ck.KafkaException as error:
                    if error.args[0].fatal():
                        raise
                    errors[index] = error.args[0]
        # A transaction with an error is lost; its other records get no answer before it is aborted.
        while producer.flush(0.1) and not (together and errors):
            self._check_deadline(deadline)
        return errors

    def _check_deadline(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise self._describe_silence("no confirmation")

    def _describe_silence(self, text: str) -> RemoteError:
        heard = f" ({self._heard})" if self._heard else ""
        return RemoteError(
            f"{self._what}: {text} from Kafka at {self._brokers}{heard}; once it is up, run the same command again to "
            "continue"
        )

    def _on_error(self, error: ck.KafkaError) -> None:
        if error.code() != ck.KafkaError._ALL_BROKERS_DOWN:
            self._heard = self._describe(error)

    def _describe(self, error: Exception | ck.KafkaError) -> str:
        text = error.str() if isinstance(error, ck.KafkaError) else describe_client_error(error)
        return scrub(text, self._config)


def _note_answer(errors: dict[int, ck.KafkaError], index: int, error: ck.KafkaError | None, message: Any) -> None:
    if error is not None:
        errors[index] = error


class PlainProducer(RedriveProducer):
    """Sends records, each confirmed or refused by itself.

    Args:
        config: From `make_producer_config`.
        what: The producer's name in errors.
    """

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        super().__init__(config, what)
        self._producer = self._make()

    def send(self, records: Sequence[ResentRecord]) -> Refusals:
        """Send records and wait; return those that will never be accepted.

        Raises:
            RemoteError: Some records were refused for now; the batch has to be sent again.
        """
        errors = self._hand_over(self._producer, records, time.monotonic() + GIVE_UP_SECONDS)
        suspects = sorted(index for index, error in errors.items() if not worth_retrying(error))
        if len(suspects) > 1:
            # Brokers refuse whole batches, so only a record that is refused alone is at fault.
            for index in suspects:
                alone = self._hand_over(self._producer, [records[index]], time.monotonic() + GIVE_UP_SECONDS)
                del errors[index]
                if 0 in alone:
                    errors[index] = alone[0]
        later = [error for error in errors.values() if worth_retrying(error)]
        if later:
            raise self._describe_silence(f"{self._describe(later[0])}:")
        return errors

    def close(self) -> None:
        """Give up unconfirmed records."""
        self._producer.purge()
        self._producer.flush(1.0)
