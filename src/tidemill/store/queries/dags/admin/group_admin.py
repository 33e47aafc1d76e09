"""Finds what users clear and mark in mapped groups: whole groups, or tasks in units.

Invariants: a group is cleared as a whole, with all its tasks, or in parts. All tasks of the units in question are
locked in one statement, because the reports of their attempts lock them in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Select, and_, bindparam, select, text, update

from tidemill.core.tasks.dependencies import TaskOutcome
from tidemill.core.tasks.inputs import Remove
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.dag_tables import IS_BAD_ELEMENT, task_instance, task_map
from tidemill.store.queries.dags.maps.groups import lock_units
from tidemill.store.queries.dags.state.map_rows import StoredMap, read_maps
from tidemill.store.queries.dags.state.task_rows import InstanceKey, RunEntry, TaskEntry
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.statements import Statement

_TASK = task_instance.c
_BAD = (TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED)


@dataclass(slots=True)
class GroupChoice:
    """What a user chose.

    Attributes:
        keys: The tasks outside of mapped groups.
        parts: The heads of groups and their tasks, or tasks in units.
        rewinds: By looped group, the iteration that runs again; later ones are removed.
    """

    keys: list[InstanceKey]
    parts: list[TaskEntry] = field(default_factory=list)
    rewinds: dict[str, int] = field(default_factory=dict)


def choose_in_groups(
    board: Board,
    run: RunEntry,
    request: ClearTasks | MarkTasks,
    keys: list[InstanceKey],
    named: Collection[str],
    reopened: Collection[str] = (),
) -> GroupChoice:
    """Find which tasks of mapped groups a user means, and lock them.

    Args:
        board: The board that has locked the run.
        run: The run.
        request: The user's request.
        keys: The tasks that it names, and those downstream of them that it includes.
        named: The tasks that it names.
        reopened: The groups that are open again because a source is cleared.
    """
    found = GroupChoice(list(keys))
    names = {name for _, name, _ in keys}
    for group, inner in run.plan.groups.items():
        members = {group, *inner}
        if names & members:
            heads = _load_heads(board, run, members)
            maps = read_maps(board.connection, [head.id for head in heads.values()], locks=False)
            stored = {name: maps[head.id] for name, head in heads.items()}
            _choose(board, run, request, found, group, names & members, set(named), heads, stored, group in reopened)
    return found


def _load_heads(board: Board, run: RunEntry, names: Iterable[str]) -> dict[str, TaskEntry]:
    keys = [(run.id, name, UNMAPPED) for name in sorted(names)]
    board.load(keys)
    return {name: head for _, name, _ in keys if (head := board.find(run.id, name)) is not None}


def _choose(
    board: Board,
    run: RunEntry,
    request: ClearTasks | MarkTasks,
    found: GroupChoice,
    group: str,
    chosen: set[str],
    named: set[str],
    heads: dict[str, TaskEntry],
    stored: dict[str, StoredMap],
    is_reopened: bool,
) -> None:
    """Add what is chosen of one group, of which `chosen` are the tasks that the request includes."""
    found.keys = [key for key in found.keys if key[1] not in heads]
    has_indexes = request.map_index != UNMAPPED or request.indexes is not None
    own = chosen & named
    inner = [name for name in heads if name != group and (name in chosen or group in own)]
    row = stored[group].row
    indexes: Collection[int] = ()
    if isinstance(request, ClearTasks) and request.failed:
        whole = _has_failed_as_a_whole(group, inner, heads, stored) or _has_generator_failed(board, heads[group])
        whole = whole and not is_reopened
        indexes = () if whole else _find_failed(board, run, inner)
    elif has_indexes and own:
        whole, indexes = False, _limit(request, row.created)
    else:
        reached = isinstance(request, ClearTasks) and request.downstream and _is_reached(run, named, heads.keys())
        whole = group in own or not own or reached or not row.created
        indexes = range(0 if whole else row.created)
    if whole:
        wanted = heads.keys() if isinstance(request, ClearTasks) or group in own else own
        found.parts += [heads[name] for name in sorted(wanted)]
        return
    units = sorted(index for index in indexes if 0 <= index < row.created)
    mapped = run.plan.tasks[group].structure.mapped
    if isinstance(request, ClearTasks) and mapped is not None and mapped.loop is not None and units:
        # What follows an iteration depends on it; its gate decides again.
        first = found.rewinds[group] = units[0]
        units = units[:1]
        lock_units(board, run.id, tuple(heads), range(first, row.created))
        if request.failed:
            tasks = [(name, board.find(run.id, name, first)) for name in inner]
            inner = [name for name, one in tasks if one is not None and one.row.outcome in _BAD]
        inner = sorted({*inner, mapped.loop.gate, *_find_after(run, inner, heads)})
    lock_units(board, run.id, tuple(heads), units)
    decided = {name for name in inner if not stored[name].row.opened}
    parts = [
        part
        for name in inner
        if name not in decided
        for index in units
        if (part := board.find(run.id, name, index)) is not None and part.row.state is not TaskState.REMOVED
    ]
    if isinstance(request, ClearTasks) and request.failed and group not in found.rewinds:
        parts = [part for part in parts if part.row.outcome in _BAD]
    found.parts += parts


def _find_after(run: RunEntry, names: Collection[str], members: Collection[str]) -> set[str]:
    """Return the members of a group that are downstream of some of them."""
    return {name for name in run.plan.list_downstream(names) if name in members}


def select_rewinds(rewinds: Mapping[str, int], cleared: Iterable[TaskEntry]) -> dict[str, int]:
    """Return the loops of which an iteration does run again; those that are about to end refuse it."""
    units = {(entry.plan.mapped_group, entry.map_index) for entry in cleared}
    return {group: first for group, first in rewinds.items() if (group, first) in units}


def find_regated(run: RunEntry, cleared: Iterable[TaskEntry]) -> dict[str, int]:
    """Return the loops whose last gate runs after all, with its iteration, because a user marked what had failed."""
    found: dict[str, int] = {}
    for entry in cleared:
        group = entry.plan.mapped_group
        mapped = run.plan.tasks[group].structure.mapped if group else None
        if mapped is not None and mapped.loop is not None and mapped.loop.gate == entry.task_id:
            found[group] = max(entry.map_index, found.get(group, 0))
    return found


def rewind_loops(board: Board, run: RunEntry, rewinds: Mapping[str, int], by: str) -> None:
    """Remove the iterations after those that run again.

    Args:
        board: The board, which has locked the iterations.
        run: The run.
        rewinds: By looped group, the iteration that runs again.
        by: Who has asked for it.
    """
    for group, first in rewinds.items():
        names = (*run.plan.groups[group], group)
        later = [
            entry
            for entry in board.tasks.values()
            if entry.run.id == run.id and entry.task_id in names and entry.map_index > first
        ]
        triggerers = board.find_triggerers(later)
        for entry in sorted(later, key=lambda one: (one.map_index, names.index(one.task_id))):
            if entry.row.state is not TaskState.REMOVED:
                board.give(entry, Remove(triggerer=triggerers.get(entry.id)), by)


def reopen_loops(board: Board, run: RunEntry, rewinds: Mapping[str, int]) -> None:
    """Have loops go on after the iterations that run again; the board is flushed."""
    for group, first in rewinds.items():
        heads = [head.id for name in (group, *run.plan.groups[group]) if (head := board.find(run.id, name)) is not None]
        read_maps(board.connection, heads, locks=True)
        new = {"created": first + 1, "arrived": first + 1, "closed": 0, "stop": None, "pending": 1}
        board.connection.execute(update(task_map).where(task_map.c.task.in_(sorted(heads))).values(new))


def _is_reached(run: RunEntry, named: set[str], members: Collection[str]) -> bool:
    """Whether a group is downstream of a named task outside of it."""
    return not set(members).isdisjoint(run.plan.list_downstream(named - set(members)))


def _limit(request: ClearTasks | MarkTasks, end: int) -> range:
    if request.indexes is not None:
        return range(max(0, request.indexes[0]), min(request.indexes[1] + 1, end))
    return range(request.map_index, request.map_index + 1)


def _has_failed_as_a_whole(
    group: str, inner: Collection[str], heads: dict[str, TaskEntry], stored: dict[str, StoredMap]
) -> bool:
    """Whether a source of the group failed, or a task because of its upstream tasks outside of the group."""
    if heads[group].row.outcome in _BAD and not stored[group].row.arrived:
        return True
    return any(heads[name].row.outcome in _BAD and not stored[name].row.opened for name in inner)


def _has_generator_failed(board: Board, head: TaskEntry) -> bool:
    """Whether a generator that is a source of a group failed; it starts over."""
    mapped = head.plan.structure.mapped
    names = [] if mapped is None else [leaf.task for leaf in mapped.leaves if leaf.kind == "generator"]
    board.load((head.run.id, name, UNMAPPED) for name in names)
    sources = [board.find(head.run.id, name) for name in names]
    return any(source is not None and source.row.outcome in _BAD for source in sources)


def _find_failed(board: Board, run: RunEntry, names: Iterable[str]) -> set[int]:
    """Return the indexes of units of which one of the tasks failed."""
    return {
        index for name in names for (index,) in _failed.fetch(board.connection, {"of_run": run.id, "of_task": name})
    }


@Statement
def _failed(dialect: str) -> Select[Any]:
    mine = and_(_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task"), text(IS_BAD_ELEMENT))
    return select(_TASK.map_index).where(mine)


def find_inner_followers(board: Board, marked: Iterable[TaskEntry]) -> list[TaskEntry]:
    """Return the tasks that failed with marked ones in their units."""
    found: dict[int, TaskEntry] = {}
    for entry in marked:
        if entry.is_part:
            inner = entry.run.plan.groups[entry.plan.structure.mapped_group]
            for name in entry.run.plan.list_downstream([entry.task_id]):
                other = board.find(entry.run.id, name, entry.map_index) if name in inner else None
                if other is not None and other.row.outcome is TaskOutcome.UPSTREAM_FAILED:
                    found[other.id] = other
    return list(found.values())
