"""Models of the REST API for a pipeline; the pages show the same."""

from __future__ import annotations

from pydantic import BaseModel, Field


class EngineSlotView(BaseModel):
    """An engine slot, and the engine in it."""

    slot: int
    state: str = Field(description="idle, waiting, starting, running, restarting, link lost, cancelled or finished.")
    is_well: bool
    host: str | None
    pid: int | None
    starts: int = Field(description="How many engines this slot has had.")
    silent_seconds: float | None = Field(description="Seconds since the engine's last report; null without a link.")
    partitions: int
    tasks_running: int
    tasks_queued: int
    tasks_in_backoff: int
    in_flight: int
    done: int = Field(description="Messages that this slot's engines have finished.")
    cpu_percent: float | None = Field(
        description="CPU use in percent of one core, tasks included, over the last seconds."
    )
    rss_bytes: int


class Held(BaseModel):
    """The message that holds up a partition."""

    topic: str
    partition: int
    offset: int
    since: float = Field(description="When it began to hold up the partition, in seconds since the epoch.")
    written_at: float | None = Field(
        description="When it was written to the topic; all messages of a batch have one time."
    )
    stage: str = Field(description="The stage that it waits in; '': the partition makes progress.")
    text: str = Field(description="The stage in words.")
    buffered: int = Field(description="Messages that were read and wait in the buffer.")


class Partition(BaseModel):
    """A partition that an engine owns."""

    name: str = Field(description="TOPIC/PARTITION.")
    engine: int | None = Field(description="The slot of the engine that owns it.")
    lag: int | None = Field(description="Messages from the committed offset to the end; null if not known yet.")
    consumed: int
    uncommitted: int = Field(description="Messages that were read but not committed.")
    committed_offset: int | None = Field(
        description="The committed offset, which is that of the next message to process."
    )
    is_paused: bool = Field(description="Whether backpressure has paused reading.")
    is_paused_by_user: bool = Field(description="Whether a user has paused this partition or all of them.")
    stalled: str | None = Field(description="The reason, if the partition is stalled.")
    held_by: Held | None = Field(description="The oldest message that is unfinished or uncommitted.")


class EnginePage(BaseModel):
    """A page of engines: first those in trouble, then by number."""

    rows: list[EngineSlotView]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")
    before: int = Field(description="The number of engines on previous pages.")
    matching: int = Field(description="The number of matching engines on all pages.")
    total: int = Field(description="The number of engines.")


class PartitionPage(BaseModel):
    """A page of partitions."""

    rows: list[Partition]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")
    before: int = Field(description="The number of partitions on previous pages.")
    matching: int = Field(description="The number of matching partitions on all pages.")
    total: int = Field(description="The number of partitions.")


class SinkView(BaseModel):
    """A sink and its counts."""

    name: str
    breaker: str = Field(description="The state of the circuit breaker: closed, half-open or open.")
    delivered: int
    errors: int = Field(description="Failed batches, and responses that rejected payloads.")
    refused: int = Field(description="Payloads that the sink rejected.")
    skipped: int
    dead_lettered: int
    breaker_opened: int
    batch_p50_seconds: float | None = Field(description="The median time of a batch since the pipeline started.")
    batch_p95_seconds: float | None
    last_error: str | None
    last_error_at: float | None = Field(description="Seconds since the epoch.")
    last_delivered_at: float | None
    waits: str | None = Field(description="The reason, if the sink is waiting.")
    ui_url: str = Field(description="The address of the sink's own web pages; may be ''.")


class SlowTask(BaseModel):
    """One of the slowest tasks of the run."""

    seconds: float
    task_id: str
    label: str


class ExternalWaitView(BaseModel):
    """Something outside the pipeline that it waits for."""

    what: str
    why: str


class PauseView(BaseModel):
    """A pause that a user has set."""

    partition: int | None = Field(description="A partition of the source topic; null: all of them.")
    until: float = Field(description="The end of the pause, in seconds since the epoch.")
    by: str


class Tasks(BaseModel):
    """Counts of tasks, by state and by outcome."""

    running: int
    queued: int
    in_backoff: int
    done: int
    failed: int
    retried: int
    timed_out: int
    max_running: int = Field(description="How many tasks may run at a time on all running engines together.")


class Letters(BaseModel):
    """Dead letters of this run."""

    written: int
    dropped: int
    kinds: dict[str, int]


class Lag(BaseModel):
    """The lag of the pipeline and its trend."""

    messages: int | None = Field(description="Messages behind the end of the topic; null if not known yet.")
    change_per_second: float | None = Field(
        description="The trend over the last minute; negative while the pipeline catches up."
    )
    clear_seconds: float | None = Field(
        description="Seconds until the lag is zero by this trend; null if it does not fall."
    )


class Hooks(BaseModel):
    """Periodic hooks and the cache."""

    periodic_runs: int
    periodic_errors: int
    cache_enabled: bool
    cache_hits: int
    cache_misses: int
    cache_entries: int
    loop_blocks: int


class Overview(BaseModel):
    """The state of the pipeline."""

    at: float = Field(description="The time of this state, in seconds since the epoch.")
    group: str
    worker: str
    topic: str
    brokers: str
    state: str = Field(description="starting, running, draining or stopping.")
    step: str = Field(description="The current step of startup or shutdown.")
    problems: list[str] = Field(description="The first problems.")
    problem_count: int
    waits: list[ExternalWaitView] = Field(description="The first waits; stalled partitions come last.")
    wait_count: int
    pauses: list[PauseView] = Field(description="Pauses that users have set.")
    run_seconds: float
    left_seconds: float | None = Field(description="While draining: the remaining time limit.")
    consumed: int
    done: int
    done_per_second: float
    delivered: int
    delivered_per_second: float
    in_flight: int
    in_flight_bytes: int
    held: int = Field(description="Messages that the failure brake holds.")
    skipped: int
    lag: Lag
    tasks: Tasks
    task_p50_seconds: float | None = Field(description="The median duration of task attempts over the last minute.")
    task_p95_seconds: float | None = Field(description="The 95th percentile.")
    letters: Letters
    hooks: Hooks
    engines: list[EngineSlotView] = Field(
        description="The first engines of /engines, which lists those in trouble first."
    )
    engine_count: int
    partitions: list[Partition] = Field(
        description="The first partitions of /partitions: stalled ones, then those with the largest lag."
    )
    partition_count: int
    stalled_count: int = Field(description="The number of stalled partitions.")
    orphans: list[int] = Field(description="Partitions of the topic that no engine owns.")
    sinks: list[SinkView]
    slowest: list[SlowTask]


class Setting(BaseModel):
    """A setting of the configuration."""

    key: str
    value: str = Field(description="The value as JSON, with secrets masked.")
    default: str | None = Field(description="The default as JSON; null if there is none.")
    origin: str = Field(description="The source of the value: default, configured, environment or on_startup.")
    text: str = Field(description="The description of the setting.")


class PipelineActionDone(BaseModel):
    """The result of an action."""

    text: str
