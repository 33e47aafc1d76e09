"""The sections `delivery` and `dlq`: how results reach the sinks, and where failed messages go."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tidemill.config.kafka_names import check_brokers, check_topic_or_empty
from tidemill.config.sections.executor_settings import RetryBackoffSettings
from tidemill.config.sections.section import Section


class DeliveryBackoffSettings(RetryBackoffSettings):
    """The pause after a failure of a sink: full jitter below an exponential bound."""

    initial_seconds: PositiveFloat = Field(0.1, description="The bound after the first failure.")
    max_seconds: PositiveFloat = Field(10.0, description="The upper limit of the bound.")
    multiplier: float = Field(2.0, ge=1, description="The factor by which the bound grows with each failure.")


class BreakerSettings(Section):
    """The circuit breaker of each sink: after several failures in a row, the sink is left alone, then probed."""

    failures: PositiveInt = Field(5, description="The number of consecutive failures that opens it.")
    open_seconds: PositiveFloat = Field(
        5.0, description="The longest time it stays open before one payload is sent as a probe."
    )
    when_open: Literal["hold", "dlq"] = Field(
        "hold",
        description="hold: payloads wait for the sink and hold up their partitions; dlq: they become dead letters at "
        "once.",
    )


def _name_null(value: object) -> object:
    # YAML reads an unquoted null as None.
    return "null" if value is None else value


class DeliverySettings(Section):
    """Time limits, retries and the circuit breaker for the delivery to sinks."""

    max_seconds: PositiveFloat = Field(
        600.0, description="How long a payload is retried before `on_delivery_error` is called."
    )
    max_retries: PositiveInt = Field(
        20,
        description="The maximum number of retries after `on_delivery_error` returned RETRY, within another "
        "max_seconds; then the payload becomes a dead letter.",
    )
    timeout_seconds: PositiveFloat = Field(
        60.0,
        description="A sink that does not answer a batch within this time has failed, unless it has a timeout of its "
        "own.",
    )
    non_finite: Annotated[
        Literal["refuse", "null", "string"],
        BeforeValidator(_name_null, json_schema_input_type=Literal["refuse", "null", "string"] | None),
    ] = Field(
        "refuse",
        description="How NaN and infinities are sent as JSON. refuse: refuse the payload; null: write null; string: "
        "write NaN, Infinity or -Infinity as a string. Pydantic models follow their own ser_json_inf_nan.",
    )
    retry_backoff: DeliveryBackoffSettings = Field(
        default_factory=DeliveryBackoffSettings, description="The pause after a failure of a sink."
    )
    breaker: BreakerSettings = Field(default_factory=BreakerSettings, description="The circuit breaker of each sink.")


class DeadLetterSettings(Section):
    """The dead-letter topic, for messages that could not be processed."""

    topic: Annotated[str, AfterValidator(check_topic_or_empty)] = Field(
        "", description="'' means <source_topic>_dlq; created if it does not exist."
    )
    brokers: Annotated[str, AfterValidator(check_brokers)] = Field("", description="'' means kafka.brokers.")
    on_send_failure: Literal["stall", "drop"] = Field(
        "stall",
        description="What to do when a dead letter cannot be written. stall: the partition waits until it can be "
        "written; drop: the letter is discarded, logged and counted.",
    )
    max_redrives: NonNegativeInt = Field(3, description="The number of times a message may be redriven.")
    path: str = Field(
        "",
        description="Only for bounded runs: a folder for dead letters, as Parquet files, instead of a topic. On a "
        "cluster, all hosts must share it.",
    )

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        others = {"topic": self.topic, "brokers": self.brokers, "on_send_failure": self.on_send_failure == "drop"}
        given = [name for name, value in others.items() if value]
        if self.path and given:
            raise ValueError(
                f"path sends dead letters to files instead of a topic; remove it, or remove {' and '.join(given)}"
            )
        return self
