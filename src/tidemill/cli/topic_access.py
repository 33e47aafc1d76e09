"""What `tidemill send` and `tidemill consume` share: options, finding the topic, and their client."""

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
    from tidemill.config.kafka_settings import KafkaSettings
    from tidemill.config.settings import Settings

ClientT = TypeVar("ClientT")
Configure = Callable[["KafkaSettings", str, Mapping[str, Any]], dict[str, Any]]
#: Brokers that have not answered by then are named while they are waited for.
NOTICE_SECONDS = 1.0

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", autocompletion=complete_topics)]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="CONFIG",
        help="The YAML file that names the brokers; default: the one that TIDEMILL_CONFIG names, else localhost:9092.",
    ),
]


def load_for_topic(config: Path | None, topic: str) -> Settings:
    """Return the configuration, once the topic's name is known to be valid.

    Raises:
        ConfigError: The name or the configuration is wrong.
    """
    from tidemill.config.kafka_names import check_topic
    from tidemill.config.loading import load_settings

    try:
        check_topic(topic)
    except ValueError as error:
        raise ConfigError(f"TOPIC {error}") from None
    return load_settings(config)


def require_topic(settings: Settings, topic: str) -> None:
    """Make sure that the brokers have the topic; says so on standard error if they do not answer at once.

    Raises:
        ConfigError: The brokers deny access, or librdkafka rejects the configuration.
        RemoteError: They do not answer, or have no such topic.
    """
    from tidemill.config.kafka_names import describe_creation
    from tidemill.runtime.kafka.client import CALL_SECONDS, TopicAdmin, make_client_config

    brokers = settings.kafka.brokers
    admin = TopicAdmin(make_client_config(settings.kafka, "", {}), "kafka")
    with waiting_for_brokers(brokers, CALL_SECONDS):
        names = admin.names()
    # The list of topics may be older than a topic that was just created.
    if topic in names or admin.exists(topic):
        return
    near = difflib.get_close_matches(topic, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"{describe_creation(topic, brokers)}, or check kafka.brokers"
    raise RemoteError(f"topic {topic!r} does not exist at {brokers}; {hint}", retryable=False)


@contextlib.contextmanager
def waiting_for_brokers(brokers: str, seconds: float) -> Iterator[None]:
    """Say on standard error that brokers have not answered if a block takes longer than `NOTICE_SECONDS`.

    Args:
        brokers: What is waited for.
        seconds: How long it may take.
    """
    text = f"no answer from Kafka at {brokers} yet; waiting up to {seconds:g} s"
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
    """Return a client, and what removes the secrets of its configuration from a text; it connects later.

    Args:
        create: Its class.
        configure: Returns its configuration: `make_client_config` or `make_producer_config`.
        kafka: The `kafka` section.
        overrides: What the command sets.

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
        raise ConfigError(f"bad client configuration: {text}; correct kafka.client_config") from None
    return client, lambda text: scrub(text, secrets)
