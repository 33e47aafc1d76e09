"""The calls of people, through the command line and the pages: what there is, and what they change.

Invariants: a list is answered in pages by key, in a stable order: `after` is the `next` of the page before. `by` says
who changes something, and stands in the journal. Times are UTC microseconds since the epoch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tidemill.store.calls.call import PAGE, Call, Listed

RunKind = Literal["manual", "scheduled", "dev"]


# -- DAGs --------------------------------------------------------------------------------------------------------------


class DagRecord(msgspec.Struct, frozen=True):
    """A DAG.

    Attributes:
        id: Its number in the store.
        dag_id: Its id.
        file: The file that defines it.
        version: The number of its newest version, from 1.
        active: Whether its file still defines it.
        paused: Whether its schedule rests, and its runs wait.
        next_us: The logical date of the next scheduled run; None: there is none.
        schedule: The schedule for people: a cron expression, a duration, `@once`, or empty.
        tags: Its tags.
        label: What people see instead of its id; empty: its id.
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


class ListDags(Call[Listed[DagRecord]], frozen=True):
    """Answer the DAGs by id. `inactive`: also those that no file defines any more. `tag`: only those with it."""

    after: str | None = None
    limit: int = PAGE
    inactive: bool = False
    tag: str | None = None


class DagDetails(msgspec.Struct, frozen=True):
    """A DAG.

    Attributes:
        dag: What is known of it.
        structure: The JSON of its `core.tasks.structure.DagStructure`.
        unshared: What of its file's import a forked process would not have; None: nothing, or nobody has looked.
    """

    dag: DagRecord
    structure: bytes
    unshared: str | None = None


class GetDag(Call[DagDetails | None], frozen=True):
    """Answer a DAG; None: there is none. `version`: None, the newest."""

    dag_id: str
    version: int | None = None


class PauseDag(Call[bool], frozen=True):
    """Pause a DAG, or let it go on; False: it was so already. An unknown DAG is refused."""

    dag_id: str
    paused: bool
    by: str


# -- runs --------------------------------------------------------------------------------------------------------------


class RunRecord(msgspec.Struct, frozen=True):
    """A run of a DAG.

    Attributes:
        id: Its number in the store.
        dag_id: Its DAG.
        run_id: Its name, unique within the DAG.
        kind: `manual`, `scheduled` or `dev`.
        state: `queued`, `running`, `success` or `failed`.
        reason: Why it failed, if that does not follow from its tasks: it was cancelled, or took too long.
        version: The version of the DAG that it keeps.
        logical_us: Its logical date; None: it has none.
        interval_start_us: Its data interval.
        interval_end_us: Likewise.
        conf: Its configuration, encoded.
        by: Who created it.
        created_us: When it was created.
        started_us: When it began.
        ended_us: When it ended.
        warnings: What is probably a mistake in its configuration; only in the answer to `CreateRun`.
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


class CreateRun(Call[RunRecord], frozen=True):
    """Create a run, and answer it; refused if the DAG is unknown or inactive, or has such a run (CONFLICT).

    Attributes:
        dag_id: The DAG.
        run_id: Its name; None: one is made of its kind and time.
        logical_us: Its logical date; None: it has none.
        conf: Its configuration, encoded.
        kind: How it came about.
        by: Who wants it.
        request: Makes the call repeatable: with the same text the same run is answered; empty: it is not repeatable.
        interval_start_us: Its data interval; None: that of its logical date.
        interval_end_us: Likewise.
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


class CancelRun(Call[RunRecord], frozen=True):
    """Cancel a run: started tasks fail, others are skipped, the run fails. One that has ended stays as it is."""

    dag_id: str
    run_id: str
    by: str


class ListRuns(Call[Listed[RunRecord]], frozen=True):
    """Answer runs, newest first. `dag_id`: None, those of all DAGs. `states`: empty, all."""

    dag_id: str | None = None
    states: tuple[str, ...] = ()
    after: str | None = None
    limit: int = PAGE


class RunProgress(msgspec.Struct, frozen=True):
    """How far a run is.

    Attributes:
        run: The run.
        total: How many tasks it has.
        done: How many of them have ended.
        running: How many run now.
        waiting: The others: they wait for tasks before them, slots, workers, triggers or a retry.
    """

    run: RunRecord
    total: int
    done: int
    running: int
    waiting: int


class WatchRuns(Call[tuple[RunProgress, ...]], frozen=True):
    """Answer how far runs are: those that run, then those that wait to start, then the last that ended; newest first.

    Attributes:
        limit: The most runs.
    """

    limit: int = 10


class GetRun(Call[RunRecord | None], frozen=True):
    """Answer a run; None: there is none. `run_id`: None, the newest one of the DAG."""

    dag_id: str
    run_id: str | None = None


# -- tasks -------------------------------------------------------------------------------------------------------------


class TaskRecord(msgspec.Struct, frozen=True):
    """A task of a run.

    Attributes:
        id: Its number in the store.
        run: Its run, in the store.
        dag_id: Its DAG.
        run_id: Its run.
        task_id: Its name.
        map_index: -1: it is not mapped.
        state: A `core.tasks.attempt.TaskState`.
        epoch: How often its state has changed.
        tries: How many tries have begun.
        max_tries: After how many a failure is final.
        operator: The name of its class.
        queue: Which workers may run it.
        pool: Where its slots are.
        pool_slots: How many.
        priority: Which one comes first.
        since_us: Since when it is in its state.
        started_us: When its last try began.
        ended_us: When it ended.
        due_us: When its state changes by itself: a retry, or a deadline.
        service: The worker that runs it, in words; None: none does.
        trigger: The trigger that it waits for, by its number; None: it is not deferred.
        error: What its last failure was.
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
    service: str | None
    trigger: int | None
    error: str | None


class TriggerAbout(msgspec.Struct, frozen=True):
    """What people are told about the trigger of a deferred task.

    Attributes:
        id: Its number.
        classpath: Its class.
        arguments: Its arguments, as text, secrets masked.
        due_us: The moment that it waits for; None: it waits for something else.
        service: The triggerer that runs it, in words; None: none does.
    """

    id: int
    classpath: str
    arguments: str
    due_us: int | None
    service: str | None


class DescribeTriggers(Call[tuple[TriggerAbout, ...]], frozen=True):
    """Answer what triggers of deferred tasks are, by their numbers; those that have ended may be missing."""

    triggers: tuple[int, ...]


class ListTasks(Call[Listed[TaskRecord]], frozen=True):
    """Answer the tasks of a run, by name. `states`: empty, all."""

    dag_id: str
    run_id: str
    states: tuple[str, ...] = ()
    after: str | None = None
    limit: int = 1000


class HistoryRecord(msgspec.Struct, frozen=True):
    """A change of a task's state. `given`: what happened; `by`: who said so; `detail`: more about it."""

    epoch: int
    before: str
    after: str
    given: str
    at_us: int
    by: str
    detail: str | None


class TaskHistory(Call[Listed[HistoryRecord]], frozen=True):
    """Answer what happened to a task, oldest first."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    after: str | None = None
    limit: int = 1000


class LogPartRecord(msgspec.Struct, frozen=True):
    """A piece of a log: see `worker_calls.LogPart`."""

    number: int
    first_us: int
    data: bytes
    lines: int
    last: bool


class ReadLog(Call[Listed[LogPartRecord]], frozen=True):
    """Answer the parts of the log of a try, in order. `try_number`: None, the last one."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    try_number: int | None = None
    after: str | None = None
    limit: int = 50


class XComRecord(msgspec.Struct, frozen=True):
    """An XCom."""

    task_id: str
    map_index: int
    key: str
    value: str
    created_us: int


class ListXComs(Call[Listed[XComRecord]], frozen=True):
    """Answer the XComs of a run, by task and key. `task_id`: None, those of all tasks."""

    dag_id: str
    run_id: str
    task_id: str | None = None
    after: str | None = None
    limit: int = PAGE


class ClearTasks(Call[tuple[str, ...]], frozen=True):
    """Let tasks run again, from the beginning; answer their names. A run that had ended goes on.

    Attributes:
        dag_id: The DAG.
        run_id: The run.
        task_ids: The tasks; empty: all.
        by: Who wants it.
        downstream: Whether those that follow are cleared, too.
        failed: Whether only those are cleared that failed, by themselves or with their upstream.
        dry_run: Whether to say only which.
    """

    dag_id: str
    run_id: str
    task_ids: tuple[str, ...]
    by: str
    downstream: bool = False
    failed: bool = False
    dry_run: bool = False


class MarkTasks(Call[tuple[str, ...]], frozen=True):
    """Decide how tasks have ended, and answer the names of those that this changed."""

    dag_id: str
    run_id: str
    task_ids: tuple[str, ...]
    state: Literal["success", "failed", "skipped"]
    by: str


# -- numbers -----------------------------------------------------------------------------------------------------------


class StoreCounts(msgspec.Struct, frozen=True):
    """What metrics are made of: tasks by state that have not ended, runs by state, files that cannot be parsed."""

    tasks: dict[str, int]
    runs: dict[str, int]
    broken_files: int


class CountStore(Call[StoreCounts], frozen=True):
    """Answer what metrics are made of."""
