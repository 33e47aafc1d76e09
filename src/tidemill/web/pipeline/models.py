"""What the REST API says about a pipeline; the pages show the same."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Engine(BaseModel):
    """An engine's slot, and the engine in it."""

    slot: int
    state: str = Field(description="idle, waiting, starting, running, restarting, link lost, cancelled or finished")
    is_well: bool
    host: str | None
    pid: int | None
    starts: int = Field(description="How many engines this slot has had.")
    silent_seconds: float | None = Field(description="How long it has been silent; null without a link.")
    partitions: int
    tasks_running: int
    tasks_queued: int
    tasks_in_backoff: int
    in_flight: int
    done: int = Field(description="Messages that this slot's engines have finished.")
    cpu_percent: float | None = Field(description="Of one core, tasks included, over the last seconds.")
    rss_bytes: int


class Held(BaseModel):
    """The message that holds a partition."""

    topic: str
    partition: int
    offset: int
    since: float = Field(description="Since when it holds the partition, in seconds since the epoch.")
    written_at: float | None = Field(description="When it was written to its topic, to the precision of its batch.")
    stage: str = Field(description="What it waits for; '': the partition moves.")
    text: str = Field(description="The same in words.")
    buffered: int = Field(description="Messages that were read and wait to be taken.")


class Partition(BaseModel):
    """A partition that an engine owns."""

    name: str = Field(description="topic/partition")
    engine: int | None = Field(description="The slot of the engine that owns it.")
    lag: int | None = Field(description="Messages behind its end, by committed offset; null if not known yet.")
    consumed: int
    uncommitted: int = Field(description="Messages that were read and are not committed.")
    committed_offset: int | None = Field(description="The next offset, as committed.")
    is_paused: bool = Field(description="Whether it waits for room (backpressure).")
    is_paused_by_user: bool = Field(description="Whether a user has paused it, or all partitions.")
    stalled: str | None = Field(description="What holds it up, if it stands still.")
    held_by: Held | None = Field(description="The oldest message that is not finished, or not committed yet.")


class EnginePage(BaseModel):
    """A page of engines: those in trouble come first, then by number."""

    rows: list[Engine]
    cursor: str | None = Field(description="Where the next page begins; null: there is none.")
    before: int = Field(description="How many are on pages before.")
    matching: int = Field(description="How many match, on all pages.")
    total: int = Field(description="How many there are.")


class PartitionPage(BaseModel):
    """A page of partitions."""

    rows: list[Partition]
    cursor: str | None = Field(description="Where the next page begins; null: there is none.")
    before: int = Field(description="How many are on pages before.")
    matching: int = Field(description="How many match, on all pages.")
    total: int = Field(description="How many there are.")


class Sink(BaseModel):
    """A sink, and what happened there."""

    name: str
    breaker: str = Field(description="closed, half-open or open")
    delivered: int
    errors: int = Field(description="Batches that failed, and answers that refused something.")
    refused: int
    skipped: int
    dead_lettered: int
    breaker_opened: int
    batch_p50_seconds: float | None = Field(description="The median time of a batch since the start.")
    batch_p95_seconds: float | None
    last_error: str | None
    last_error_at: float | None = Field(description="Seconds since the epoch.")
    last_delivered_at: float | None
    waits: str | None = Field(description="What it waits for.")
    ui_url: str = Field(description="Where people can look at what was written.")


class SlowTask(BaseModel):
    """One of the slowest tasks of the run."""

    seconds: float
    task_id: str
    label: str


class Wait(BaseModel):
    """Something that the pipeline waits for outside."""

    what: str
    why: str


class Pause(BaseModel):
    """What a user has paused."""

    partition: int | None = Field(description="Of the source topic; null: all partitions.")
    until: float = Field(description="When it ends, in seconds since the epoch.")
    by: str


class Tasks(BaseModel):
    """Tasks by what they do, and what became of them."""

    running: int
    queued: int
    in_backoff: int
    done: int
    failed: int
    retried: int
    timed_out: int
    max_running: int = Field(description="How many may run at a time, over all running engines.")


class Letters(BaseModel):
    """Dead letters of this run."""

    written: int
    dropped: int
    kinds: dict[str, int]


class Lag(BaseModel):
    """How far the pipeline is behind."""

    messages: int | None = Field(description="null if it is not known yet.")
    change_per_second: float | None = Field(description="Its trend over the last minute; negative: it catches up.")
    clear_seconds: float | None = Field(description="When it is zero, by that trend; null if it does not fall.")


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

    at: float = Field(description="When, in seconds since the epoch.")
    group: str
    worker: str
    topic: str
    brokers: str
    state: str = Field(description="starting, running, draining or stopping")
    step: str = Field(description="What the run waits for.")
    problems: list[str] = Field(description="The first of them.")
    problem_count: int
    waits: list[Wait] = Field(description="The first of them; partitions that stand still come last.")
    wait_count: int
    pauses: list[Pause] = Field(description="What users have paused.")
    run_seconds: float
    left_seconds: float | None = Field(description="While draining: how long that may still take.")
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
    task_p50_seconds: float | None = Field(description="How long attempts of tasks took over the last minute.")
    task_p95_seconds: float | None
    letters: Letters
    hooks: Hooks
    engines: list[Engine] = Field(description="The first of /engines: those in trouble come first.")
    engine_count: int
    partitions: list[Partition] = Field(
        description="The first of /partitions: those that stand still come first, then those with the largest lag."
    )
    partition_count: int
    stalled_count: int = Field(description="Partitions that stand still.")
    orphans: list[int] = Field(description="Partitions of the topic that no engine owns.")
    sinks: list[Sink]
    slowest: list[SlowTask]


class Setting(BaseModel):
    """A value of the configuration."""

    key: str
    value: str = Field(description="As JSON, secrets masked.")
    default: str | None = Field(description="As JSON; null if it has none.")
    origin: str = Field(description="default, configured, environment or on_startup")
    text: str = Field(description="What it is for.")


class Done(BaseModel):
    """What an action did."""

    text: str
