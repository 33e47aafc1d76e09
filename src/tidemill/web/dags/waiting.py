"""Explains why a task waits, from its record, the structure of its DAG and the states of its run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tidemill.core.tasks.alive import AliveServices, SeenService, find_alive
from tidemill.core.tasks.expansion import MapPolicy
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.structure import TaskStructure
from tidemill.core.tasks.task_row import BlockPhase
from tidemill.core.wording import format_count
from tidemill.store.calls.instance_calls import MapCounts, TaskRecord, TriggerAbout
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.service_calls import ServiceSession
from tidemill.store.calls.setting_calls import PoolRecord
from tidemill.web.dags.models import TaskTriggerView, TaskWaitView

ENDED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
_SHOWN = 5
#: The maximum length of a trigger's arguments in a line.
_LINE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Around:
    """Facts beyond a task and its run that explain why the task waits.

    Attributes:
        pools: The pools, by name.
        triggers: The triggers of deferred tasks, by number.
        alive: The services that are alive.
        window: The number of elements that may be unfinished in a map that sets no number of its own.
    """

    pools: Mapping[str, PoolRecord]
    triggers: Mapping[int, TriggerAbout]
    alive: AliveServices
    window: int = MapPolicy().max_outstanding


def list_alive(services: Sequence[ServiceSession]) -> AliveServices:
    """Return the services that are alive, by their records in the store."""
    return find_alive([SeenService(each.kind, each.queues, each.quiet_us) for each in services])


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
            return _describe_upstream(structure, states, run, scheduler, group)
        case "scheduled" if scheduler:
            return TaskWaitView(kind="scheduler", text="the scheduler", missing=scheduler)
        case "scheduled":
            return TaskWaitView(kind="slots", text=_describe_pool(task, around.pools.get(task.pool)), names=[task.pool])
        case "queued":
            text, missing = f"a free worker of queue {task.queue}", around.alive.explain_missing("worker", task.queue)
            return TaskWaitView(kind="worker", text=text, names=[task.queue], missing=missing)
        case "running" if task.block:
            return _describe_block(task, around)
        case "deferred":
            return _describe_trigger(task.trigger, around, due)
        case "up_for_retry":
            return TaskWaitView(
                kind="retry", text=f"try {task.tries + 1} of {task.max_tries}, at", at=due, missing=scheduler
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
        text = f"{_describe_pool(task, around.pools.get(task.pool))}, to go on after its yield"
        return TaskWaitView(kind="slots", text=text, names=[task.pool])
    return TaskWaitView(kind="worker", text="a place at its worker, to go on after its yield", names=[task.queue])


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
    size = mapped.max_outstanding if mapped is not None and mapped.max_outstanding is not None else window
    limit = None if structure is None else structure.max_active_per_run
    size = size if limit is None else min(size, limit)
    left = 0 if counts.stop is not None else counts.arrived - counts.created
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
    names = [name for name in structure.upstream if name in group]
    if names:
        text = f"upstream {_list_names(names)} in this element"
        return TaskWaitView(kind="upstream", text=text, names=names)
    what = "group" if structure.is_group or structure.mapped_group else "map"
    return TaskWaitView(kind="elements", text=f"room among the open elements of its {what}", missing=scheduler)


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _describe_trigger(number: int | None, around: Around, times_out_at: float | None) -> TaskWaitView:
    missing = around.alive.explain_missing("triggerer")
    about = None if number is None else around.triggers.get(number)
    if about is None:
        return TaskWaitView(kind="trigger", text="an event of its trigger", times_out_at=times_out_at, missing=missing)
    due = None if about.due_us is None else about.due_us / 1e6
    arguments = about.arguments if len(about.arguments) <= _LINE_CHARS else f"{about.arguments[:_LINE_CHARS]}..."
    text = f"an event of {about.classpath.rpartition('.')[2]}({arguments})"
    return TaskWaitView(
        kind="trigger",
        text=text if due is None else f"{text}, due at",
        at=due,
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
    scheduler: str,
    group: Collection[str],
) -> TaskWaitView:
    if run.state == "queued" and scheduler:
        return TaskWaitView(kind="run", text="the run to start", missing=scheduler)
    if run.state == "queued":
        return TaskWaitView(kind="run", text="the run to start (its DAG is paused, or at its limit of active runs)")
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


def _describe_pool(task: TaskRecord, pool: PoolRecord | None) -> str:
    if pool is None:
        return f"pool {task.pool}, which does not exist; create it"
    wanted = format_count(task.pool_slots, "slot")
    if pool.used + task.pool_slots > pool.slots:
        return f"{wanted} of pool {pool.name}, where {pool.used} of {pool.slots} are in use"
    return f"{wanted} of pool {pool.name}, or a limit on active tasks"
