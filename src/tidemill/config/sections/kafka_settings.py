"""The section `kafka`: the source topic and the consumer group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from tidemill.config.kafka_names import check_brokers, check_group, check_topic, refuse_owned
from tidemill.config.sections.section import NonEmpty, Section

Topic = Annotated[str, AfterValidator(check_topic)]
Group = Annotated[str, AfterValidator(check_group)]

#: The librdkafka keys that tidemill sets itself, each with an alternative.
OWNED_SOURCE_KEYS: Mapping[str, str] = {
    "bootstrap.servers": "set kafka.brokers",
    "metadata.broker.list": "set kafka.brokers",
    "group.id": "set kafka.consumer_group",
    "group.instance.id": "it is built from kafka.consumer_group, the worker's name and the engine's number",
    "group.protocol": "it is always classic",
    "enable.auto.commit": "it is always false: tidemill commits finished offsets",
    "enable.auto.offset.store": "it is always false: tidemill commits finished offsets",
    "auto.offset.reset": "it is always earliest",
    "partition.assignment.strategy": "it is always cooperative-sticky",
    "session.timeout.ms": "set kafka.session_timeout_ms",
    "heartbeat.interval.ms": "set kafka.heartbeat_interval_ms",
    "max.poll.interval.ms": "set kafka.max_poll_interval_ms",
}


def _check_client_config(value: dict[str, Any]) -> dict[str, Any]:
    return refuse_owned(value, OWNED_SOURCE_KEYS)


class KafkaSettings(Section):
    """The source topic and the consumer group."""

    brokers: Annotated[NonEmpty, AfterValidator(check_brokers)] = Field(
        "localhost:9092", description="host:port of one or more brokers, separated by commas."
    )
    source_topic: Topic = Field("input-events", description="The topic to read; it must exist.")
    consumer_group: Group = Field(
        "tidemill-workers", description="The consumer group whose members share the partitions."
    )
    max_poll_records: PositiveInt = Field(
        100, description="The maximum number of messages taken from the consumer at once."
    )
    max_poll_interval_ms: PositiveInt = Field(
        300_000, description="An engine that does not poll for this long loses its partitions."
    )
    session_timeout_ms: PositiveInt = Field(
        45_000, description="An engine without a heartbeat for this long loses its partitions."
    )
    heartbeat_interval_ms: PositiveInt = Field(
        1_000, description="The time between an engine's heartbeats; must be below session_timeout_ms."
    )
    on_parse_error: Literal["dlq", "pass"] = Field(
        "dlq",
        description="dlq: dead-letter a message that cannot be parsed; pass: give it to `arrange` with payload None "
        "and parse_error set.",
    )
    exactly_once: bool = Field(
        False,
        description="Commits results, dead letters and offsets in one transaction; all sinks must be Kafka sinks on "
        "the same brokers.",
    )
    revoke_timeout_seconds: NonNegativeFloat | None = Field(
        None,
        description="How long running tasks of partitions that move to another engine may take to finish during a "
        "rebalance. Default: executor.drain_timeout_seconds. This time plus 10 s must not exceed max_poll_interval_ms.",
    )
    client_config: Annotated[dict[str, Any], AfterValidator(_check_client_config)] = Field(
        default_factory=dict,
        description="Properties passed to librdkafka. The security, sasl and ssl properties also apply to dead letters "
        "and to Kafka sinks that inherit the brokers.",
    )

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        problems = []
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            problems.append(
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms}) must be below session_timeout_ms "
                f"({self.session_timeout_ms})"
            )
        if self.session_timeout_ms > self.max_poll_interval_ms:
            problems.append(
                f"session_timeout_ms ({self.session_timeout_ms}) must not exceed max_poll_interval_ms "
                f"({self.max_poll_interval_ms})"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self
