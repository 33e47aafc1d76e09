"""Shared by `tidemill send` and `tidemill consume`: options, the check of the topic, and the client."""

from __future__ import annotations

import contextlib
import difflib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tidemill.cli.completion import complete_topics
from tidemill.core.errors import ConfigError, RemoteError

if TYPE_CHECKING:
    from tidemill.config.sections.kafka_settings import KafkaSettings
    from tidemill.config.settings import Settings

ClientT = TypeVar("ClientT")
Configure = Callable[["KafkaSettings", str, Mapping[str, Any]], dict[str, Any]]
#: A notice names brokers that have not answered after this time.
NOTICE_SECONDS = 1.0

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", autocompletion=complete_topics)]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="CONFIG",
        help="The YAML file with the brokers; default: the file in TIDEMILL_CONFIG; without one, localhost:9092.",
    ),
]


def load_for_topic(config: Path | None, topic: str) -> Settings:
    """Return the configuration, after checking the topic's name.

    Raises:
        ConfigError: The name or the configuration is invalid.
    """
    from tidemill.config.kafka_names import check_topic
    from tidemill.config.loading import load_settings

    try:
        check_topic(topic)
    except ValueError as error:
        raise ConfigError(f"TOPIC {error}") from None
    return load_settings(config)


def require_topic(settings: Settings, topic: str) -> None:
    """Check that the brokers have the topic; print a notice if they are slow to answer.

    Raises:
        ConfigError: The brokers deny access, or librdkafka rejects the configuration.
        RemoteError: The brokers do not answer, or the topic does not exist.
    """
    from tidemill.config.kafka_names import describe_creation
    from tidemill.runtime.kafka.client import CALL_SECONDS, TopicAdmin, make_client_config

    brokers = settings.kafka.brokers
    admin = TopicAdmin(make_client_config(settings.kafka, "", {}), "kafka")
    with waiting_for_brokers(brokers, CALL_SECONDS):
        names = admin.names()
    # The list of topics may be older than a newly created topic.
    if topic in names or admin.exists(topic):
        return
    near = difflib.get_close_matches(topic, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"{describe_creation(topic, brokers)}, or check kafka.brokers"
    raise RemoteError(f"topic {topic!r} does not exist at {brokers}; {hint}", retryable=False)


@contextlib.contextmanager
def waiting_for_brokers(brokers: str, seconds: float) -> Iterator[None]:
    """Print a notice about the brokers if a block takes longer than `NOTICE_SECONDS`.

    Args:
        brokers: The addresses of the brokers.
        seconds: How long the block may take.
    """
    text = f"Kafka at {brokers} has not answered yet; waiting up to {seconds:g} s"
    notice = threading.Timer(NOTICE_SECONDS, typer.echo, [text], {"err": True})
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def open_client(
    create: Callable[..., ClientT], configure: Configure, kafka: KafkaSettings, overrides: dict[str, Any]
) -> tuple[ClientT, Callable[[str], str]]:
    """Return a client that connects later, and a function that removes the configuration's secrets from a text.

    Args:
        create: The class of the client.
        configure: Returns the configuration: `make_client_config` or `make_producer_config`.
        kafka: The `kafka` section.
        overrides: Settings of the command.

    Raises:
        ConfigError: librdkafka rejects the configuration.
    """
    import confluent_kafka as ck

    from tidemill.runtime.kafka.client import LibraryLog, describe_client_error, scrub

    secrets = configure(kafka, "", {})
    try:
        client = create(configure(kafka, "", overrides), logger=LibraryLog())
    except (ck.KafkaException, TypeError, ValueError) as error:
        text = scrub(describe_client_error(error), secrets)
        raise ConfigError(f"invalid client configuration: {text}; correct kafka.client_config") from None
    return client, lambda text: scrub(text, secrets)
