"""Code that all Kafka clients of tidemill share: configuration, logging, and queries about a topic.

Invariants: credentials go only to the brokers they are meant for. librdkafka never writes to stderr. No text from this
module contains the value of a secret setting.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import confluent_kafka as ck
import structlog
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from tidemill.config.redaction import MASK, is_secret, redact_text
from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.errors import ConfigError, RemoteError

log = structlog.get_logger(__name__)

#: Some brokers do not know a new topic for up to a second.
FRESH_TOPIC_SECONDS = 5.0
_STATE = re.compile(r" \(after \d+ms in state [A-Z_]+(?:, \d+ identical error\(s\) suppressed)?\)")
#: How long one request to the brokers may take, including the connection.
CALL_SECONDS = 10.0
_HERE = ("127.0.0.1", "localhost")

_INHERITED = ("security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.")
_UNREACHABLE = frozenset(
    {
        ck.KafkaError._TRANSPORT,
        ck.KafkaError._TIMED_OUT,
        ck.KafkaError._ALL_BROKERS_DOWN,
        ck.KafkaError._RESOLVE,
    }
)
_FORBIDDEN = frozenset(
    {
        ck.KafkaError.TOPIC_AUTHORIZATION_FAILED,
        ck.KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        ck.KafkaError.SASL_AUTHENTICATION_FAILED,
        ck.KafkaError._AUTHENTICATION,
    }
)


def make_client_config(kafka: KafkaSettings, brokers: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a librdkafka configuration for `brokers`.

    Args:
        kafka: The `kafka` section; its security, sasl and ssl keys are inherited with its brokers.
        brokers: '' or the same as `kafka.brokers` inherits; other brokers get no credentials of `kafka`.
        overrides: Further keys, which take precedence.

    Example:
        >>> kafka = KafkaSettings(brokers="a:9092", client_config={"sasl.mechanism": "PLAIN", "linger.ms": 5})
        >>> make_client_config(kafka, "", {})
        {'bootstrap.servers': 'a:9092', 'sasl.mechanism': 'PLAIN'}
        >>> make_client_config(kafka, "b:9092", {})
        {'bootstrap.servers': 'b:9092'}
    """
    config: dict[str, Any] = {"bootstrap.servers": brokers or kafka.brokers}
    if brokers in ("", kafka.brokers):
        config |= {key: value for key, value in kafka.client_config.items() if key.startswith(_INHERITED)}
    return {**config, **overrides}


def describe_client_error(error: Exception) -> str:
    """Return the text of an exception of the client."""
    return error.args[0].str() if isinstance(error, ck.KafkaException) else str(error)


def describe_connection(text: str) -> str:
    """Return librdkafka's text about a connection, without its internal state and timing.

    Example:
        >>> describe_connection("a:1/bootstrap: Connect to ipv4#10.0.0.1:1 failed (after 0ms in state CONNECT)")
        'a:1: Connect to 10.0.0.1:1 failed'
    """
    return _STATE.sub("", text).replace("/bootstrap:", ":").replace("ipv4#", "").replace("ipv6#", "")


def scrub(text: str, config: Mapping[str, Any]) -> str:
    """Return `text` without the values of the configuration's secret settings.

    Example:
        >>> scrub("bad value hunter2", {"sasl.password": "hunter2"})
        'bad value ***'
    """
    for key, value in config.items():
        if value and isinstance(value, str) and is_secret(key):
            text = text.replace(value, MASK)
    return redact_text(text)


class LibraryLog:
    """Receives the lines that librdkafka would print, at DEBUG; important events arrive as errors.

    Has the methods of a `logging.Logger` that confluent_kafka uses.
    """

    def log(self, level: int, message: str, *args: object) -> None:
        """Log one line."""
        log.debug("librdkafka", line=message % args if args else message)


class TopicAdmin:
    """Queries the brokers about topics, blocking: for worker threads only.

    Args:
        config: From `make_client_config`.
        what: The user of the topic, for error texts, e.g. 'sinks.kafka.out'.

    Raises:
        ConfigError: librdkafka rejects the configuration.
    """

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        """Create the client; it connects at the first request."""
        self._what = what
        self._config = config
        self._brokers = config["bootstrap.servers"]
        self._heard = ""
        settings: dict[str, Any] = {**config, "error_cb": self._on_error}
        try:
            self._client = AdminClient(settings, logger=LibraryLog())
        except (ck.KafkaException, TypeError, ValueError) as error:
            text = scrub(describe_client_error(error), config)
            raise ConfigError(f"{what}: bad Kafka client configuration: {text}") from None

    def exists(self, topic: str, wait_seconds: float = FRESH_TOPIC_SECONDS) -> bool:
        """Return whether the topic exists; wait a little for one that was just created.

        Raises:
            ConfigError: The brokers deny access to it.
            RemoteError: The brokers do not answer.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            error = self._describe_topic(topic)
            if error is None:
                return True
            if error.code() != ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise self.refused(f"topic {topic!r} cannot be looked up", error)
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)

    def partition_count(self, topic: str) -> int | None:
        """Return how many partitions a topic has, None if it does not exist.

        Raises:
            ConfigError: The brokers deny access to it.
            RemoteError: The brokers do not answer.
        """
        if not self.exists(topic, wait_seconds=1.0):
            return None
        try:
            return len(self._client.list_topics(topic, timeout=CALL_SECONDS).topics[topic].partitions)
        except ck.KafkaException as error:
            raise self.refused(f"topic {topic!r} cannot be looked up", error.args[0]) from None

    def names(self) -> list[str]:
        """Return the names of all visible topics, in order.

        Raises:
            ConfigError: The brokers deny access.
            RemoteError: The brokers do not answer.
        """
        try:
            return sorted(self._client.list_topics(timeout=CALL_SECONDS).topics)
        except ck.KafkaException as error:
            raise self.refused("topics cannot be listed", error.args[0]) from None

    def _describe_topic(self, topic: str) -> ck.KafkaError | None:
        try:
            topics = ck.TopicCollection([topic])
            answer = self._client.describe_topics(topics, request_timeout=CALL_SECONDS)[topic]
            answer.result(CALL_SECONDS + 1.0)
        except ck.KafkaException as error:
            return error.args[0]  # type: ignore[no-any-return]
        except TimeoutError:
            return ck.KafkaError(ck.KafkaError._TIMED_OUT)
        return None

    def create(self, topic: str) -> None:
        """Create a topic of one partition with the brokers' replication factor, unless it exists.

        Raises:
            ConfigError: The brokers deny access.
            RemoteError: The brokers do not answer, or refuse.
        """
        new = NewTopic(topic, num_partitions=1, replication_factor=-1)
        try:
            self._client.create_topics([new], request_timeout=CALL_SECONDS)[topic].result(CALL_SECONDS + 1.0)
        except ck.KafkaException as error:
            if error.args[0].code() != ck.KafkaError.TOPIC_ALREADY_EXISTS:
                raise self.refused(f"topic {topic!r} cannot be created", error.args[0]) from None
        except TimeoutError:
            text = f"topic {topic!r} cannot be created"
            raise self.refused(text, ck.KafkaError(ck.KafkaError._TIMED_OUT)) from None

    def max_message_bytes(self, topic: str) -> int | None:
        """Return the topic's largest batch size in bytes, None if the brokers do not report it."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        try:
            answer = self._client.describe_configs([resource], request_timeout=CALL_SECONDS)[resource]
            return int(answer.result(CALL_SECONDS + 1.0)["max.message.bytes"].value)
        except (ck.KafkaException, TimeoutError, KeyError, ValueError) as error:
            # Reading configurations needs a separate permission; without it the broker's refusals show the limit.
            log.debug("the topic's largest message is unknown", topic=topic, error=str(error))
            return None

    def refused(self, text: str, error: ck.KafkaError) -> ConfigError | RemoteError:
        """Return an error with the brokers' answer, and with advice."""
        said = scrub(error.str(), self._config)
        if error.code() in _FORBIDDEN:
            return ConfigError(f"{self._what}: {text}: {said}; grant the permission, or check client_config")
        if error.code() in _UNREACHABLE:
            self._client.poll(0)  # calls _on_error
            # The client's error gives the reason; the answer to the call says only that it timed out.
            why = self._heard or said
            advice = advise_start(self._brokers)
            return RemoteError(f"{self._what}: no answer from Kafka at {self._brokers}: {why}; {advice}")
        return RemoteError(f"{self._what}: {text} at {self._brokers}: {said}", retryable=error.retriable())

    def _on_error(self, error: ck.KafkaError) -> None:
        """Store why a connection fails; the answer to a call says only that it timed out."""
        if error.code() != ck.KafkaError._ALL_BROKERS_DOWN:
            self._heard = scrub(describe_connection(error.str()), self._config)


class BackgroundCall:
    """A call that may never return (handing offsets to a transaction), on a thread of its own.

    Attributes:
        began: When it began, by the monotonic clock.
        ended: Set when it returned.
        error: Its exception, of any type.
    """

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        """Start the call.

        Args:
            name: The thread's name.
            call: The call.
        """
        self.began = time.monotonic()
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._call = call
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # any type, because nothing else on this thread would see it
            self.error = error
        finally:
            self.ended.set()


def advise_start(brokers: str, setting: str = "`brokers`") -> str:
    """Return advice for brokers that do not answer.

    Example:
        >>> advise_start("127.0.0.1:9093")
        'start Kafka there (to try things out: tidemill broker --port 9093), or correct `brokers`'
    """
    host, _, port = brokers.partition(",")[0].strip().rpartition(":")
    command = "tidemill broker" if port == "9092" else f"tidemill broker --port {port}"
    trial = f" (to try things out: {command})" if host in _HERE and port.isdigit() else ""
    return f"start Kafka there{trial}, or correct {setting}"
