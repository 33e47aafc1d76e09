"""The calls of the command line and the web pages about task instances: their states, history and triggers.

Invariants: instances and changes are listed in keyset pages in a stable order; `after` is the `next` of the previous
page. `by` names the user who makes a change and is recorded in the journal. Times are UTC microseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from tidemill.store.calls.call import Call, Listed, answered_by

_NO_END = 1 << 62


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
        retrying: The number of unfinished elements that wait for a retry.
        iterated: Whether one attempt runs all of them.
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
    retrying: int = 0
    iterated: bool = False


class StreamAbout(msgspec.Struct, frozen=True):
    """The latest stream of a task, for display.

    Attributes:
        trigger: The id of its trigger.
        received: The number of events that the trigger has fired.
        handled: The number of events that the task has handled.
        undelivered: The number of events that it has not handled.
        rate: Events per second, over the latest events; None: none has arrived.
        checkpoint: The encoded cursor of the task, cut; None: it has set none.
        ended: Whether the trigger has ended.
        error: The end of the error of the trigger; None: it has not failed.
        carried: The number of events of earlier tries that the task has still to handle first.
        discarded: The number of events that count as handled although they never were.
        discarded_for: Why they were discarded; None: none were.
    """

    trigger: int
    received: int
    handled: int
    undelivered: int
    rate: float | None
    checkpoint: str | None
    ended: bool
    error: str | None
    carried: int = 0
    discarded: int = 0
    discarded_for: str | None = None


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
        block: The phase (`core.tasks.task_row.BlockPhase`) of its wait at a `yield`; 0: it does not wait there.
        stream: Its latest stream; None: it has none.
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
    block: int = 0
    stream: StreamAbout | None = None


class TriggerAbout(msgspec.Struct, frozen=True):
    """The trigger of a deferred task, for display.

    Attributes:
        id: Its id.
        classpath: The import path of its class.
        arguments: Its arguments as text, with secrets masked.
        due_us: The time that it waits for; None: it waits for something else.
        triggerer: The triggerer that runs it, for display; None: no triggerer runs it.
        queue: Its queue; None: any triggerer without queues runs it.
    """

    id: int
    classpath: str
    arguments: str
    due_us: int | None
    triggerer: str | None
    queue: str | None = None


@answered_by("dags.views.trigger_abouts:describe_triggers", reads=True)
class DescribeTriggers(Call[tuple[TriggerAbout, ...]], frozen=True):
    """Describe triggers of deferred tasks by id; finished triggers may be missing from the answer."""

    triggers: tuple[int, ...]


class SlotHolder(msgspec.Struct, frozen=True):
    """The instances of a task in a run that hold slots of a pool. `tasks`: their number; `slots`: what they hold."""

    dag_id: str
    run_id: str
    task_id: str
    tasks: int
    slots: int


class PoolLine(msgspec.Struct, frozen=True):
    """The tasks that hold slots of a pool, and the next one that gets some.

    Attributes:
        pool: The name of the pool.
        used: The number of slots that are held.
        holders: Those that hold most, up to five.
        first: The row id of the task that comes next.
        first_name: Its DAG, run and name, for display.
        first_slots: The number of slots that it needs.
    """

    pool: str
    used: int
    holders: tuple[SlotHolder, ...]
    first: int | None = None
    first_name: str = ""
    first_slots: int = 0


class TaskLimit(msgspec.Struct, frozen=True):
    """A limit that keeps a task from starting; see `core.tasks.admission.ReachedLimit`."""

    task: int
    name: str
    limit: int
    active: int


class AdmissionAbout(msgspec.Struct, frozen=True):
    """The pools and limits that scheduled tasks wait for: slots that they need, and limits that they have reached."""

    pools: tuple[PoolLine, ...]
    limits: tuple[TaskLimit, ...]


@answered_by("dags.views.waits:describe_admission", reads=True)
class DescribeAdmission(Call[AdmissionAbout], frozen=True):
    """Describe what scheduled tasks wait for, by row id; tasks in other states are left out."""

    tasks: tuple[int, ...]


@answered_by("dags.views.task_lists:list_tasks", reads=True)
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


class GridTask(msgspec.Struct, frozen=True):
    """A task of a run, with the counts of its elements if it is mapped."""

    run: int
    task_id: str
    state: str
    elements: MapCounts | None


@answered_by("dags.views.grid:list_grid", reads=True)
class ListGrid(Call[tuple[GridTask, ...]], frozen=True):
    """Return the states of the tasks of some runs, without elements of mapped tasks.

    Attributes:
        runs: The runs, by row id.
        limit: The maximum number of tasks of each run.
    """

    runs: tuple[int, ...]
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


@answered_by("dags.views.task_lists:list_history", reads=True)
class TaskHistory(Call[Listed[HistoryRecord]], frozen=True):
    """Return the state changes of a task, oldest first."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    after: str | None = None
    limit: int = 1000


@answered_by("dags.admin.task_admin:clear_tasks")
class ClearTasks(Call[tuple[str, ...]], frozen=True):
    """Reset tasks so that they run again; return their names. A finished run becomes active again.

    Elements of a mapped task are named `task[index]`. A mapped task that is cleared as a whole expands again from its
    sources. A task that is mapped over a cleared one is returned, too: it is open again, and runs the elements whose
    values differ.

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


#: The most elements that one call should clear; more take long enough for others to wait.
CLEARED_AT_ONCE = 2_000


def split_clear(call: ClearTasks, elements: MapCounts | None) -> Iterator[ClearTasks]:
    """Yield the calls that clear the failed elements of one mapped task, a part of its elements each if many failed.

    Args:
        call: The call for the whole task, with `failed`.
        elements: The counts of the task; None: it is not mapped.
    """
    few = elements is None or elements.failed + elements.upstream_failed <= CLEARED_AT_ONCE
    if elements is None or few or elements.iterated:
        yield call
        return
    end = max(elements.created, elements.arrived)
    for first in range(0, end, CLEARED_AT_ONCE):
        yield msgspec.structs.replace(call, indexes=(first, min(first + CLEARED_AT_ONCE, end) - 1))
    # A map over a map may have elements with higher indexes than it has elements.
    yield msgspec.structs.replace(call, indexes=(end, _NO_END))


@answered_by("dags.admin.task_admin:mark_tasks")
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
