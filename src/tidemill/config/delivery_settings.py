"""The sections `delivery` and `dlq`: how results reach the sinks, and where failed messages go."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tidemill.config.executor_settings import RetryBackoffSettings
from tidemill.config.kafka_names import check_brokers, check_topic_or_empty
from tidemill.config.section import Section


class DeliveryBackoffSettings(RetryBackoffSettings):
    """How long a sink is not tried after a failure: full jitter below an exponential bound."""

    initial_seconds: PositiveFloat = Field(0.1, description="The bound after the first failure.")
    max_seconds: PositiveFloat = Field(10.0, description="The bound stops growing here.")
    multiplier: float = Field(2.0, ge=1, description="Factor by which the bound grows with each failure.")


class BreakerSettings(Section):
    """The circuit breaker of each sink: after several failures in a row, the sink is left alone, then probed."""

    failures: PositiveInt = Field(5, description="This many failures in a row open it.")
    open_seconds: PositiveFloat = Field(
        5.0, description="How long it stays open, at most, before one payload is tried."
    )
    when_open: Literal["hold", "dlq"] = Field(
        "hold",
        description="hold: payloads wait for the sink, and hold up their partitions; dlq: they become dead letters "
        "at once.",
    )


def _name_null(value: object) -> object:
    # What YAML reads where null is written without quotes.
    return "null" if value is None else value


class DeliverySettings(Section):
    """How results are delivered to sinks that are slow or down, or refuse them."""

    max_seconds: PositiveFloat = Field(
        600.0, description="How long a payload is retried before `on_delivery_error` is called."
    )
    max_retries: PositiveInt = Field(
        20,
        description="Retries after `on_delivery_error` returned RETRY, within another max_seconds; then a dead letter.",
    )
    timeout_seconds: PositiveFloat = Field(
        60.0,
        description="A sink that does not answer a batch in this time has failed, unless it has a timeout of its own.",
    )
    non_finite: Annotated[
        Literal["refuse", "null", "string"],
        BeforeValidator(_name_null, json_schema_input_type=Literal["refuse", "null", "string"] | None),
    ] = Field(
        "refuse",
        description="NaN and infinities in what is sent as JSON: refuse the payload, or write null or a string (NaN, "
        "Infinity, -Infinity); pydantic models follow their ser_json_inf_nan.",
    )
    retry_backoff: DeliveryBackoffSettings = Field(
        default_factory=DeliveryBackoffSettings, description="How long a sink is not tried after a failure."
    )
    breaker: BreakerSettings = Field(default_factory=BreakerSettings, description="The circuit breaker of each sink.")


class DeadLetterSettings(Section):
    """Where messages go that could not be processed."""

    topic: Annotated[str, AfterValidator(check_topic_or_empty)] = Field(
        "", description="'' means <source_topic>_dlq; created if it does not exist."
    )
    brokers: Annotated[str, AfterValidator(check_brokers)] = Field("", description="'' means kafka.brokers.")
    on_send_failure: Literal["stall", "drop"] = Field(
        "stall",
        description="When a letter cannot be written: stall makes the partition wait until it can be; drop discards "
        "the letter, which is logged and counted.",
    )
    max_redrives: NonNegativeInt = Field(
        3, description="A message that was redriven this many times is not redriven again."
    )
    path: str = Field(
        "",
        description="For bounded runs only: a folder for dead letters, as Parquet files, instead of a topic; on a "
        "cluster, one that all hosts share.",
    )

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        others = {"topic": self.topic, "brokers": self.brokers, "on_send_failure": self.on_send_failure == "drop"}
        given = [name for name, value in others.items() if value]
        if self.path and given:
            raise ValueError(
                f"path sends dead letters to files instead of a topic; remove it, or remove {' and '.join(given)}"
            )
        return self
