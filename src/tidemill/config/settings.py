"""The configuration: every section, key, default and limit in one place.

Models only; reading files and the environment is in `loading`, hiding secrets in `redaction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from tidemill.config.kafka_names import check_group, check_topic, check_topic_or_empty, refuse_owned
from tidemill.config.section import NonEmpty, Section
from tidemill.config.sinks_settings import SinksSettings
from tidemill.config.triggerer_settings import StoreSettings, TriggererSettings

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


def _source_client_config(value: dict[str, Any]) -> dict[str, Any]:
    return refuse_owned(value, OWNED_SOURCE_KEYS)


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


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
    exactly_once: bool = Field(
        False,
        description="Results, dead letters and offsets in one transaction; all sinks have to be Kafka, on the same "
        "brokers.",
    )
    revoke_timeout_seconds: NonNegativeFloat | None = Field(
        None,
        description="At a rebalance: how long running tasks of partitions that move to another engine may take to "
        "finish. Default: executor.drain_timeout_seconds. With 10 s more it may not exceed max_poll_interval_ms.",
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


class ResidentSettings(Section):
    """How copies of a program are kept alive and fed, in the mode resident."""

    args: list[str] = Field(default_factory=list, description="The arguments that each copy is started with.")
    framing: Literal["json", "length"] = Field(
        "json", description="json: one line each way; length: frames with a length before them, for binary data."
    )
    recycle_after_tasks: NonNegativeInt = Field(
        0, description="A copy that did so many tasks is replaced; 0: it lives on."
    )
    send_ahead: NonNegativeInt = Field(
        0,
        description="With every copy busy, so many more tasks are sent to each: fast for short tasks, which a long one "
        "before them holds up.",
    )


class ExecutorSettings(Section):
    """How tasks are run and how much may be in hand."""

    binary_path: str = Field("", description="The program of tasks that name none.")
    max_executors: PositiveInt = Field(4, description="Processes at the same time, per engine.")
    mode: Literal["process", "resident"] = Field(
        "process",
        description="process: each task is a process; resident: max_executors copies of binary_path stay alive and are "
        "fed tasks.",
    )
    resident: ResidentSettings = Field(
        default_factory=ResidentSettings, description="How copies are kept alive and fed, in the mode resident."
    )
    task_timeout_seconds: PositiveFloat = Field(
        120.0, description="Wall-clock limit of a task that has none of its own."
    )
    term_grace_seconds: NonNegativeFloat = Field(5.0, description="Between SIGTERM and SIGKILL.")
    window_size: PositiveInt = Field(100, description="Most messages handed to `arrange` at once.")
    window_max_bytes: PositiveInt = Field(8 * 1024 * 1024, description="Most bytes handed to `arrange` at once.")
    window_linger_ms: NonNegativeInt = Field(0, description="0: a window closes as soon as nothing more is waiting.")
    max_queued_bytes: PositiveInt = Field(
        64 * 1024 * 1024,
        description="Bytes in hand, per engine, of messages and of results that wait for a sink; beyond, it reads no "
        "more.",
    )
    max_retries: NonNegativeInt = Field(3, description="How often a failed task runs again.")
    retry_backoff: RetryBackoffSettings = Field(
        default_factory=RetryBackoffSettings, description="How long a failed task waits before it runs again."
    )
    max_replacements: NonNegativeInt = Field(
        10, description="How often in a row `on_error` may answer with other tasks; then a dead letter."
    )
    drain_timeout_seconds: NonNegativeFloat = Field(
        30.0, description="At a stop: how long what is in flight may take to finish."
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
    order_by: Literal["none", "key"] = Field(
        "none",
        description="key: a task starts once those of earlier messages of its partition with its key are done, retries "
        "and hooks included.",
    )
    max_failure_ratio: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="The brake: when more than this share of the last 200 finished messages failed (of 50 at least), "
        "the engine takes no more and holds what fails, until a trial succeeds or `tidemill release`; null: no brake.",
    )
    offload_threads: PositiveInt = Field(4, description="Blocking calls of `self.offload` at a time, per engine.")
    block_seconds: NonNegativeFloat = Field(
        0.5, description="A hook that holds up the event loop for longer is named in the log; 0: nobody looks."
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
        if self.mode == "resident" and not self.binary_path:
            problems.append("mode resident keeps copies of binary_path alive: set binary_path too (first, in code)")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class DeliveryBackoffSettings(RetryBackoffSettings):
    """How long a sink is left alone after a failure: full jitter below an exponential bound."""

    initial_seconds: PositiveFloat = Field(0.1, description="The bound after the first failure.")
    max_seconds: PositiveFloat = Field(10.0, description="The bound grows no further than this.")
    multiplier: float = Field(2.0, ge=1, description="By how much the bound grows with each failure.")


class BreakerSettings(Section):
    """The circuit breaker of each sink: after some failures in a row it is spared, then probed."""

    failures: PositiveInt = Field(5, description="So many failures in a row open it.")
    open_seconds: PositiveFloat = Field(5.0, description="How long it stays open at most before one payload is tried.")
    when_open: Literal["hold", "dlq"] = Field(
        "hold", description="hold: what waits for the sink holds its partitions; dlq: it becomes dead letters at once."
    )


class DeliverySettings(Section):
    """How results get to sinks that are slow, down or refuse."""

    max_seconds: PositiveFloat = Field(
        600.0, description="A payload is tried again for so long before `on_delivery_error` is asked."
    )
    max_retries: PositiveInt = Field(
        20, description="Tries after `on_delivery_error` said RETRY, within max_seconds once more; then a dead letter."
    )
    timeout_seconds: PositiveFloat = Field(
        60.0, description="A sink that does not answer a batch for so long has failed, unless it has a time of its own."
    )
    retry_backoff: DeliveryBackoffSettings = Field(
        default_factory=DeliveryBackoffSettings, description="How long a sink is left alone after a failure."
    )
    breaker: BreakerSettings = Field(default_factory=BreakerSettings, description="The circuit breaker of each sink.")


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
    path: str = Field(
        "",
        description="For bounded runs only: a folder for dead letters, as Parquet files, instead of a topic; on a "
        "cluster one that all hosts share.",
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
    start_timeout_seconds: PositiveFloat = Field(
        120.0, description="How long Spark may take to start, its JVM included."
    )


class HistorySettings(Section):
    """A report of every finished message, as Parquet."""

    path: str = Field("", description="A folder; '' writes no history.")


class CacheSettings(Section):
    """What handlers keep under `self.cache`: a memory over a file per engine."""

    enabled: bool = Field(False, description="Whether engines have a cache.")
    path: NonEmpty = Field(
        "cache", description="The folder of the files `<engine>-cache.db`; relative to the driver's directory."
    )
    flush_interval_seconds: PositiveFloat = Field(3.0, description="How often what was set is written to the file.")
    max_memory_entries: PositiveInt = Field(10_000, description="Entries in memory; others are read from the file.")


class Settings(Section):
    """Everything that can be told, to a pipeline and to a trigger host: one file may be for both."""

    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    executor: ExecutorSettings = Field(default_factory=ExecutorSettings)
    sinks: SinksSettings = Field(default_factory=SinksSettings)
    delivery: DeliverySettings = Field(default_factory=DeliverySettings)
    dlq: DeadLetterSettings = Field(default_factory=DeadLetterSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    spark: SparkSettings = Field(default_factory=SparkSettings)
    history: HistorySettings = Field(default_factory=HistorySettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    triggerer: TriggererSettings = Field(default_factory=TriggererSettings)
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

    @model_validator(mode="after")
    def _check_exactly_once(self) -> Self:
        if self.kafka.exactly_once and (problems := transaction_problems(self)):
            raise ValueError(
                "kafka.exactly_once puts results, dead letters and offsets into one transaction of one producer: "
                f"{'; '.join(problems)}; change that, or set kafka.exactly_once to false"
            )
        return self

    @model_validator(mode="after")
    def _check_revoke_time(self) -> Self:
        # Trigger hosts read this section too, and have no revokes that wait: what nobody set is checked by pipelines.
        told = "revoke_timeout_seconds" in self.kafka.model_fields_set
        told |= "drain_timeout_seconds" in self.executor.model_fields_set
        if told and (problem := revoke_problem(self)):
            raise ValueError(problem)
        return self

    @property
    def revoke_timeout_seconds(self) -> float:
        """How long running tasks of revoked partitions are waited for."""
        seconds = self.kafka.revoke_timeout_seconds
        return self.executor.drain_timeout_seconds if seconds is None else seconds

    @property
    def dlq_topic(self) -> str:
        """The dead-letter topic."""
        return self.dlq.topic or f"{self.kafka.source_topic}_dlq"

    @property
    def dlq_brokers(self) -> str:
        """The brokers of the dead-letter topic."""
        return self.dlq.brokers or self.kafka.brokers


#: On top of what tasks may take, an engine needs this long at most to give partitions up.
REVOKE_MARGIN_SECONDS = 10.0


def revoke_problem(settings: Settings) -> str | None:
    """Say why an engine could be expelled from its group while it waits for tasks of revoked partitions."""
    seconds, limit_ms = settings.revoke_timeout_seconds, settings.kafka.max_poll_interval_ms
    if (seconds + REVOKE_MARGIN_SECONDS) * 1000 <= limit_ms:
        return None
    where = ""
    if settings.kafka.revoke_timeout_seconds is None:
        where = ", the value of executor.drain_timeout_seconds"
    return (
        f"kafka.revoke_timeout_seconds ({seconds:g}{where}) and {REVOKE_MARGIN_SECONDS:g} s may not exceed "
        f"kafka.max_poll_interval_ms ({limit_ms}), or the group would expel an engine that waits for its tasks; "
        "lower the one or raise the other"
    )


def transaction_problems(settings: Settings) -> list[str]:
    """Return what stands in the way of one transaction for everything that a pipeline writes."""
    problems = []
    own = ("", settings.kafka.brokers)
    for kind, named in settings.sinks.by_type().items():
        problems += [f"sinks.{kind}.{name} is no Kafka sink" for name in (named if kind != "kafka" else ())]
    for name, sink in settings.sinks.kafka.items():
        if sink.brokers not in own:
            problems.append(f"sinks.kafka.{name} is on other brokers ({sink.brokers}) than kafka ({own[1]})")
    if settings.dlq.brokers not in own:
        problems.append(f"dlq is on other brokers ({settings.dlq.brokers}) than kafka ({own[1]})")
    if settings.dlq.on_send_failure == "drop":
        problems.append("dlq.on_send_failure is drop, but no letter can be dropped out of a transaction")
    configs = {name: sink.client_config for name, sink in settings.sinks.kafka.items()}
    first = next(iter(configs), "")
    problems += [
        f"sinks.kafka.{name} has another client_config than sinks.kafka.{first}"
        for name, config in configs.items()
        if config != configs[first]
    ]
    level = settings.kafka.client_config.get("isolation.level", "read_committed")
    if level != "read_committed":
        problems.append(f"kafka.client_config has isolation.level {level}, so a takeover would read too early")
    return problems
