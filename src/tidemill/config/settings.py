"""The configuration: every section, key, default and limit in one place.

Models only; reading files and the environment is in `loading`, hiding secrets in `redaction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from tidemill.config.kafka_names import check_group, check_topic, check_topic_or_empty, refuse_owned

NonEmpty = Annotated[str, Field(min_length=1)]
Topic = Annotated[str, AfterValidator(check_topic)]
Group = Annotated[str, AfterValidator(check_group)]

#: librdkafka's keys that tidemill sets itself, and what to use instead.
OWNED_SOURCE_KEYS: Mapping[str, str] = {
    "bootstrap.servers": "set kafka.brokers",
    "metadata.broker.list": "set kafka.brokers",
    "group.id": "set kafka.consumer_group",
    "group.instance.id": "it is made of kafka.consumer_group, the worker's name and the engine's number",
    "group.protocol": "it is always classic",
    "enable.auto.commit": "it is always false: tidemill commits what is done",
    "enable.auto.offset.store": "it is always false: tidemill commits what is done",
    "auto.offset.reset": "it is always earliest",
    "partition.assignment.strategy": "it is always cooperative-sticky",
    "session.timeout.ms": "set kafka.session_timeout_ms",
    "heartbeat.interval.ms": "set kafka.heartbeat_interval_ms",
    "max.poll.interval.ms": "set kafka.max_poll_interval_ms",
}
OWNED_SINK_KEYS: Mapping[str, str] = {
    "bootstrap.servers": "set brokers of this sink",
    "metadata.broker.list": "set brokers of this sink",
}


def _source_client_config(value: dict[str, Any]) -> dict[str, Any]:
    return refuse_owned(value, OWNED_SOURCE_KEYS)


def _sink_client_config(value: dict[str, Any]) -> dict[str, Any]:
    return refuse_owned(value, OWNED_SINK_KEYS)


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


class Section(BaseModel):
    """A section refuses keys that it does not know, and values of another type ("5" is not 5)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=False,
        validate_assignment=True,
        strict=True,
        allow_inf_nan=False,
        # Wherever such an error ends up, a password must not be in it.
        hide_input_in_errors=True,
    )


class KafkaSettings(Section):
    """The source topic and the consumer group."""

    brokers: NonEmpty = Field("localhost:9092", description="host:port of one or more brokers, with commas.")
    source_topic: Topic = Field("input-events", description="The topic to read; it has to exist.")
    consumer_group: Group = Field("tidemill-workers", description="The group that shares its partitions.")
    max_poll_records: PositiveInt = Field(100, description="Messages taken from the consumer at once.")
    max_poll_interval_ms: PositiveInt = Field(
        300_000, description="An engine that does not poll for so long loses its partitions."
    )
    session_timeout_ms: PositiveInt = Field(
        45_000, description="An engine that is not heard of for so long loses its partitions."
    )
    heartbeat_interval_ms: PositiveInt = Field(
        3_000, description="How often an engine is heard of; below session_timeout_ms."
    )
    on_parse_error: Literal["dlq", "pass"] = Field(
        "dlq", description="pass: hand the message to `arrange` with payload None and parse_error set."
    )
    client_config: Annotated[dict[str, Any], AfterValidator(_source_client_config)] = Field(
        default_factory=dict,
        description="Passed to librdkafka. Its security, sasl and ssl keys also apply to dead letters and to "
        "Kafka sinks that inherit the brokers.",
    )

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        problems = []
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            problems.append(
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms}) has to be below session_timeout_ms "
                f"({self.session_timeout_ms})"
            )
        if self.session_timeout_ms > self.max_poll_interval_ms:
            problems.append(
                f"session_timeout_ms ({self.session_timeout_ms}) may not exceed max_poll_interval_ms "
                f"({self.max_poll_interval_ms})"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


class RetryBackoffSettings(Section):
    """How long a failed task waits before it runs again: full jitter below an exponential bound."""

    initial_seconds: PositiveFloat = Field(0.5, description="The bound before the first retry.")
    max_seconds: PositiveFloat = Field(30.0, description="The bound grows no further than this.")
    multiplier: float = Field(2.0, ge=1, description="By how much the bound grows with each retry.")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.initial_seconds > self.max_seconds:
            raise ValueError(
                f"initial_seconds ({self.initial_seconds}) may not exceed max_seconds ({self.max_seconds})"
            )
        return self


class ExecutorSettings(Section):
    """How tasks are run and how much may be in hand."""

    binary_path: str = Field("", description="The program of tasks that name none.")
    max_executors: PositiveInt = Field(4, description="Processes at the same time, per engine.")
    task_timeout_seconds: PositiveFloat = Field(
        120.0, description="Wall-clock limit of a task that has none of its own."
    )
    term_grace_seconds: NonNegativeFloat = Field(5.0, description="Between SIGTERM and SIGKILL.")
    window_size: PositiveInt = Field(100, description="Most messages handed to `arrange` at once.")
    window_max_bytes: PositiveInt = Field(8 * 1024 * 1024, description="Most bytes handed to `arrange` at once.")
    window_linger_ms: NonNegativeInt = Field(0, description="0: a window closes as soon as nothing more is waiting.")
    max_queued_bytes: PositiveInt = Field(
        64 * 1024 * 1024, description="Bytes of messages in hand, per engine, beyond which it reads no more."
    )
    max_retries: NonNegativeInt = Field(3, description="How often a failed task runs again.")
    retry_backoff: RetryBackoffSettings = Field(
        default_factory=RetryBackoffSettings, description="How long a failed task waits before it runs again."
    )
    drain_timeout_seconds: NonNegativeFloat = Field(
        30.0, description="At a stop or a rebalance: how long work in hand may take to finish."
    )
    backpressure_high_multiplier: PositiveInt = Field(
        32, description="Times max_executors: messages in hand, per engine, beyond which it reads no more."
    )
    backpressure_low_multiplier: PositiveInt = Field(
        4, description="Times max_executors: messages in hand below which it reads again."
    )
    max_uncommitted: PositiveInt = Field(
        10_000, description="Messages read and not committed, per partition: what a crash can repeat at most."
    )
    max_stdout_bytes: PositiveInt = Field(16 * 1024 * 1024, description="A task that prints more fails.")
    max_stderr_bytes: PositiveInt = Field(1024 * 1024, description="A task that prints more fails.")
    env: dict[str, str] = Field(default_factory=dict, description="Added to the environment of every task.")
    env_inherit_deny: list[str] = Field(
        default_factory=lambda: [
            "TIDEMILL_*",
            "*PASSWORD*",
            "*SECRET*",
            "*TOKEN*",
            "*_KEY",
            "*_DSN",
            "*CREDENTIAL*",
        ],
        description="Patterns of variables that tasks do not inherit.",
    )
    commit: Literal["message", "window"] = Field(
        "message", description="window: offsets wait for the window's own payloads too."
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        problems = []
        if self.backpressure_low_multiplier >= self.backpressure_high_multiplier:
            problems.append(
                f"backpressure_low_multiplier ({self.backpressure_low_multiplier}) has to be below "
                f"backpressure_high_multiplier ({self.backpressure_high_multiplier})"
            )
        if self.window_max_bytes > self.max_queued_bytes:
            problems.append(
                f"window_max_bytes ({self.window_max_bytes}) may not exceed max_queued_bytes ({self.max_queued_bytes})"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


class KafkaSinkSettings(Section):
    """A topic to write to."""

    topic: Topic = Field(description="The topic to write to; it has to exist.")
    brokers: str = Field("", description="'' inherits kafka.brokers and its security settings.")
    client_config: Annotated[dict[str, Any], AfterValidator(_sink_client_config)] = Field(
        default_factory=dict, description="Passed to librdkafka."
    )
    ui_url: str = Field("", description="Where people look at what was written.")


class FilesystemSinkSettings(Section):
    """A folder to write JSON lines into."""

    base_path: NonEmpty = Field(description="Relative to the driver's directory; shared between hosts on a cluster.")
    fsync: bool = Field(False, description="Wait until what was written is on the disk.")
    ui_url: str = Field("", description="Where people look at what was written.")


class SinksSettings(Section):
    """The sinks, by type and name."""

    kafka: dict[str, KafkaSinkSettings] = Field(default_factory=dict, description="Topics, by name.")
    filesystem: dict[str, FilesystemSinkSettings] = Field(default_factory=dict, description="Folders, by name.")

    def is_empty(self) -> bool:
        """Whether no sink is configured at all."""
        return not (self.kafka or self.filesystem)


class DeadLetterSettings(Section):
    """Where messages go that could not be processed."""

    topic: Annotated[str, AfterValidator(check_topic_or_empty)] = Field(
        "", description="'' means <source_topic>_dlq; made if it does not exist."
    )
    brokers: str = Field("", description="'' means those of kafka.")
    on_send_failure: Literal["stall", "drop"] = Field(
        "stall",
        description="When the topic does not take a letter: stall lets the partition wait until it does; drop gives "
        "the letter up, logged and counted.",
    )
    max_redrives: NonNegativeInt = Field(
        3, description="A message that was dead-lettered and sent again so often is not sent again any more."
    )


class LoggingSettings(Section):
    """What is logged, and how."""

    level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_upper)] = Field(
        "INFO", description="The least level that is logged."
    )
    format: Literal["json", "console"] = Field("json", description="console is for people.")


class SparkSettings(Section):
    """Where the engines live."""

    master: NonEmpty = Field("local", description="local means local[engines + 1].")
    engines: PositiveInt | None = Field(None, description="Default: the smaller of partitions and cores.")
    conf: dict[str, str] = Field(default_factory=dict, description="Passed to Spark as it is.")


class HistorySettings(Section):
    """A report of every finished message, as Parquet."""

    path: str = Field("", description="A folder; '' writes no history.")


class Settings(Section):
    """Everything a pipeline can be told."""

    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    executor: ExecutorSettings = Field(default_factory=ExecutorSettings)
    sinks: SinksSettings = Field(default_factory=SinksSettings)
    dlq: DeadLetterSettings = Field(default_factory=DeadLetterSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    spark: SparkSettings = Field(default_factory=SparkSettings)
    history: HistorySettings = Field(default_factory=HistorySettings)
    worker_name_env: NonEmpty = Field(
        "WORKER_ID", description="The variable with this worker's name; without it, the name of the host."
    )
    cluster_name: str = Field("", description="A name for this installation, shown in logs.")
    cluster_name_env: str = Field("", description="A variable with that name, which then wins.")

    @model_validator(mode="after")
    def _check_topics(self) -> Self:
        # With the same brokers a letter would come back as a message, for ever.
        if self.dlq_topic == self.kafka.source_topic and self.dlq_brokers == self.kafka.brokers:
            raise ValueError(f"dlq.topic may not be the source topic ({self.kafka.source_topic})")
        return self

    @property
    def dlq_topic(self) -> str:
        """The dead-letter topic."""
        return self.dlq.topic or f"{self.kafka.source_topic}_dlq"

    @property
    def dlq_brokers(self) -> str:
        """The brokers of the dead-letter topic."""
        return self.dlq.brokers or self.kafka.brokers
