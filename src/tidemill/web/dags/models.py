"""Models of the REST API for DAGs; the pages show the same. Times are seconds since the epoch, UTC."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from tidemill.core.tasks.instance import MAX_INDEX, UNMAPPED
from tidemill.store.calls.instance_calls import MapCounts

_Time = float | None
_Index = Annotated[int, Field(ge=0, le=MAX_INDEX)]
Name = str


class TaskTriggerView(BaseModel):
    """The trigger of a deferred task."""

    number: int
    classpath: str = Field(description="The class of the trigger.")
    arguments: str = Field(description="The arguments as text, with secrets masked.")
    due_at: _Time = Field(description="The time that it waits for; null: it does not wait for a time.")
    triggerer: str | None = Field(description="The triggerer that runs it; null: none does.")


class TaskWaitView(BaseModel):
    """The reason why a task waits."""

    kind: str = Field(
        description="run, past, upstream, source, elements, scheduler, slots, limit, worker, file, trigger, retry or "
        "ending."
    )
    text: str
    names: list[str] = Field(
        default=[], description="The tasks, the pool, the limits, the queue or the file that it waits for."
    )
    at: _Time = Field(default=None, description="The time that the text ends with, such as the end of the wait.")
    where: str = Field(default="", description="Where the trigger of a deferred task runs, or why it does not.")
    since: _Time = Field(default=None, description="The beginning of a deferral.")
    times_out_at: _Time = Field(default=None, description="When the deferral times out; null: never.")
    trigger: TaskTriggerView | None = Field(default=None, description="The trigger of a deferred task.")
    missing: str = Field(default="", description="The required service, if none is alive.")


class Dag(BaseModel):
    dag_id: str
    label: str = Field(description="The displayed name; '': the id is displayed.")
    file: str
    version: int
    active: bool = Field(description="Whether the file still defines the DAG.")
    paused: bool
    schedule: str
    next_at: _Time = Field(description="The logical date of the next scheduled run.")
    tags: list[str]


class DagRunView(BaseModel):
    """A run of a DAG."""

    dag_id: str
    run_id: str
    kind: str = Field(description="manual, scheduled or dev.")
    state: str = Field(description="queued, running, success or failed.")
    reason: str | None
    version: int
    logical_at: _Time
    conf: str = Field(description="The configuration of the run, as text.")
    by: str
    created_at: float
    started_at: _Time
    ended_at: _Time


class MapCountsView(BaseModel):
    """The elements of a mapped task."""

    arrived: int = Field(description="The number of elements that the sources have given so far.")
    closed: bool = Field(description="Whether the sources give no more.")
    created: int = Field(description="The number of elements that exist; the next one has this index.")
    unfinished: int = Field(description="The elements that exist and have not ended.")
    running: int = Field(description="The unfinished elements that run now.")
    success: int
    failed: int
    upstream_failed: int
    skipped: int
    stop: str | None = Field(description="Why no more are created; null: the map was not stopped.")
    retrying: int = Field(description="The unfinished elements that wait for a retry.")
    iterated: bool = Field(default=False, description="Whether one attempt runs all elements.")
    rate: float | None = Field(description="Elements that ended per second since the map began; null: none has.")


class TaskStreamView(BaseModel):
    """The latest stream of a task: all events of one trigger, which it handles as they come."""

    trigger: int = Field(description="The number of the trigger, which is the trigger_run_id of its events.")
    received: int = Field(description="The number of events that the trigger has fired.")
    handled: int = Field(description="The number of events that the task has handled.")
    undelivered: int = Field(description="The number of events that the task has not handled.")
    rate: float | None = Field(description="Events per second, over the latest 100; null: none has arrived.")
    checkpoint: str | None = Field(description="The cursor of the task as stored; null: it has set none.")
    ended: bool = Field(description="Whether the trigger has ended.")
    error: str | None = Field(description="The end of the error of the trigger; null: it has not failed.")
    carried: int = Field(description="The number of events of earlier tries that the task still has to handle first.")
    discarded: int = Field(description="The number of events that were discarded instead of handled.")
    discarded_for: str | None = Field(description="Why: STOP, a mark or a cancelled run; null: none were.")


class DagTaskView(BaseModel):
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
    since: float = Field(description="When the task entered its state.")
    started_at: _Time
    ended_at: _Time
    worker: str | None
    trigger: int | None
    error: str | None
    waits_for: TaskWaitView | None = Field(description="The reason why it waits; null: it runs, or has ended.")
    elements: MapCountsView | None = Field(
        default=None, description="The counts of its elements; null: it is not mapped, or is an element itself."
    )
    label: str | None = Field(
        default=None,
        description="The rendered map_index_template of an element; for an iteration of a loop, its decision.",
    )
    stream: TaskStreamView | None = Field(default=None, description="The latest stream of the task; null: it has none.")


class Change(BaseModel):
    """A change of a task's state, from the journal."""

    epoch: int
    before: str
    after: str
    given: str
    at: float
    by: str
    detail: str | None


class TaskEventView(BaseModel):
    """An event of the trigger of a task."""

    trigger_run_id: int = Field(description="The number of the trigger, which is another one after each deferral.")
    sequence_index: int = Field(description="The number of the event among those of the trigger, from 0.")
    payload: str = Field(description="The first 2,000 characters of the payload as stored.")
    identity: str | None
    at: float
    is_last: bool = Field(description="Whether the stream has ended, and no event follows.")


class LogLineView(BaseModel):
    """A line of a log."""

    at: float
    level: str
    source: str
    text: str


class XCom(BaseModel):
    """A value that a task returned for other tasks."""

    task_id: str
    map_index: int
    key: str
    value: str = Field(description="The value as stored.")
    created_at: float


class File(BaseModel):
    """A file of DAGs."""

    path: str
    error: str | None = Field(description="The traceback, if the file cannot be parsed.")
    parsed_at: float
    dags: list[str]


class FileDifferenceView(BaseModel):
    """A DAG file that a live service lacks, or has with another content."""

    path: str
    difference: Literal["missing", "differs"]
    since: float
    session: int
    kind: str
    name: str
    host: str


class ServiceView(BaseModel):
    """A live service."""

    session: int
    kind: str = Field(description="scheduler, parser, worker, triggerer or dev.")
    name: str
    host: str
    pid: int
    version: str
    queues: list[str] = Field(description="The queues of a worker or triggerer; a triggerer without queues takes all.")
    started_at: float
    beat_age_seconds: float = Field(description="The time since its last heartbeat.")
    holds: int = Field(description="The number of attempts or triggers that it runs.")
    capacity: int = Field(description="How many attempts or triggers it runs at once; 0: it runs none.")
    supervised_by: int | None = Field(description="The session of the process that supervises it.")
    is_silent: bool = Field(description="Whether it has sent no heartbeat for so long that it counts as dead.")


class Pool(BaseModel):
    """A pool of slots."""

    name: str
    slots: int
    used: int
    waiting: int = Field(description="Tasks that wait for slots.")
    include_deferred: bool
    description: str


class DagPage(BaseModel):
    """A page of DAGs, by id."""

    rows: list[Dag]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")


class RunPage(BaseModel):
    """A page of runs, newest first."""

    rows: list[DagRunView]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")


class GridCell(NamedTuple):
    """A cell of the grid: the state of a task, and the counts of its elements if it is mapped."""

    state: str
    elements: MapCounts | None


class DagTaskPage(BaseModel):
    """A page of tasks, by name."""

    rows: list[DagTaskView]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")
    missing: str = Field(
        default="", description="The required services that are not alive; '' if all are, or the run has ended."
    )


class ElementPage(BaseModel):
    """A page of elements of a mapped task, by index."""

    rows: list[DagTaskView]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")


class ElementFailureGroup(BaseModel):
    """Elements that failed with the same error."""

    task_id: str = Field(description="The mapped task, or the task of the mapped group.")
    error: str = Field(description="The last line of the error.")
    elements: int = Field(description="The number of elements that failed with it.")
    first: int = Field(description="The lowest index of these elements.")


class FailureGroupsView(BaseModel):
    """The failures of a mapped task by error, the most frequent first."""

    groups: list[ElementFailureGroup]
    elements: int = Field(description="The number of failed elements in these groups: the first 1,000 of each task.")
    more: bool = Field(description="Whether further elements failed, which are in no group.")


class ChangePage(BaseModel):
    """A page of changes, oldest first."""

    rows: list[Change]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")


class TaskEventPage(BaseModel):
    """A page of events, newest first."""

    rows: list[TaskEventView]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")


class LogPage(BaseModel):
    """A page of log lines, in order."""

    rows: list[LogLineView]
    cursor: str | None = Field(
        description="The cursor of further lines, also while the log is being written; null: no lines yet."
    )
    ended: bool = Field(description="Whether these are the last lines so far.")


class CallbackView(BaseModel):
    """A callback of a run itself, or a failed callback of a task."""

    id: int
    task_id: str | None = Field(description="The task; null: a callback of the run itself.")
    map_index: int
    name: str = Field(description="on_success, on_failure, on_retry or on_skipped.")
    state: str = Field(description="due, running, done or failed.")
    error: str | None = Field(description="The exception that the callback raised.")
    due_at: float
    ended_at: _Time


class CallbackPage(BaseModel):
    """A page of callbacks, oldest first."""

    rows: list[CallbackView]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")


class XComPage(BaseModel):
    """A page of XComs, by task and key."""

    rows: list[XCom]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")


class DagDetailsView(BaseModel):
    """A DAG with its structure."""

    dag: Dag
    structure: dict[str, Any] = Field(description="The structure, as the file defines it.")


class DagActionDone(BaseModel):
    """The result of a change."""

    text: str


class Changed(DagActionDone):
    """The result of a change, with the changed tasks."""

    tasks: list[str]


class Created(DagActionDone):
    """The result of a change, with the new run."""

    run: DagRunView
    warnings: list[str] = Field(default=[], description="Likely mistakes in the configuration of the run.")


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PauseDagOrder(_Order):
    """Whether to pause a DAG."""

    paused: bool


class RunOrder(_Order):
    """A run to create."""

    run_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=250,
        pattern=r"^[^/]+$",
        description="The id of the run; null: an id is generated.",
    )
    logical_date: AwareDatetime | None = None
    conf: dict[str, Any] = Field(default={}, description="The configuration of the run.")
    lists: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default={}, description="The lengths of lists of the configuration that were sent beforehand, by name."
    )
    stage: int = Field(default=0, ge=0, lt=1 << 53, description="The number that these lists were sent with.")
    request: str = Field(
        default="",
        max_length=100,
        description="An id of the request; repeating a request with the same id creates no second run.",
    )


class ConfListPart(_Order):
    """A part of a list in the configuration of a run that is about to be created."""

    stage: int = Field(
        ge=1, lt=1 << 53, description="A random number, the same for all lists of the run; the run is created with it."
    )
    name: str = Field(max_length=250, description="The name of the list: a param that tasks are mapped over.")
    first: int = Field(default=0, ge=0, description="The number of the first of these values in the list, from 0.")
    values: list[Any] = Field(max_length=10_000)


_MAP_INDEX = Field(
    default=-1,
    ge=-1,
    le=MAX_INDEX,
    description="The index of the elements if the tasks are mapped; -1: the tasks themselves.",
)


_INDEXES = Field(
    default=None,
    description="The first and the last index of the elements of mapped tasks; null: map_index decides.",
)


class _ElementsOrder(_Order):
    map_index: int = _MAP_INDEX
    indexes: tuple[_Index, _Index] | None = _INDEXES

    @model_validator(mode="after")
    def _check_indexes(self) -> _ElementsOrder:
        if self.indexes is None:
            return self
        if self.map_index != UNMAPPED:
            raise ValueError("give either map_index or indexes")
        if self.indexes[0] > self.indexes[1]:
            raise ValueError("indexes: the first index is greater than the last one")
        return self


class ClearOrder(_ElementsOrder):
    """The tasks to run again."""

    tasks: list[str] = Field(default=[], max_length=10_000, description="Ids of tasks; empty: all tasks.")
    downstream: bool = Field(default=False, description="Also clear downstream tasks.")
    failed: bool = Field(
        default=False,
        description="Only tasks that are failed or upstream_failed; of a mapped task, only such elements.",
    )
    dry_run: bool = Field(default=False, description="Only list the tasks, without a change.")


class MarkOrder(_ElementsOrder):
    """The state to give to tasks."""

    tasks: list[str] = Field(min_length=1, max_length=10_000)
    state: Literal["success", "failed", "skipped"]
