"""What the REST API says about DAGs; the pages show the same. Times are seconds since the epoch, UTC."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

_Time = float | None
Name = str


class Trigger(BaseModel):
    """The trigger of a deferred task."""

    number: int
    classpath: str = Field(description="Its class.")
    arguments: str = Field(description="As text, secrets masked.")
    due_at: _Time = Field(description="The moment that it waits for; null: it waits for something else.")
    triggerer: str | None = Field(description="What runs it; null: nothing does.")


class Wait(BaseModel):
    """What a task waits for."""

    kind: str = Field(description="run, past, upstream, scheduler, slots, worker, trigger, retry or ending")
    text: str
    names: list[str] = Field(default=[], description="The tasks, the pool or the queue.")
    at: _Time = Field(default=None, description="When that comes, where it is known.")
    times_out_at: _Time = Field(default=None, description="When a deferral has taken too long; null: never.")
    trigger: Trigger | None = Field(default=None, description="Of a deferred task.")
    missing: str = Field(default="", description="Which service must be alive for that, and is not.")


class Dag(BaseModel):
    """A DAG."""

    dag_id: str
    label: str = Field(description="What people see instead of its id; empty: its id.")
    file: str
    version: int
    active: bool = Field(description="Whether its file still defines it.")
    paused: bool
    schedule: str
    next_at: _Time = Field(description="The logical date of the next scheduled run.")
    tags: list[str]


class Run(BaseModel):
    """A run of a DAG."""

    dag_id: str
    run_id: str
    kind: str = Field(description="manual, scheduled or dev")
    state: str = Field(description="queued, running, success or failed")
    reason: str | None
    version: int
    logical_at: _Time
    conf: str = Field(description="Its configuration, as text.")
    by: str
    created_at: float
    started_at: _Time
    ended_at: _Time


class Task(BaseModel):
    """A task of a run."""

    task_id: str
    map_index: int
    state: str
    operator: str
    tries: int
    max_tries: int
    pool: str
    pool_slots: int
    queue: str
    priority: int
    since: float = Field(description="Since when it is in its state.")
    started_at: _Time
    ended_at: _Time
    worker: str | None
    trigger: int | None
    error: str | None
    waits_for: Wait | None = Field(description="Null: it runs, or has ended.")


class Change(BaseModel):
    """A change of the state of a task, from the journal."""

    epoch: int
    before: str
    after: str
    given: str
    at: float
    by: str
    detail: str | None


class Line(BaseModel):
    """An entry of a log."""

    at: float
    level: str
    source: str
    text: str


class XCom(BaseModel):
    """A value that a task left for others."""

    task_id: str
    map_index: int
    key: str
    value: str = Field(description="As it is stored.")
    created_at: float


class File(BaseModel):
    """A file of DAGs."""

    path: str
    error: str | None = Field(description="The traceback, if it cannot be parsed.")
    parsed_at: float
    dags: list[str]


class Pool(BaseModel):
    """A pool of slots."""

    name: str
    slots: int
    used: int
    waiting: int = Field(description="Tasks that wait for slots.")
    include_deferred: bool
    description: str


class DagPage(BaseModel):
    """DAGs by id."""

    rows: list[Dag]
    cursor: str | None = Field(description="For the next page; null: there is none.")


class RunPage(BaseModel):
    """Runs, the newest first."""

    rows: list[Run]
    cursor: str | None = Field(description="For the next page; null: there is none.")


class TaskPage(BaseModel):
    """Tasks by name."""

    rows: list[Task]
    cursor: str | None = Field(description="For the next page; null: there is none.")
    missing: str = Field(
        default="", description="Which services the run waits for, because none is alive; empty: all are, or it ended."
    )


class ChangePage(BaseModel):
    """Changes, the oldest first."""

    rows: list[Change]
    cursor: str | None = Field(description="For the next page; null: there is none.")


class LogPage(BaseModel):
    """Lines of a log in order."""

    rows: list[Line]
    cursor: str | None = Field(description="For what follows, also of a log that is still written; null: nothing yet.")
    ended: bool = Field(description="Whether this is all, for now.")


class Callback(BaseModel):
    """A callback of a run, or one of a task that has failed."""

    id: int
    task_id: str | None = Field(description="null: it is one of the run as a whole")
    map_index: int
    name: str = Field(description="on_success, on_failure, on_retry or on_skipped")
    state: str = Field(description="due, running, done or failed")
    error: str | None = Field(description="What it raised.")
    due_at: float
    ended_at: _Time


class CallbackPage(BaseModel):
    """Callbacks, the oldest first."""

    rows: list[Callback]
    cursor: str | None = Field(description="For the next page; null: there is none.")


class XComPage(BaseModel):
    """XComs by task and key."""

    rows: list[XCom]
    cursor: str | None = Field(description="For the next page; null: there is none.")


class DagDetails(BaseModel):
    """A DAG with its structure."""

    dag: Dag
    structure: dict[str, Any] = Field(description="As its file defined it.")


class Done(BaseModel):
    """What was done."""

    text: str


class Changed(Done):
    """What was done, and to which tasks."""

    tasks: list[str]


class Created(Done):
    """What was done, and the new run."""

    run: Run
    warnings: list[str] = Field(default=[], description="What is probably a mistake in its configuration.")


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PauseDagOrder(_Order):
    """Whether a DAG is paused."""

    paused: bool


class RunOrder(_Order):
    """A run that is to be created."""

    run_id: str | None = Field(
        default=None, min_length=1, max_length=250, pattern=r"^[^/]+$", description="null: one is chosen."
    )
    logical_date: AwareDatetime | None = None
    conf: dict[str, Any] = Field(default={}, description="Its configuration.")
    request: str = Field(default="", max_length=100, description="Makes the request repeatable.")


class ClearOrder(_Order):
    """Which tasks run again."""

    tasks: list[str] = Field(default=[], max_length=10_000, description="Empty: all.")
    downstream: bool = Field(default=False, description="Also those that follow.")
    failed: bool = Field(default=False, description="Only those that failed, by themselves or with their upstream.")
    dry_run: bool = Field(default=False, description="Say only which.")


class MarkOrder(_Order):
    """How tasks count."""

    tasks: list[str] = Field(min_length=1, max_length=10_000)
    state: Literal["success", "failed", "skipped"]
