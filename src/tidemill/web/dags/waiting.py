"""Explains why a task waits, from its record, its DAG, its run, and the pools, triggers and services around it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tidemill.core.tasks.alive import AliveServices, SeenService, find_alive
from tidemill.core.tasks.expansion import MapPolicy
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.missing_files import LackedFile, UnservedFile, find_unserved
from tidemill.core.tasks.structure import DagStructure, TaskStructure
from tidemill.core.tasks.task_row import BlockPhase
from tidemill.core.wording import format_count
from tidemill.store.calls.call import Call
from tidemill.store.calls.instance_calls import (
    AdmissionAbout,
    DescribeAdmission,
    DescribeTriggers,
    MapCounts,
    PoolLine,
    TaskLimit,
    TaskRecord,
    TriggerAbout,
)
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.service_calls import DescribeServices, FileDifference, ListFileDifferences, ServiceRecord
from tidemill.store.calls.setting_calls import ListPools, PoolRecord
from tidemill.web.dags.models import TaskTriggerView, TaskWaitView

ENDED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
_SHOWN = 5
#: The maximum length of a trigger's arguments in a line.
_LINE_CHARS = 200
#: The number of triggers that one call describes.
_MANY = 500
#: The number of tasks that a line names that hold slots.
_HOLDERS = 3

T = TypeVar("T")


class AnswerCall(Protocol):
    """Returns the store's answer to a call."""

    def __call__(self, request: Call[T], /) -> T: ...


@dataclass(frozen=True, slots=True)
class Around:
    """Facts beyond a task and its run that explain why the task waits.

    Attributes:
        pools: The pools, by name.
        triggers: The triggers of deferred tasks, by number.
        alive: The services that are alive.
        window: The number of elements that may be unfinished in a map that sets no number of its own.
        lines: Who holds the slots of pools, and the next task that gets some, by pool.
        limits: The reached limits of scheduled tasks, by number.
        unserved: The files that no live worker of a queue has, by queue and path.
        file: The file of the DAG.
        paused: Whether the DAG is paused.
        max_runs: The number of runs of the DAG that may be active.
    """

    pools: Mapping[str, PoolRecord]
    triggers: Mapping[int, TriggerAbout]
    alive: AliveServices
    window: int = MapPolicy().max_outstanding
    lines: Mapping[str, PoolLine] = field(default_factory=dict)
    limits: Mapping[int, Sequence[TaskLimit]] = field(default_factory=dict)
    unserved: Mapping[tuple[str, str], UnservedFile] = field(default_factory=dict)
    file: str = ""
    paused: bool = False
    max_runs: int = 0


def look_around(
    ask: AnswerCall, structure: DagStructure | None, tasks: Sequence[TaskRecord], file: str, *, paused: bool
) -> Around:
    """Return the facts that explain why some tasks of a DAG wait.

    Args:
        ask: Returns the store's answer to a call.
        structure: The DAG in the version of the run; None: unknown.
        tasks: The tasks.
        file: The file of the DAG.
        paused: Whether the DAG is paused.
    """
    numbers = [task.trigger for task in tasks if task.state == "deferred" and task.trigger is not None]
    parts = [tuple(numbers[start : start + _MANY]) for start in range(0, len(numbers), _MANY)]
    triggers = [each for part in parts for each in ask(DescribeTriggers(part))]
    services = ask(DescribeServices())
    scheduled = tuple(task.id for task in tasks if task.state == "scheduled" or task.block)
    about = ask(DescribeAdmission(scheduled)) if scheduled else AdmissionAbout((), ())
    limits: dict[int, list[TaskLimit]] = {}
    for limit in about.limits:
        limits.setdefault(limit.task, []).append(limit)
    unserved: Sequence[UnservedFile] = ()
    if any(task.state == "queued" for task in tasks):
        unserved = list_unserved(services, ask(ListFileDifferences()))
    return Around(
        {pool.name: pool for pool in ask(ListPools())} if scheduled else {},
        {each.id: each for each in triggers},
        list_alive(services),
        lines={line.pool: line for line in about.pools},
        limits=limits,
        unserved={(one.queue, one.path): one for one in unserved},
        file=file,
        paused=paused,
        max_runs=0 if structure is None else structure.max_active_runs,
    )


def list_alive(services: Sequence[ServiceRecord]) -> AliveServices:
    """Return the services that are alive, by their records in the store."""
    return find_alive(
        [
            SeenService(one.kind, one.queues, one.quiet_us, one.id, each.held, one.capacity)
            for each in services
            for one in (each.session,)
            # A process that supervises a triggerer runs no triggers itself.
            if one.kind != "triggerer" or one.capacity
        ]
    )


def list_unserved(services: Sequence[ServiceRecord], found: Sequence[FileDifference]) -> tuple[UnservedFile, ...]:
    """Return the files that no live worker of a queue has."""
    workers = {each.session.id: each.session.queues for each in services if each.session.kind == "worker"}
    lacked = [LackedFile(one.session, one.path, one.since_us) for one in found if one.difference == "missing"]
    return find_unserved(workers, lacked)


def describe_wait(
    task: TaskRecord,
    structure: TaskStructure | None,
    states: Mapping[str, str],
    run: RunRecord,
    around: Around,
    group: Collection[str] = (),
) -> TaskWaitView | None:
    """Return the reason why a task waits; None if it runs and is not at a `yield`, or has ended.

    Args:
        task: The task.
        structure: Its definition in the DAG; None if there is none.
        states: The states of all tasks of the run.
        run: The run.
        around: Pools, triggers and services.
        group: The tasks of its mapped group.
    """
    due = None if task.due_us is None else task.due_us / 1e6
    scheduler = around.alive.explain_missing("scheduler")
    match task.state:
        case "none" if structure is not None and task.map_index != UNMAPPED and structure.mapped is not None:
            return _describe_element(structure, group, scheduler)
        case "none":
            return _describe_upstream(structure, states, run, around, group)
        case "scheduled" if scheduler:
            return TaskWaitView(kind="scheduler", text="the scheduler", missing=scheduler)
        case "scheduled" if limits := around.limits.get(task.id):
            return TaskWaitView(kind="limit", text=_describe_limits(limits), names=[one.name for one in limits])
        case "scheduled":
            return TaskWaitView(kind="slots", text=_describe_pool(task, around), names=[task.pool])
        case "queued":
            return _describe_worker(task, around)
        case "running" if task.block:
            return _describe_block(task, around)
        case "deferred":
            return _describe_trigger(task, around, due)
        case "up_for_retry":
            # Elements that run in one attempt have no time of their own.
            when = "at" if due is not None else "in the attempt of all elements"
            return TaskWaitView(
                kind="retry", text=f"try {task.tries + 1} of {task.max_tries}, {when}", at=due, missing=scheduler
            )
        case "ending" if task.elements is not None:
            text = f"the end of {format_count(task.elements.unfinished, 'element')}"
            return TaskWaitView(kind="ending", text=text, missing=scheduler)
        case "ending":
            return TaskWaitView(kind="ending", text="its last attempt to clean up and end")
        case "mapped" if task.elements is not None:
            return _describe_map(structure, task.elements, states, around.window, scheduler)
        case _:
            return None


def _describe_block(task: TaskRecord, around: Around) -> TaskWaitView:
    """Return what a generator waits for at its `yield`."""
    if task.block == BlockPhase.FULL:
        missing = around.alive.explain_missing("scheduler")
        return TaskWaitView(kind="elements", text="elements to be created from what it has yielded", missing=missing)
    if task.block == BlockPhase.READY:
        text = f"{_describe_pool(task, around)}, to go on after its yield"
        return TaskWaitView(kind="slots", text=text, names=[task.pool])
    return TaskWaitView(kind="worker", text="a free slot of its worker, to go on after its yield", names=[task.queue])


def _describe_map(
    structure: TaskStructure | None, counts: MapCounts, states: Mapping[str, str], window: int, scheduler: str
) -> TaskWaitView:
    """Return what a mapped task waits for: its sources, or its elements."""
    mapped = None if structure is None else structure.mapped
    sources = [name for name in (() if mapped is None else mapped.sources) if states.get(name) not in ENDED]
    follows = None if structure is None else structure.follows
    if not counts.unfinished and sources:
        shown = ", ".join(sources[:_SHOWN])
        text = f"an item of its source {shown}"
        if follows is not None:
            text = f"an element of {shown} to end"
        elif mapped is not None and mapped.maps.intersection(sources):
            text = f"the end of all elements of {shown}"
        return TaskWaitView(kind="source", text=text, names=sources, missing=scheduler)
    arrived = f"{counts.arrived:,}" + ("" if counts.closed else " so far")
    text = f"its elements: {counts.unfinished:,} of {arrived} are open"
    if structure is not None and structure.mapped_group:
        return TaskWaitView(kind="elements", text=text, names=[structure.mapped_group], missing=scheduler)
    if counts.iterated:
        # Its attempt decides when each begins.
        retries = f"; {counts.retrying:,} of them wait for a retry" if counts.retrying else ""
        return TaskWaitView(kind="elements", text=f"{text}{retries}", names=sources)
    size = mapped.max_outstanding if mapped is not None and mapped.max_outstanding is not None else window
    limit = None if structure is None else structure.max_active_per_run
    size = size if limit is None else min(size, limit)
    # Elements beyond the end of a source that ran again exist until they are removed.
    left = 0 if counts.stop is not None else max(0, counts.arrived - counts.created)
    half = (size + 1) // 2
    full = counts.unfinished - max(0, counts.retrying - half) >= size
    if counts.retrying > half:
        retries = f"{counts.retrying:,} wait for a retry, of which {half:,} count in its window of {size:,}"
        text += f"; {retries}"
    if left and full:
        text += f"; its window of {size:,} is full, {left:,} follow"
    elif follows is not None and full:
        text += f"; its window of {size:,} is full"
    elif follows is not None and sources:
        text += f"; it follows the elements of {follows}"
    elif not counts.closed and sources:
        text += f"; its source {', '.join(sources[:_SHOWN])} gives more"
    return TaskWaitView(kind="elements", text=text, names=sources, missing=scheduler)


def _describe_element(structure: TaskStructure, group: Collection[str], scheduler: str) -> TaskWaitView:
    """Return what an element waits for that was not started: tasks of its element of the group, or its map."""
    if structure.mapped is not None and structure.mapped.iterated:
        return TaskWaitView(kind="elements", text="its turn in the attempt of all elements, or its end there")
    names = [name for name in structure.upstream if name in group]
    if names:
        text = f"upstream {_list_names(names)} in this element"
        return TaskWaitView(kind="upstream", text=text, names=names)
    what = "group" if structure.is_group or structure.mapped_group else "map"
    return TaskWaitView(kind="elements", text=f"room among the open elements of its {what}", missing=scheduler)


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _describe_worker(task: TaskRecord, around: Around) -> TaskWaitView:
    """Return what a queued task waits for: a worker, with room, that has its file."""
    queue = task.queue
    missing = around.alive.explain_missing("worker", queue)
    unserved = around.unserved.get((queue, around.file))
    if unserved is not None and not missing:
        text = f"a worker of queue {queue} that has the file {around.file}; no live one has had it since"
        since = unserved.since_us / 1e6
        advice = "copy it to the DAG folders of these workers; the try fails after dags.missing_file_seconds"
        return TaskWaitView(kind="file", text=text, names=[around.file], at=since, missing=advice)
    full = around.alive.explain_full("worker", queue)
    text = f"a free worker of queue {queue}" + (f"; {full}" if full else "")
    return TaskWaitView(kind="worker", text=text, names=[queue], missing=missing)


def _describe_trigger(task: TaskRecord, around: Around, times_out_at: float | None) -> TaskWaitView:
    about = None if task.trigger is None else around.triggers.get(task.trigger)
    since = task.since_us / 1e6
    if about is None:
        missing, text = around.alive.explain_missing("triggerer", any_queue=True), "an event of its trigger"
        return TaskWaitView(kind="trigger", text=text, since=since, times_out_at=times_out_at, missing=missing)
    missing = around.alive.explain_missing("triggerer", about.queue)
    due = None if about.due_us is None else about.due_us / 1e6
    arguments = about.arguments if len(about.arguments) <= _LINE_CHARS else f"{about.arguments[:_LINE_CHARS]}..."
    text = f"an event of {about.classpath.rpartition('.')[2]}({arguments})"
    where = f"the triggerer on {about.triggerer}" if about.triggerer else ""
    if not where and not missing:
        where = around.alive.explain_full("triggerer", about.queue) or "no triggerer yet"
    return TaskWaitView(
        kind="trigger",
        text=text if due is None else f"{text}, due at",
        at=due,
        where=where,
        since=since,
        times_out_at=times_out_at,
        trigger=TaskTriggerView(
            number=about.id,
            classpath=about.classpath,
            arguments=about.arguments,
            due_at=due,
            triggerer=about.triggerer,
        ),
        missing=missing,
    )


def _describe_upstream(
    structure: TaskStructure | None,
    states: Mapping[str, str],
    run: RunRecord,
    around: Around,
    group: Collection[str],
) -> TaskWaitView:
    scheduler = around.alive.explain_missing("scheduler")
    if run.state == "queued" and scheduler:
        return TaskWaitView(kind="run", text="the run to start", missing=scheduler)
    if run.state == "queued" and around.paused:
        return TaskWaitView(kind="run", text="the run to start; its DAG is paused")
    if run.state == "queued":
        limit = format_count(around.max_runs, "run")
        return TaskWaitView(kind="run", text=f"the run to start; {limit} of the DAG may be active (max_active_runs)")
    mapped = None if structure is None else structure.mapped
    sources = () if mapped is None else mapped.sources
    upstream = [name for name in (structure.upstream if structure else ()) if name not in group]
    names = [name for name in upstream if states.get(name) not in ENDED]
    if names and set(names) <= set(sources):
        return TaskWaitView(kind="source", text=f"its source {', '.join(names[:_SHOWN])}", names=names)
    if not names:
        past = structure is not None and (structure.depends_on_past or structure.wait_for_downstream)
        text = "its instance in the previous run" if past else "the scheduler"
        return TaskWaitView(kind="past" if past else "scheduler", text=text, missing=scheduler)
    return TaskWaitView(kind="upstream", text=f"upstream {_list_names(names)}", names=names)


def _describe_limits(limits: Sequence[TaskLimit]) -> str:
    """Return the limits on active tasks that keep a task from starting."""
    whose = {
        "max_active_tasks": "tasks of the DAG are active",
        "max_active_tis_per_dag": "instances of the task are active in all runs",
        "max_active_tis_per_dagrun": "instances of the task are active in this run",
    }
    told = [f"{one.active:,} of {one.limit:,} {whose[one.name]} ({one.name})" for one in limits]
    return f"another task to end: {', '.join(told)}"


def _describe_pool(task: TaskRecord, around: Around) -> str:
    """Return which slots a task waits for, and which tasks have them."""
    pool, line = around.pools.get(task.pool), around.lines.get(task.pool)
    if pool is None:
        return f"pool {task.pool}, which does not exist; create it"
    wanted = f"{format_count(task.pool_slots, 'slot')} of pool {pool.name}"
    if not pool.slots:
        return f"{wanted}, which has none; give it slots"
    if task.pool_slots > pool.slots:
        return f"{wanted}, which has only {pool.slots}; give the task fewer pool_slots, or the pool more slots"
    used = pool.used if line is None else line.used
    if used + task.pool_slots > pool.slots:
        holders = "" if line is None else _list_holders(line, used)
        return f"{wanted}, where {used} of {pool.slots} are in use{holders}"
    if line is not None and line.first not in (None, task.id) and used + line.first_slots > pool.slots:
        return f"{wanted}, after {line.first_name}, which comes first and needs {line.first_slots}"
    return f"{wanted}, at the next turn of the scheduler"


def _list_holders(line: PoolLine, used: int) -> str:
    """Return the tasks that hold most slots of a pool."""
    shown = line.holders[:_HOLDERS]
    if not shown:
        return ""
    names = [f"{one.dag_id} {one.run_id} {one.task_id}" + (f" ({one.slots})" if one.slots > 1 else "") for one in shown]
    others = used - sum(one.slots for one in shown)
    return f" by {', '.join(names)}" + (f", and {others} by others" if others > 0 else "")
