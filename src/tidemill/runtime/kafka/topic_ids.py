"""Asks the brokers for the id of a topic, which changes when the topic is deleted and created again.

Invariants: no request is repeated while one is open. `look` never waits. A refusal by the brokers is logged once; the
id is then unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import confluent_kafka as ck
import structlog
from confluent_kafka.admin import AdminClient

from tidemill.runtime.kafka.client import LibraryLog, scrub

log = structlog.get_logger(__name__)

#: How often the id is requested, and how much longer to wait per partition: an answer lists all partitions, at about 12
#: us each.
LOOK_SECONDS = 1.0
LOOK_SECONDS_PER_PARTITION = 0.01
#: The answer of brokers without topic ids.
_ZERO = str(ck.Uuid(0, 0))
#: The topic is missing for now, or no broker answers; a later id is compared then.
_PASSING = frozenset(
    {
        ck.KafkaError.UNKNOWN_TOPIC_OR_PART,
        ck.KafkaError._TIMED_OUT,
        ck.KafkaError._TRANSPORT,
        ck.KafkaError._ALL_BROKERS_DOWN,
        ck.KafkaError._DESTROY,
    }
)


class TopicIds:
    """The id of one topic, as the brokers currently have it.

    Args:
        config: The client's configuration, from `make_client_config`.
        topic: The topic.
        clock: Seconds, monotonic.
    """

    def __init__(self, config: Mapping[str, Any], topic: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare the client, which connects at the first request."""
        self._config = config
        self._topic = topic
        self._clock = clock
        self._client: AdminClient | None = None
        self._open: Future[Any] | None = None
        self._look_at = 0.0
        self._partitions = 0
        self._warned = False

    def ask(self, seconds: float) -> str | None:
        """Return the id; None if it is not known within `seconds`."""
        self._open = None
        answer = self._request(seconds)
        try:
            return self._read(answer, seconds + 0.5)
        finally:
            self._look_at = self._clock() + self._interval

    def look(self) -> str | None:
        """Return the id if an answer has arrived, and request it again when that is due; does not wait."""
        if self._open is None:
            if self._clock() >= self._look_at:
                self._look_at = self._clock() + self._interval
                self._open = self._request(self._interval)
            return None
        if not self._open.done():
            return None
        answer, self._open = self._open, None
        return self._read(answer, 0.0)

    @property
    def _interval(self) -> float:
        return max(LOOK_SECONDS, LOOK_SECONDS_PER_PARTITION * self._partitions)

    def _request(self, seconds: float) -> Future[Any]:
        if self._client is None:
            config: dict[str, Any] = {**self._config, "error_cb": lambda error: None}
            self._client = AdminClient(config, logger=LibraryLog())
        topics = ck.TopicCollection([self._topic])
        found: Future[Any] = self._client.describe_topics(topics, request_timeout=seconds)[self._topic]
        return found

    def _read(self, answer: Future[Any], seconds: float) -> str | None:
        try:
            described = answer.result(seconds)
        except ck.KafkaException as raised:
            error = raised.args[0]
            if error.code() not in _PASSING and not error.retriable():
                self._warn(scrub(error.str(), self._config))
            return None
        except TimeoutError:
            return None
        self._partitions = len(described.partitions)
        topic_id = str(described.topic_id)
        if topic_id == _ZERO:
            self._warn("the brokers do not support topic ids")
            return None
        return topic_id

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "the topic's id cannot be read, so a deleted and recreated topic is detected only if it is shorter "
                "than before; allow Describe on the topic",
                topic=self._topic,
                reason=why,
            )
