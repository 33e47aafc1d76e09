"""Clears and marks the tasks of runs for users.

Invariants: changes by users go through the state machine like all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec
from sqlalchemy import Connection

from tidemill.core.tasks.attempt import Moved
from tidemill.core.tasks.dependencies import TaskOutcome
from tidemill.core.tasks.inputs import Clear, Mark, Remove
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.instance_calls import (
    ClearTasks,
    MarkTasks,
)
from tidemill.store.context import CallContext
from tidemill.store.queries.dags.admin.group_admin import (
    choose_in_groups,
    find_inner_followers,
    find_regated,
    reopen_loops,
    rewind_loops,
    select_rewinds,
)
from tidemill.store.queries.dags.admin.map_clearing import forget_failures, select_followers
from tidemill.store.queries.dags.attempts.iterations import forget_parts, retry_parts
from tidemill.store.queries.dags.items.backlog import measure_elements
from tidemill.store.queries.dags.items.items import begin_again, forget_streams
from tidemill.store.queries.dags.maps.locks import lock_elements, lock_failed_elements
from tidemill.store.queries.dags.maps.reopening import can_reopen, has_comparable_items
from tidemill.store.queries.dags.maps.steps import look_at_maps
from tidemill.store.queries.dags.runs.runs import find_run, queue_run
from tidemill.store.queries.dags.state.map_rows import read_ends, read_maps
from tidemill.store.queries.dags.state.task_rows import InstanceKey, RunEntry, TaskEntry
from tidemill.store.queries.dags.state.tasks import close_board, end_run
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.dags.views.task_lists import refuse_instance

_BAD = (TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED)


def clear_tasks(connection: Connection, request: ClearTasks, context: CallContext) -> tuple[str, ...]:
    """Reset tasks so that they run again; see `ClearTasks`."""
    board, run = _lock_run(connection, request.dag_id, request.run_id, context)
    numbers = _find_parts(run, request)
    if numbers is not None:
        _check_measured(connection, run, request, numbers)
        request = msgspec.structs.replace(request, map_index=0, indexes=None)
    keys = _select_keys(run, request)
    named = {name for _, name, _ in keys}
    if request.downstream:
        after = run.plan.list_downstream({name for _, name, _ in keys})
        keys = sorted({*keys, *((run.id, name, UNMAPPED) for name in after)})
    kept: set[str] = set()
    reopened: dict[str, TaskEntry] = {}
    if request.indexes is None and request.map_index == UNMAPPED:
        if request.failed:
            reopened = _select_reopened(board, run, _list_maps_over(run, _find_failed(board, keys)), failed=True)
            added = _list_maps_of_generators(run, keys) - reopened.keys()
        else:
            kept = _list_maps_over(run, keys) - {name for _, name, _ in keys}
            reopened = _select_reopened(board, run, kept)
            added = kept - reopened.keys()
        keys = sorted({*keys, *((run.id, name, UNMAPPED) for name in added)})
    chosen = choose_in_groups(board, run, request, keys, named, reopened.keys())
    _check_parts(run, request, chosen.parts)
    entries = _load_entries(board, run, chosen.keys, request)
    if request.failed:
        entries = _select_failed(board, run, entries, reopened.keys())
    entries = list({entry.id: entry for entry in _complete_groups(board, run, entries) + chosen.parts}.values())
    whole = [entry for entry in entries if entry.row.policy.is_map]
    refollowing = select_followers(board, run, entries)
    entries = [
        entry
        for entry in refollowing.entries
        if (entry.row.state is not TaskState.NONE or entry.id in refollowing.gone) and not _is_ending(board, entry)
    ]
    if request.dry_run:
        return _name((*entries, *reopened.values()))
    triggerers = board.find_triggerers(entries)
    cleared = []
    for entry in entries:
        triggerer = triggerers.get(entry.id)
        given = Remove(triggerer=triggerer) if entry.id in refollowing.gone else Clear(triggerer=triggerer)
        if isinstance(board.give(entry, given, request.by), Moved):
            cleared.append(entry)
    _clear_parts(board, cleared, numbers, failed=request.failed)
    generators = [entry.id for entry in cleared if entry.plan.structure.is_generator and not entry.is_part]
    if generators:
        begin_again(connection, generators)
    if cleared:
        forget_streams(connection, [entry.id for entry in cleared], generators)
    moved = {entry.id for entry in cleared}
    board.maps.keeps = {
        entry.id: entry.task_id in kept and has_comparable_items(entry.plan.structure.mapped)
        for entry in whole
        if entry.task_id not in kept or entry.id in moved
    }
    if cleared:
        _continue_run(run, context)
    for name, index in refollowing.again:
        board.maps.pass_on(run.id, [name], index)
    rewinds = select_rewinds(chosen.rewinds, cleared)
    rewind_loops(board, run, rewinds, request.by)
    again = (*refollowing.reopened.values(), *reopened.values())
    _look_at_elements(board, cleared, reopened=again, rewinds=rewinds)
    close_board(board)
    return _name((*cleared, *reopened.values()))


def _name(entries: Iterable[TaskEntry]) -> tuple[str, ...]:
    return tuple(entry.name for entry in sorted(entries, key=lambda one: (one.task_id, one.map_index)))


def _find_parts(run: RunEntry, request: ClearTasks | MarkTasks) -> tuple[int, int] | None:
    """Return the first and the last index that a user names of elements that run in one attempt; None: no such ones.

    Raises:
        CallRefusedError: Other tasks are named, too.
    """
    if request.map_index == UNMAPPED and request.indexes is None:
        return None
    iterated = [name for name in request.task_ids if name in run.plan.tasks and run.plan.tasks[name].iterated]
    if not iterated:
        return None
    if len(request.task_ids) > 1:
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"task {iterated[0]!r} runs its elements in one attempt; name no other task with the map index",
        )
    return request.indexes or (request.map_index, request.map_index)


def _check_measured(connection: Connection, run: RunEntry, request: ClearTasks, numbers: tuple[int, int]) -> None:
    """Check that a task has an element with the first of two indexes.

    Raises:
        CallRefusedError: Its sources have not given so many.
    """
    (name,) = request.task_ids
    mapped = run.plan.tasks[name].structure.mapped
    if mapped is not None and numbers[0] >= measure_elements(connection, run.id, name, mapped).parts:
        raise refuse_instance(request.dag_id, request.run_id, name, numbers[0])


def _clear_parts(board: Board, cleared: Sequence[TaskEntry], numbers: tuple[int, int] | None, *, failed: bool) -> None:
    """Have elements that run in one attempt run again: the named ones, those that failed, or all."""
    whole = {(one.run.id, one.task_id, 0) for one in cleared if one.plan.iterated and one.map_index == UNMAPPED}
    if whole:
        board.load(whole)
        found = [entry for key in whole if (entry := board.find(*key)) is not None]
        forget_parts(board.connection, [entry.id for entry in found])
    for entry in cleared:
        if not entry.plan.iterated or entry.map_index == UNMAPPED or (entry.run.id, entry.task_id, 0) in whole:
            continue
        if failed or numbers is not None:
            retry_parts(board.connection, entry.id, numbers, failed=failed)
        else:
            forget_parts(board.connection, [entry.id])


def _check_parts(run: RunEntry, request: ClearTasks | MarkTasks, parts: Iterable[TaskEntry]) -> None:
    """Check that the elements exist that a user names in mapped groups.

    Raises:
        CallRefusedError: One does not.
    """
    if request.map_index == UNMAPPED:
        return
    known = {name for part in parts for name in (part.task_id, part.plan.mapped_group)}
    for name in request.task_ids:
        if run.plan.tasks[name].mapped_group and name not in known:
            raise refuse_instance(request.dag_id, request.run_id, name, request.map_index)


def _complete_groups(board: Board, run: RunEntry, entries: list[TaskEntry]) -> list[TaskEntry]:
    """Return tasks with all tasks of the mapped groups among them; a group starts over as a whole."""
    keys = [
        (run.id, inner, UNMAPPED)
        for entry in entries
        if entry.map_index == UNMAPPED
        for inner in run.plan.groups.get(entry.task_id, ())
    ]
    board.load(keys)
    return entries + [head for key in keys if (head := board.find(*key)) is not None]


def _list_maps_over(run: RunEntry, keys: Iterable[InstanceKey]) -> set[str]:
    """Return the tasks and groups that are mapped over cleared tasks; elements whose items stay the same are kept."""
    plans = [run.plan.tasks[name] for _, name, _ in keys]
    return {
        name for plan in plans if plan.structure.mapped is None or plan.structure.is_generator for name in plan.feeds
    }


def _find_failed(board: Board, keys: Iterable[InstanceKey]) -> list[InstanceKey]:
    """Return the tasks among the given ones that failed."""
    wanted = [key for key in keys if key[2] == UNMAPPED]
    board.load(wanted)
    return [key for key in wanted if (entry := board.find(*key)) is not None and entry.row.outcome in _BAD]


def _select_reopened(
    board: Board, run: RunEntry, names: Iterable[str], *, failed: bool = False
) -> dict[str, TaskEntry]:
    """Return the heads of the maps over cleared tasks that are open again in place; the others start over.

    `failed`: whether failed tasks are cleared; a group with a task that failed before the group began starts over.
    """
    wanted = sorted(names)
    members = {name: (name, *run.plan.groups.get(name, ())) for name in wanted}
    board.load((run.id, one, UNMAPPED) for name in wanted for one in members[name])
    heads = {name: head for name in wanted if (head := board.find(run.id, name)) is not None}
    found = [head.id for name in wanted for one in members[name] if (head := board.find(run.id, one)) is not None]
    parts = read_maps(board.connection, found, locks=False) if found else {}
    return {
        name: head
        for name, head in heads.items()
        if can_reopen(head, parts[head.id])
        and not any(
            part.row.state is TaskState.ENDING
            or (failed and part.row.outcome in _BAD and not parts[part.id].row.opened)
            for one in members[name]
            if (part := board.find(run.id, one)) is not None
        )
    }


def _list_maps_of_generators(run: RunEntry, keys: Iterable[InstanceKey]) -> set[str]:
    """Return the tasks that are mapped over cleared generators; the elements may not stay the same."""
    plans = [run.plan.tasks[name] for _, name, _ in keys]
    return {name for plan in plans if plan.structure.is_generator for name in plan.feeds}


def _select_failed(
    board: Board, run: RunEntry, entries: Sequence[TaskEntry], reopened: Collection[str]
) -> list[TaskEntry]:
    """Return the tasks that failed; instead of a mapped task, its elements that failed, if there are any.

    A task that is mapped over a generator that failed is returned as a whole, because the generator starts over, unless
    it is among `reopened`.
    """
    failed = [(run.id, entry.task_id, UNMAPPED) for entry in entries if entry.row.outcome in _BAD]
    whole = _list_maps_of_generators(run, failed) - set(reopened)
    found: list[TaskEntry] = []
    for entry in entries:
        if entry.task_id in whole:
            found.append(entry)
            continue
        elements = []
        if entry.row.policy.is_map:
            rows = lock_failed_elements(board.connection, entry.run.id, entry.task_id)
            elements = _select_counted(board, run, board.add_elements(rows))
        if elements:
            found += elements
        elif entry.row.outcome in _BAD and entry.task_id not in reopened:
            found.append(entry)
    return found


def _is_ending(board: Board, entry: TaskEntry) -> bool:
    """Whether an element's map, or its mapped group, is about to end, so that the element could not start again."""
    if entry.map_index == UNMAPPED:
        return False
    names = [name for name in (entry.task_id, entry.plan.mapped_group) if name]
    board.load((entry.run.id, name, UNMAPPED) for name in names)
    heads = [board.find(entry.run.id, name) for name in names]
    return any(head is not None and head.row.state is TaskState.ENDING for head in heads)


def _select_counted(board: Board, run: RunEntry, entries: list[TaskEntry]) -> list[TaskEntry]:
    """Return the elements that belong to their map; after the map started over, it has not reached the others yet."""
    ends = read_ends(board.connection, run)
    return [entry for entry in entries if entry.map_index < ends.get(entry.task_id, 0)]


def _look_at_elements(
    board: Board,
    changed: Iterable[TaskEntry],
    fed: Iterable[InstanceKey] = (),
    reopened: Iterable[TaskEntry] = (),
    rewinds: Mapping[str, int] = MappingProxyType({}),
) -> list[TaskEntry]:
    """Have mapped tasks follow what a user changed; return the mapped tasks.

    Args:
        board: The board.
        changed: Changed tasks; mapped tasks follow the elements among them.
        fed: The mapped tasks whose sources were changed.
        reopened: The heads of maps that follow other maps again.
        rewinds: By looped group, the iteration that runs again.
    """
    again = list(reopened)
    keys = (
        set(fed)
        | {
            (entry.run.id, entry.task_id, UNMAPPED)
            for entry in changed
            if entry.map_index != UNMAPPED and entry.plan.structure.mapped is not None
        }
        | {(entry.run.id, entry.task_id, UNMAPPED) for entry in again}
    )
    if not keys:
        return []
    board.load(keys)
    heads = [head for key in sorted(keys) if (head := board.find(*key)) is not None]
    # Maps are open again before the tasks after them are decided.
    board.park_elements()
    board.flush()
    for run in {head.run.id: head.run for head in heads}.values():
        reopen_loops(board, run, rewinds)
    look_at_maps(board, heads, reopened={entry.id for entry in again})
    return heads


def mark_tasks(connection: Connection, request: MarkTasks, context: CallContext) -> tuple[str, ...]:
    """Set the outcome of tasks; see `MarkTasks`."""
    board, run = _lock_run(connection, request.dag_id, request.run_id, context)
    if _find_parts(run, request) is not None:
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"task {request.task_ids[0]!r} runs its elements in one attempt; mark the whole task, or clear the element",
        )
    keys = _select_keys(run, request)
    chosen = choose_in_groups(board, run, request, keys, {name for _, name, _ in keys})
    _check_parts(run, request, chosen.parts)
    entries = _load_entries(board, run, chosen.keys, request) + chosen.parts
    outcome = TaskOutcome(request.state)
    triggerers = board.find_triggerers(entries)
    marked = [
        entry
        for entry in entries
        if isinstance(board.give(entry, Mark(outcome, triggerer=triggerers.get(entry.id)), request.by), Moved)
    ]
    reopened = forget_failures(board, run, marked, request.by) if outcome is TaskOutcome.SUCCESS else []
    if reopened:
        _continue_run(run, context)
    sources = [entry for entry in marked if entry.row.outcome is TaskOutcome.SUCCESS and entry.map_index == UNMAPPED]
    fed = {(run.id, name, UNMAPPED) for one in sources for name in one.plan.feeds}
    cleared = []
    if outcome is TaskOutcome.SUCCESS:
        cleared = [one for one in find_inner_followers(board, marked) if board.give(one, Clear(), request.by)]
        if cleared:
            _continue_run(run, context)
    heads = _look_at_elements(board, marked + cleared, fed, reopened, find_regated(run, cleared))
    if outcome is TaskOutcome.SUCCESS:
        followed = [head for head in heads if head.row.outcome is TaskOutcome.SUCCESS]
        parts = [head for head in heads if head.plan.structure.mapped_group]
        _clear_followers(board, run, marked + followed + parts, request.by, context)
    ended = run.state in ("success", "failed")
    close_board(board)
    if marked and ended and run.state in ("success", "failed"):
        run.reason = None
        end_run(board, run)
        board.flush()
    return tuple(entry.name for entry in marked)


def _clear_followers(board: Board, run: RunEntry, marked: list[TaskEntry], by: str, context: CallContext) -> None:
    """Clear the tasks that failed only because of upstream tasks that now count as successes."""
    names = run.plan.list_downstream(entry.task_id for entry in marked if entry.map_index == UNMAPPED)
    board.load((run.id, name, UNMAPPED) for name in names)
    followers = [entry for name in names if (entry := board.find(run.id, name)) is not None]
    failed = [entry for entry in followers if entry.row.outcome is TaskOutcome.UPSTREAM_FAILED]
    found = read_maps(board.connection, [entry.id for entry in failed if entry.row.policy.is_map], locks=False)
    ends = read_ends(board.connection, run)
    reopened = []
    for entry in failed:
        stored = found.get(entry.id)
        if entry.plan.mapped_group and any(other.is_part for other in marked):
            continue  # its tasks that failed with marked ones are cleared
        if entry.plan.structure.follows is not None and ends[entry.task_id]:
            # Its elements that failed with marked ones are removed; it may have failed with the whole map alone.
            reopened.append(entry)
        elif stored is not None and stored.row.arrived:
            continue  # its elements have run; only its source failed, or a user marked elements
        else:
            board.give(entry, Clear(), by)
        _continue_run(run, context)
    if reopened:
        _look_at_elements(board, (), reopened=reopened)


def _continue_run(run: RunEntry, context: CallContext) -> None:
    """Queue a run that has ended, or was cancelled before it started: a task of it is to run again."""
    is_cancelled = run.state == "queued" and run.reason is not None and run.stop is None
    if is_cancelled or run.state in ("success", "failed"):
        queue_run(run, context)


def _lock_run(connection: Connection, dag_id: str, run_id: str, context: CallContext) -> tuple[Board, RunEntry]:
    number = find_run(connection, dag_id, run_id)
    board = Board(connection, context)
    board.lock((), [number])
    return board, board.runs[number]


def _load_entries(
    board: Board, run: RunEntry, keys: list[InstanceKey], request: ClearTasks | MarkTasks
) -> list[TaskEntry]:
    """Lock task instances and return them in the order of their keys.

    Raises:
        CallRefusedError: An element does not exist.
    """
    board.load(keys)
    entries = []
    if request.indexes is not None:
        for _, name, _ in [key for key in keys if key[1] in _list_names(request)]:
            rows = lock_elements(board.connection, run.id, name, *request.indexes)
            entries += _select_counted(board, run, board.add_elements(rows))
        keys = [key for key in keys if key[1] not in _list_names(request)]
    for _, name, index in keys:
        entry = board.find(run.id, name, index)
        if entry is not None and (index == UNMAPPED or _select_counted(board, run, [entry])):
            entries.append(entry)
        elif index != UNMAPPED:
            raise refuse_instance(request.dag_id, request.run_id, name, index)
    return entries


def _list_names(request: ClearTasks | MarkTasks) -> frozenset[str]:
    return frozenset(request.task_ids)


def _select_keys(run: RunEntry, request: ClearTasks | MarkTasks) -> list[InstanceKey]:
    if (request.map_index != UNMAPPED or request.indexes is not None) and not request.task_ids:
        raise CallRefusedError(RefusalKind.INVALID, "name the tasks whose elements the map index selects")
    return [(run.id, name, request.map_index) for name in _select_names(run, request.task_ids)]


def _select_names(run: RunEntry, names: Iterable[str]) -> list[str]:
    wanted = list(names) or list(run.plan.tasks)
    unknown = [name for name in wanted if name not in run.plan.tasks]
    if unknown:
        raise CallRefusedError(
            RefusalKind.UNKNOWN,
            f"DAG {run.plan.structure.id!r} has no task {unknown[0]!r}; it has: {', '.join(list(run.plan.tasks)[:20])}",
        )
    return sorted(set(wanted))
