"""The whole configuration: all sections, and the checks that span several of them.

Models only: `loading` reads files and the environment, `redaction` hides secrets.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from tidemill.config.sections.dags_settings import DagsSettings
from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.config.sections.delivery_settings import DeadLetterSettings, DeliverySettings
from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.sections.metrics_settings import MetricsSettings
from tidemill.config.sections.section import NonEmpty, Section, to_upper
from tidemill.config.sections.services_settings import ServicesSettings
from tidemill.config.sections.sinks_settings import SinksSettings
from tidemill.config.sections.triggerer_settings import StoreSettings, TriggererSettings
from tidemill.config.sections.worker_settings import LogsSettings, WorkerSettings


class LoggingSettings(Section):
    """The level and format of the log."""

    level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(to_upper)] = Field(
        "INFO", description="The lowest level to log."
    )
    format: Literal["auto", "console", "json"] = Field(
        "auto",
        description="console: readable text; json: one JSON object per line; auto: console on a terminal, json "
        "otherwise.",
    )


class SparkSettings(Section):
    """The Spark cluster, and the number of engines."""

    master: NonEmpty = Field("local", description="The Spark master; local means local[engines + 1].")
    engines: PositiveInt | None = Field(
        None, description="The number of engines. Default: the smaller of partitions and cores."
    )
    conf: dict[str, str] = Field(default_factory=dict, description="Spark properties, passed on unchanged.")
    start_timeout_seconds: PositiveFloat = Field(
        120.0, description="How long Spark may take to start, including its JVM."
    )


class HistorySettings(Section):
    """A report on every finished message, as Parquet files."""

    path: str = Field("", description="The folder of the report; '': none is written.")


class CacheSettings(Section):
    """The cache for handlers, `self.cache`: in memory, backed by one file per engine."""

    enabled: bool = Field(False, description="Turns the cache on.")
    path: NonEmpty = Field(
        "cache", description="The folder of the files `<engine>-cache.db`, relative to the driver's directory."
    )
    flush_interval_seconds: PositiveFloat = Field(
        3.0, description="The interval at which changes are written to the file."
    )
    max_memory_entries: PositiveInt = Field(
        10_000, description="The number of entries in memory; others are read from the file."
    )


class Settings(Section):
    """All settings of pipelines and trigger hosts: one file can serve both."""

    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    executor: ExecutorSettings = Field(default_factory=ExecutorSettings)
    sinks: SinksSettings = Field(default_factory=SinksSettings)
    delivery: DeliverySettings = Field(default_factory=DeliverySettings)
    dlq: DeadLetterSettings = Field(default_factory=DeadLetterSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    spark: SparkSettings = Field(default_factory=SparkSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    debug: DebugSettings = Field(default_factory=DebugSettings)
    history: HistorySettings = Field(default_factory=HistorySettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    triggerer: TriggererSettings = Field(default_factory=TriggererSettings)
    services: ServicesSettings = Field(default_factory=ServicesSettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    logs: LogsSettings = Field(default_factory=LogsSettings)
    dags: DagsSettings = Field(default_factory=DagsSettings)
    worker_name_env: NonEmpty = Field(
        "WORKER_ID",
        description="The environment variable that holds this worker's name; if it is not set, the host name is used.",
    )
    cluster_name: str = Field("", description="The name of this installation, shown in logs.")
    cluster_name_env: str = Field(
        "", description="The environment variable that holds the cluster name; if it is set, it overrides cluster_name."
    )

    @model_validator(mode="after")
    def _check_topics(self) -> Self:
        # On the same brokers, every dead letter would come back as a message, forever.
        if self.dlq_topic == self.kafka.source_topic and self.dlq_brokers == self.kafka.brokers:
            raise ValueError(f"dlq.topic must not be the source topic ({self.kafka.source_topic})")
        return self

    @model_validator(mode="after")
    def _check_exactly_once(self) -> Self:
        if self.kafka.exactly_once and (problems := find_transaction_problems(self)):
            raise ValueError(
                "kafka.exactly_once puts results, dead letters and offsets into one transaction of one producer: "
                f"{'; '.join(problems)}; change that, or set kafka.exactly_once to false"
            )
        return self

    @model_validator(mode="after")
    def _check_revoke_time(self) -> Self:
        # Trigger hosts read these sections too, and do not wait for tasks; therefore only pipelines check the defaults.
        is_set = "revoke_timeout_seconds" in self.kafka.model_fields_set
        is_set |= "drain_timeout_seconds" in self.executor.model_fields_set
        if is_set and (problem := find_revoke_problem(self)):
            raise ValueError(problem)
        return self

    @property
    def revoke_timeout_seconds(self) -> float:
        """The seconds that an engine waits for running tasks of revoked partitions."""
        seconds = self.kafka.revoke_timeout_seconds
        return self.executor.drain_timeout_seconds if seconds is None else seconds

    @property
    def dlq_topic(self) -> str:
        return self.dlq.topic or f"{self.kafka.source_topic}_dlq"

    @property
    def dlq_brokers(self) -> str:
        return self.dlq.brokers or self.kafka.brokers


#: In addition to the time for tasks, an engine needs up to this long to give up partitions.
REVOKE_MARGIN_SECONDS = 10.0


def find_revoke_problem(settings: Settings) -> str | None:
    """Return why an engine could be expelled from its group while it waits for tasks of revoked partitions, or None."""
    seconds, limit_ms = settings.revoke_timeout_seconds, settings.kafka.max_poll_interval_ms
    if (seconds + REVOKE_MARGIN_SECONDS) * 1000 <= limit_ms:
        return None
    where = ""
    if settings.kafka.revoke_timeout_seconds is None:
        where = ", the value of executor.drain_timeout_seconds"
    return (
        f"kafka.revoke_timeout_seconds ({seconds:g}{where}) and {REVOKE_MARGIN_SECONDS:g} s must not exceed "
        f"kafka.max_poll_interval_ms ({limit_ms}), or the group would expel an engine that waits for its tasks; "
        "lower one or raise the other"
    )


def find_transaction_problems(settings: Settings) -> list[str]:
    """Return why one transaction cannot contain everything that a pipeline writes; empty if it can."""
    problems = []
    own = ("", settings.kafka.brokers)
    for kind, named in settings.sinks.group_by_type().items():
        problems += [f"sinks.{kind}.{name} is not a Kafka sink" for name in (named if kind != "kafka" else ())]
    for name, sink in settings.sinks.kafka.items():
        if sink.brokers not in own:
            problems.append(f"sinks.kafka.{name} is on other brokers ({sink.brokers}) than kafka ({own[1]})")
    if settings.dlq.brokers not in own:
        problems.append(f"dlq is on other brokers ({settings.dlq.brokers}) than kafka ({own[1]})")
    if settings.dlq.on_send_failure == "drop":
        problems.append("dlq.on_send_failure is drop, but a letter cannot be dropped from a transaction")
    configs = {name: sink.client_config for name, sink in settings.sinks.kafka.items()}
    first = next(iter(configs), "")
    problems += [
        f"sinks.kafka.{name} has a different client_config from sinks.kafka.{first}"
        for name, config in configs.items()
        if config != configs[first]
    ]
    level = settings.kafka.client_config.get("isolation.level", "read_committed")
    if level != "read_committed":
        problems.append(
            f"kafka.client_config has isolation.level {level}, so a takeover could read uncommitted messages"
        )
    return problems
