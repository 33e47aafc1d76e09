"""The calls of the command line and the web pages about DAGs, runs and tasks.

Invariants: lists are returned in keyset pages in a stable order; `after` is the `next` of the previous page. `by` names
the user who makes a change and is recorded in the journal. Times are UTC microseconds since the epoch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tidemill.store.calls.call import PAGE, Call, Listed, answered_by

RunKind = Literal["manual", "scheduled", "dev"]


# -- DAGs --------------------------------------------------------------------------------------------------------------


class DagRecord(msgspec.Struct, frozen=True):
    """A DAG.

    Attributes:
        id: Its row id.
        dag_id: Its id.
        file: The file that defines it.
        version: Its newest version number, from 1.
        active: Whether its file still defines it.
        paused: Whether it is paused: no scheduled runs are created and queued runs do not start.
        next_us: The logical date of the next scheduled run; None: there is none.
        schedule: The schedule for display: a cron expression, a duration, `@once`, or empty.
        tags: Its tags.
        label: Its display name; empty: its id.
    """

    id: int
    dag_id: str
    file: str
    version: int
    active: bool
    paused: bool
    next_us: int | None
    schedule: str
    tags: tuple[str, ...]
    label: str


@answered_by("dags.dags:list_dags", reads=True)
class ListDags(Call[Listed[DagRecord]], frozen=True):
    """Return the DAGs by id. `inactive`: include DAGs that no file defines any more. `tag`: only DAGs with this tag."""

    after: str | None = None
    limit: int = PAGE
    inactive: bool = False
    tag: str | None = None


class DagDetails(msgspec.Struct, frozen=True):
    """A DAG with its structure.

    Attributes:
        dag: The DAG.
        structure: The JSON of its `core.tasks.structure.DagStructure`.
        unshared: The effects of importing its file that a forked process does not inherit; None: none, or not checked.
    """

    dag: DagRecord
    structure: bytes
    unshared: str | None = None


@answered_by("dags.dags:get_dag", reads=True)
class GetDag(Call[DagDetails | None], frozen=True):
    """Return a DAG; None if there is none. `version`: None for the newest."""

    dag_id: str
    version: int | None = None


@answered_by("dags.dags:pause_dag")
class PauseDag(Call[bool], frozen=True):
    """Pause or resume a DAG; return False if nothing changed. An unknown DAG is refused."""

    dag_id: str
    paused: bool
    by: str


# -- runs --------------------------------------------------------------------------------------------------------------


class RunRecord(msgspec.Struct, frozen=True):
    """A run of a DAG.

    Attributes:
        id: Its row id.
        dag_id: Its DAG.
        run_id: Its name, unique within the DAG.
        kind: `manual`, `scheduled` or `dev`.
        state: `queued`, `running`, `success` or `failed`.
        reason: Why it failed if not because of its tasks: it was cancelled or exceeded its timeout.
        version: The version of the DAG that it uses.
        logical_us: Its logical date; None: it has none.
        interval_start_us: The start of its data interval.
        interval_end_us: The end of its data interval.
        conf: Its configuration, encoded.
        by: The user or service that created it.
        created_us: When it was created.
        started_us: When it started.
        ended_us: When it ended.
        warnings: Likely mistakes in its configuration; only in the answer to `CreateRun`.
    """

    id: int
    dag_id: str
    run_id: str
    kind: str
    state: str
    reason: str | None
    version: int
    logical_us: int | None
    interval_start_us: int | None
    interval_end_us: int | None
    conf: str
    by: str
    created_us: int
    started_us: int | None
    ended_us: int | None
    warnings: tuple[str, ...] = ()


@answered_by("dags.new_runs:create_run")
class CreateRun(Call[RunRecord], frozen=True):
    """Create a run and return it. Refused if the DAG is unknown or inactive, or already has such a run (CONFLICT).

    Attributes:
        dag_id: The DAG.
        run_id: Its name; None: generated from its kind and time.
        logical_us: Its logical date; None: it has none.
        conf: Its configuration, encoded.
        kind: `manual`, `scheduled` or `dev`.
        by: The user or service that creates it.
        request: An idempotency key: a repeated call with the same key returns the same run; empty: not idempotent.
        interval_start_us: The start of its data interval; None: derived from its logical date.
        interval_end_us: The end of its data interval; None: derived from its logical date.
    """

    dag_id: str
    run_id: str | None = None
    logical_us: int | None = None
    conf: str = "{}"
    kind: RunKind = "manual"
    by: str = ""
    request: str = ""
    interval_start_us: int | None = None
    interval_end_us: int | None = None


@answered_by("dags.runs:cancel_run")
class CancelRun(Call[RunRecord], frozen=True):
    """Cancel a run: started tasks fail, the others are skipped, and the run fails. A finished run stays unchanged."""

    dag_id: str
    run_id: str
    by: str


@answered_by("dags.runs:list_runs", reads=True)
class ListRuns(Call[Listed[RunRecord]], frozen=True):
    """Return runs, newest first. `dag_id`: None for all DAGs. `states`: empty for all."""

    dag_id: str | None = None
    states: tuple[str, ...] = ()
    after: str | None = None
    limit: int = PAGE


class RunProgress(msgspec.Struct, frozen=True):
    """The progress of a run.

    Attributes:
        run: The run.
        total: The number of its tasks, and of the elements of mapped tasks as far as their sources have given them.
        done: How many of them have ended.
        running: How many of them are running.
        waiting: The rest: tasks that wait for upstream tasks, slots, workers, triggers or a retry.
    """

    run: RunRecord
    total: int
    done: int
    running: int
    waiting: int


@answered_by("dags.progress:watch_runs", reads=True)
class WatchRuns(Call[tuple[RunProgress, ...]], frozen=True):
    """Return the progress of runs: running ones first, then queued ones, then the last finished ones; newest first.

    Attributes:
        limit: The maximum number of runs.
    """

    limit: int = 10


@answered_by("dags.runs:get_run", reads=True)
class GetRun(Call[RunRecord | None], frozen=True):
    """Return a run; None if there is none. `run_id`: None for the newest run of the DAG."""

    dag_id: str
    run_id: str | None = None


# -- tasks -------------------------------------------------------------------------------------------------------------


class MapCounts(msgspec.Struct, frozen=True):
    """The elements of a mapped task.

    Attributes:
        arrived: The number of items that its source has given so far.
        closed: Whether its source gives no more.
        created: The number of elements that were created, or skipped because the map was stopped.
        unfinished: The number of created elements that have not ended.
        running: The number of elements that run or are ending.
        success: The number of elements that succeeded.
        failed: The number of elements whose own attempts failed.
        upstream_failed: The number of elements that failed because of their source.
        skipped: The number of elements that were skipped.
        stop: Why no more are created; None: it was not stopped.
    """

    arrived: int
    closed: bool
    created: int
    unfinished: int
    running: int
    success: int
    failed: int
    upstream_failed: int
    skipped: int
    stop: str | None


class TaskRecord(msgspec.Struct, frozen=True):
    """A task of a run.

    Attributes:
        id: Its row id.
        run: The row id of its run.
        dag_id: Its DAG.
        run_id: The name of its run.
        task_id: Its name.
        map_index: The map index; -1: it is not mapped.
        state: A `core.tasks.task_row.TaskState`.
        epoch: How often its state has changed.
        tries: How many tries have started.
        max_tries: The number of tries after which a failure is final.
        operator: The name of its operator class.
        queue: The queue whose workers may run it.
        pool: Its pool.
        pool_slots: The number of pool slots that it needs.
        priority: Its priority; higher ones are admitted first.
        since_us: When it entered its state.
        started_us: When its last try started.
        ended_us: When it ended.
        due_us: The time of its next retry or deadline.
        worker: The worker that runs it, for display; None: no worker runs it.
        trigger: The id of the trigger that it waits for; None: it is not deferred.
        error: The error of its last failure.
        elements: The counts of its elements; None: it is not mapped, or is an element itself.
        label: The rendered `map_index_template` of an element; None: it has none.
    """

    id: int
    run: int
    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    state: str
    epoch: int
    tries: int
    max_tries: int
    operator: str
    queue: str
    pool: str
    pool_slots: int
    priority: int
    since_us: int
    started_us: int | None
    ended_us: int | None
    due_us: int | None
    worker: str | None
    trigger: int | None
    error: str | None
    elements: MapCounts | None = None
    label: str | None = None


class TriggerAbout(msgspec.Struct, frozen=True):
    """The trigger of a deferred task, for display.

    Attributes:
        id: Its id.
        classpath: The import path of its class.
        arguments: Its arguments as text, with secrets masked.
        due_us: The time that it waits for; None: it waits for something else.
        triggerer: The triggerer that runs it, for display; None: no triggerer runs it.
    """

    id: int
    classpath: str
    arguments: str
    due_us: int | None
    triggerer: str | None


@answered_by("dags.trigger_abouts:describe_triggers", reads=True)
class DescribeTriggers(Call[tuple[TriggerAbout, ...]], frozen=True):
    """Describe triggers of deferred tasks by id; finished triggers may be missing from the answer."""

    triggers: tuple[int, ...]


@answered_by("dags.task_admin:list_tasks", reads=True)
class ListTasks(Call[Listed[TaskRecord]], frozen=True):
    """Return the task instances of a run, by name and map index.

    Attributes:
        dag_id: The DAG.
        run_id: The run.
        states: Only instances in these states; empty: in all.
        after: The `next` of the previous page.
        limit: The maximum number of instances.
        task_id: Only instances of this task; None: of all.
        map_index: Only instances with this index; None: with any. -1: no elements of mapped tasks.
    """

    dag_id: str
    run_id: str
    states: tuple[str, ...] = ()
    after: str | None = None
    limit: int = 1000
    task_id: str | None = None
    map_index: int | None = -1


@answered_by("dags.task_admin:list_elements", reads=True)
class ListElements(Call[Listed[TaskRecord]], frozen=True):
    """Return the elements of a mapped task by index.

    Attributes:
        dag_id: The DAG.
        run_id: The run.
        task_id: The mapped task.
        states: Only elements in these states; empty: in all.
        first: The lowest index; None: from the beginning.
        last: The highest index; None: to the end.
        after: The `next` of the previous page.
        limit: The maximum number of elements.
    """

    dag_id: str
    run_id: str
    task_id: str
    states: tuple[str, ...] = ()
    first: int | None = None
    last: int | None = None
    after: str | None = None
    limit: int = 1000


class ElementFailureCount(msgspec.Struct, frozen=True):
    """Elements of a mapped task that failed with the same error.

    Attributes:
        error: The last line of the error.
        elements: How many elements failed with it.
        first: The lowest index of these elements.
    """

    error: str
    elements: int
    first: int


class ElementFailures(msgspec.Struct, frozen=True):
    """The failures of a mapped task by error, the most frequent first.

    Attributes:
        groups: The groups.
        elements: The number of failed elements in these groups.
        more: Whether further elements failed, which are in no group.
    """

    groups: tuple[ElementFailureCount, ...]
    elements: int
    more: bool


@answered_by("dags.map_errors:group_failures", reads=True)
class GroupElementFailures(Call[ElementFailures], frozen=True):
    """Group the failed elements of a mapped task by error. `limit`: the number of elements to read, in order."""

    dag_id: str
    run_id: str
    task_id: str
    limit: int = 1000


class HistoryRecord(msgspec.Struct, frozen=True):
    """A change of a task's state. `given`: the input that caused it; `by`: its sender; `detail`: more text."""

    epoch: int
    before: str
    after: str
    given: str
    at_us: int
    by: str
    detail: str | None


@answered_by("dags.task_admin:list_history", reads=True)
class TaskHistory(Call[Listed[HistoryRecord]], frozen=True):
    """Return the state changes of a task, oldest first."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    after: str | None = None
    limit: int = 1000


class LogPartRecord(msgspec.Struct, frozen=True):
    """A part of a log; see `worker_calls.LogPart`."""

    number: int
    first_us: int
    data: bytes
    lines: int
    last: bool


@answered_by("dags.task_admin:read_task_log", reads=True)
class ReadLog(Call[Listed[LogPartRecord]], frozen=True):
    """Return the parts of the log of a try, in order. `try_number`: None for the last try."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    try_number: int | None = None
    after: str | None = None
    limit: int = 50


class XComRecord(msgspec.Struct, frozen=True):
    task_id: str
    map_index: int
    key: str
    value: str
    created_us: int


@answered_by("dags.xcoms:list_xcoms", reads=True)
class ListXComs(Call[Listed[XComRecord]], frozen=True):
    """Return the XComs of a run, by task and key. `task_id`: None for all; `map_index`: None for all instances."""

    dag_id: str
    run_id: str
    task_id: str | None = None
    after: str | None = None
    limit: int = PAGE
    map_index: int | None = None


@answered_by("dags.task_admin:clear_tasks")
class ClearTasks(Call[tuple[str, ...]], frozen=True):
    """Reset tasks so that they run again; return their names. A finished run becomes active again.

    Elements of a mapped task are named `task[index]`. A mapped task that is cleared as a whole expands again from its
    sources. A generator is cleared together with the tasks that are mapped over it.

    Attributes:
        dag_id: The DAG.
        run_id: The run.
        task_ids: The tasks; empty: all.
        by: The user who clears them.
        downstream: Whether to clear downstream tasks as well.
        failed: Whether to clear only tasks that failed or whose upstream failed; of a mapped task, only such elements.
        dry_run: Whether to only return the names.
        map_index: The index of the instances of `task_ids`; -1: they are not elements of mapped tasks.
        indexes: Clear only these elements of mapped tasks, from the first to the last index; None: whole tasks.
    """

    dag_id: str
    run_id: str
    task_ids: tuple[str, ...]
    by: str
    downstream: bool = False
    failed: bool = False
    dry_run: bool = False
    map_index: int = -1
    indexes: tuple[int, int] | None = None


@answered_by("dags.task_admin:mark_tasks")
class MarkTasks(Call[tuple[str, ...]], frozen=True):
    """Set the outcome of tasks and return the names of the tasks that changed.

    `task_ids`, `map_index` and `indexes`: as in `ClearTasks`.
    """

    dag_id: str
    run_id: str
    task_ids: tuple[str, ...]
    state: Literal["success", "failed", "skipped"]
    by: str
    map_index: int = -1
    indexes: tuple[int, int] | None = None


# -- numbers -----------------------------------------------------------------------------------------------------------


class StoreCounts(msgspec.Struct, frozen=True):
    """The numbers for metrics: unfinished tasks by state, runs by state, and files that cannot be parsed."""

    tasks: dict[str, int]
    runs: dict[str, int]
    broken_files: int


@answered_by("dags.task_admin:count_store", reads=True)
class CountStore(Call[StoreCounts], frozen=True):
    """Return the numbers for metrics."""
