"""Watches whether a consumer reaches its brokers, and why not; used on the consumer's thread only.

`trouble` may be read on any thread.
"""

from __future__ import annotations

from collections.abc import Callable

import confluent_kafka as ck
import structlog

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.pipeline.group_refusal import GroupTerms, JoinWatch
from tidemill.runtime.log.setup import throttle
from tidemill.sources.base import Fatal

log = structlog.get_logger(__name__)


class BrokerWatch:
    """Interprets the client's errors about the brokers.

    Args:
        kafka: The `kafka` section.
        on_fatal: Called when the member has been fenced.

    Attributes:
        join: Whether access to the group, or to the topic, is refused.
        trouble: Why no messages arrive, while the brokers are unreachable or have no such topic.
        errors: How many errors the client reported.
    """

    def __init__(self, kafka: KafkaSettings, on_fatal: Callable[[Fatal, str], None]) -> None:
        self._topic = kafka.source_topic
        self._servers = kafka.brokers
        self.join = JoinWatch(GroupTerms(kafka.consumer_group, kafka.source_topic, kafka.session_timeout_ms))
        self._on_fatal = on_fatal
        self.trouble: str | None = None
        self.errors = 0

    def on_answer(self) -> None:
        """Record that the brokers answered."""
        self.trouble = None

    def on_joined(self, *, has_partitions: bool) -> None:
        """Record that the member has joined its group."""
        self.join.note_joined(has_partitions=has_partitions)

    def on_messages(self) -> None:
        """Record that messages arrived."""
        self.trouble = None
        self.join.note_messages()

    def on_record_error(self, error: ck.KafkaError) -> None:
        """Handle an error that a poll returned instead of a record."""
        code = error.code()
        self.errors += code != ck.KafkaError._PARTITION_EOF
        if code in (ck.KafkaError._FATAL, ck.KafkaError.FENCED_INSTANCE_ID):
            self._on_fatal(Fatal.FENCED, error.str())
        elif code == ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
            self.trouble = f"topic {self._topic!r} no longer exists; create it again or stop the pipeline"
            throttle(log, 10.0).warning("the source topic is missing", topic=self._topic)
        elif self.join.note_error(error.name()):
            throttle(log, 60.0).error("the brokers refuse this engine; waiting", reason=self.join.refusal)
        elif code != ck.KafkaError._PARTITION_EOF:
            throttle(log, 10.0).warning("consumer error", error=error.str())

    def on_error(self, error: ck.KafkaError) -> None:
        """Handle an error of the client as a whole; the consumer's `error_cb`."""
        self.errors += 1
        if error.code() == ck.KafkaError._FATAL:
            self._on_fatal(Fatal.FENCED, error.str())
        elif error.code() in (ck.KafkaError._ALL_BROKERS_DOWN, ck.KafkaError._TRANSPORT):
            if error.code() == ck.KafkaError._ALL_BROKERS_DOWN:
                self.trouble = f"no broker is reachable ({self._servers}); waiting for one"
            throttle(log, 10.0).warning("the brokers are unreachable; the pipeline is waiting", error=error.str())
        else:
            throttle(log, 10.0).warning("client error", error=error.str())

    def look(self, consumer: ck.Consumer) -> None:
        """Check whether brokers that were unreachable are back, and have the topic."""
        if self.trouble is None:
            return
        try:
            topic = consumer.list_topics(self._topic, timeout=0.5).topics[self._topic]
        except ck.KafkaException:
            return
        if topic.error is not None and topic.error.code() == ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
            return
        log.info("the brokers are reachable again and have the topic")
        self.trouble = None
