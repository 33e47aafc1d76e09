"""Expands mapped tasks: opens maps, creates their elements, and tells their successors what the elements have become.

Theory of operation: whatever happens to a map marks its row (`pending`): its rule lets it run, a source ended or
yielded, elements changed their counts, a user cleared or marked it. A step locks the run and the head, then the
elements that get inputs, and the map last; `core.tasks.expansion` decides over its counts.

Invariants: all of `made` and `created` changes only while the head is locked. The reports of elements lock neither the
run nor the head, so no element row is locked after a map.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, and_, bindparam, func, literal_column, select

from tidemill.core.tasks.dependencies import TaskOutcome, Told, TriggerRule
from tidemill.core.tasks.expansion import (
    Compared,
    Expansion,
    Look,
    MapInput,
    MapPolicy,
    MapRow,
    MapStopReason,
    Shortened,
    SourceAgain,
    SourceEnded,
    SourceMarked,
    count_existing,
    feed,
    find_count,
)
from tidemill.core.tasks.inputs import Channel, Clear, MapTold, Remove
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.task_row import TaskState
from tidemill.core.wording import format_count
from tidemill.store.calls.service_calls import MapLimits
from tidemill.store.dag_tables import task_instance
from tidemill.store.queries.dags.items.elements import find_differing
from tidemill.store.queries.dags.items.stored_sources import read_sources
from tidemill.store.queries.dags.maps.creation import start_elements
from tidemill.store.queries.dags.maps.follow import find_unseen, lock_passed
from tidemill.store.queries.dags.maps.groups import (
    GroupWork,
    clear_units,
    end_parts,
    follow_units,
    follows,
    gather_groups,
    start_units,
    write_parts,
)
from tidemill.store.queries.dags.maps.inputs import count_failed, find_followed_inputs, find_inputs
from tidemill.store.queries.dags.maps.policy import get_policy, may_start
from tidemill.store.queries.dags.maps.preparation import MapWork, find_end, has_failed_again, prepare
from tidemill.store.queries.dags.state.map_rows import DEFAULT_LIMITS, StoredMap, read_maps, write_map
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.statements import Statement

_TASK = task_instance.c
_BY = "scheduler"
#: The rules by which a task may run before its upstream is done.
_EARLY = frozenset({TriggerRule.ONE_SUCCESS, TriggerRule.ONE_FAILED, TriggerRule.ONE_DONE, TriggerRule.ALWAYS})


def look_at_maps(
    board: Board, heads: Sequence[TaskEntry], limits: MapLimits = DEFAULT_LIMITS, reopened: Collection[int] = ()
) -> None:
    """Do what follows from the state of maps.

    Args:
        board: A board that has locked the runs and the heads, and whose changes are flushed.
        heads: The heads.
        limits: The limits of maps that have not opened; they keep those with which they open.
        reopened: The heads of maps that follow another one again, or of which a source was cleared.
    """
    if not heads:
        return
    connection = board.connection
    heads = gather_groups(board, heads)
    before = _read_maps(connection, heads, limits, locks=False)
    # A map that follows another one sees what that one tells.
    works = [
        prepare(board, head, before[head.id], head.id in reopened)
        for head in sorted(heads, key=_count_followed)
        if head.id in before
    ]
    for work in works:
        if work.following is not None:
            lock_passed(board, work.head, work.following)
    parts = [part for work in works if work.group is not None for part in work.group.parts.values()]
    # A worker that holds a task which runs before its upstream is done may be about to wait for the map.
    board.load((head.run.id, name, UNMAPPED) for head in (*heads, *parts) for name in _list_early(head))
    stored = _read_maps(connection, [*[work.head for work in works], *parts], limits, locks=True)
    for work in works:
        if work.following is not None and (unseen := find_unseen(board, work.head, work.following)):
            work.following.found += unseen
            work.left = True
    for work in works:
        _step(board, work, stored)


def _list_early(head: TaskEntry) -> list[str]:
    """Return the tasks that the map tells, and that may run before it is done."""
    tasks = head.run.plan.tasks
    return [name for name, _ in head.successors if tasks[name].rule in _EARLY]


def _read_maps(
    connection: Connection, heads: Sequence[TaskEntry], limits: MapLimits, *, locks: bool
) -> dict[int, StoredMap]:
    stored = read_maps(connection, [head.id for head in heads], locks=locks)
    return {task: one if one.row.opened else one._replace(limits=limits) for task, one in stored.items()}


def _count_followed(head: TaskEntry) -> int:
    """Return how many maps follow one another up to this one."""
    number, source = 0, head.plan.structure.follows
    while source is not None:
        number, source = number + 1, head.run.plan.tasks[source].structure.follows
    return number


def _has_to_remove(work: MapWork, stored: StoredMap) -> bool:
    """Whether a further step has to remove elements of a closed map that have no item any more."""
    if not stored.row.closed or stored.made <= find_end(stored) or has_failed_again(stored):
        return False
    return work.empty_from is None or work.empty_from > find_end(stored)


def _step(board: Board, work: MapWork, maps: Mapping[int, StoredMap]) -> None:
    head = work.head
    stored = maps[head.id]
    before = stored.row
    if work.group is not None:
        end_parts(board, work.group, before)
        # Units follow their tasks after the step; the next one sees whether they are all removed.
        work.left = work.left or bool(work.group.gone)
    if work.orders is not None:
        order, entries = work.orders
        triggerers = board.find_triggerers(entries)
        for entry in entries:
            board.give(entry, dataclasses.replace(order, triggerer=triggerers.get(entry.id)), _BY)
    triggerers = board.find_triggerers(work.gone)
    for entry in work.gone:
        board.give(entry, Remove(triggerer=triggerers.get(entry.id)), _BY)
        if entry.map_index < before.created:
            work.left = True
        else:
            entry.counted = find_count(entry.row.state)  # the map does not count it
    differs, news = _compare(board, work, stored)
    # The counts that these elements change are added to the map when they are written; then the map is marked again.
    if work.group is not None and not stored.row.opened and head.row.ending is None and not work.group.is_decided:
        inputs: tuple[MapInput, ...] = ()
    elif head.plan.structure.follows is None or head.row.ending is not None:
        stored, inputs = find_inputs(board.connection, work, stored, board.context.now_us)
        # What was cleared is counted after the step: until then the map must not seem to be done.
        inputs = (*news, *(one for one in inputs if not (differs and isinstance(one, SourceEnded))))
    else:
        stored, inputs = find_followed_inputs(board, work, stored)
    policy, left, stops = get_policy(head, stored.limits), work.left, False
    expansion = Expansion(stored.row)
    for given in inputs:
        starts = given is inputs[-1] and may_start(head) and not (work.sweeps and work.left)
        expansion = feed(stored.row, given, policy, starts)
        stored = stored._replace(row=expansion.row)
        stops = stops or expansion.stops
    counts: dict[str, Counter[str]] = {}
    kept = 0
    if work.group is not None:
        stored, missing, counts = start_units(board, work.group, stored, expansion)
    else:
        stored, missing, kept = start_elements(board, work, stored, expansion)
    if kept:
        expansion = feed(stored.row, Look(), policy, starts=False)
        stored, stops = stored._replace(row=expansion.row), stops or expansion.stops
    if head.plan.structure.follows is not None and stored.row.opened:
        stored = stored._replace(row=count_existing(stored.row, failed=read_sources(stored.sources).failed))
    if stops:
        stored = stored._replace(error=_describe_stop(stored, policy))
    removes = _has_to_remove(work, stored)
    # What follows may read the results of all elements: the map ends once those of its former life are gone.
    holds = removes
    if work.group is not None:
        holds = _step_parts(board, work.group, stored, maps, counts, inputs, holds=removes)
    if holds and stored.row.done:
        stored = stored._replace(row=stored.row._replace(told=before.told))
    # Once the sources are known, and after each part, more elements may be compared.
    left = left or missing > 0 or kept > 0 or stops or removes or bool(work.comparing)
    left = left or (stored.row.compared is not None and stored.sources != maps[head.id].sources)
    swept = stored.swept or (work.sweeps and not work.left)
    # A map that has closed, whatever stopped it, cuts no further chunk.
    due_us = None if stored.row.closed else stored.due_us
    write_map(board.connection, stored._replace(pending=int(left), swept=swept, due_us=due_us))
    if left:
        board.context.left = True
        board.context.bells.add(Channel.SCHEDULER)
    if not (holds and stored.row.done):
        _tell(board, head, stored, changed=stored.row.told != before.told)


def _compare(board: Board, work: MapWork, stored: StoredMap) -> tuple[bool, tuple[MapInput, ...]]:
    """Clear the elements whose items differ from those that a source gives again.

    Returns:
        Whether there are any, and what the map is fed.
    """
    mapped = work.head.plan.structure.mapped
    news: tuple[MapInput, ...] = (Shortened(),) if work.is_short else ()
    if not work.comparing or mapped is None:
        return False, news
    sources = read_sources(stored.sources)
    if work.group is not None:
        differs = clear_units(board, work.group, mapped, sources, _BY)
    else:
        elements = {entry.map_index: [entry] for entry in work.compared}
        wanted = find_differing(board.connection, mapped, sources, elements)
        entries = [entry for entry in work.compared if entry.map_index in wanted]
        triggerers = board.find_triggerers(entries)
        for entry in entries:
            board.give(entry, Clear(triggerer=triggerers.get(entry.id)), _BY)
        differs = bool(entries)
    return differs, news if differs else (Compared(work.comparing.stop), *news)


def _step_parts(
    board: Board,
    group: GroupWork,
    stored: StoredMap,
    maps: Mapping[int, StoredMap],
    counts: Mapping[str, Counter[str]],
    inputs: Sequence[MapInput],
    *,
    holds: bool,
) -> bool:
    """Have the maps of the tasks of a group follow it; return whether the group and its tasks may not end yet."""
    outcome = next((given.outcome for given in inputs if isinstance(given, SourceEnded)), None)
    again: dict[str, int] = {}
    if any(isinstance(given, SourceAgain) for given in inputs):
        again = {name: count_failed(board.connection, part, stored.row.created) for name, part in group.parts.items()}
    marked: dict[str, int] = {}
    if any(isinstance(given, SourceMarked) for given in inputs):
        marked = {name: count_failed(board.connection, part, stored.row.created) for name, part in group.parts.items()}
    before = {part.id: maps[part.id] for part in group.parts.values()}
    recounted = _recount(board.connection, group, maps)
    if recounted and stored.row.upstream_failed > count_failed(board.connection, group.head, stored.row.created):
        outcome = TaskOutcome.UPSTREAM_FAILED  # of a source; the maps that are open count it already
    after = follow_units(group, stored, before, counts, outcome, marked, recounted, again)
    if group.head.row.ending is not None and group.head.row.ending.state is TaskState.NONE:
        # The group and its tasks start over together.
        endings = [after[part.id].row for part in group.parts.values() if part.row.state is TaskState.ENDING]
        holds = holds or not all(row.done for row in (stored.row, *endings) if row.opened)
    for part in group.parts.values():
        told, row = before[part.id].row.told, after[part.id].row
        if holds and row.done:
            after[part.id] = after[part.id]._replace(row=row._replace(told=told))
        elif part.row.state is TaskState.ENDING and not row.opened:
            # A user decided it before the group began.
            board.give(part, MapTold(part.row.epoch, Told(done=True)), _BY)
        else:
            _tell(board, part, after[part.id], changed=row.told != told)
    write_parts(board.connection, before, after)
    return holds


def _recount(connection: Connection, group: GroupWork, maps: Mapping[int, StoredMap]) -> dict[str, dict[str, int]]:
    """Count the elements of tasks whose maps follow a group again that has units; see `follow_units`."""
    end = maps[group.head.id].row.created
    found: dict[str, dict[str, int]] = {}
    for name, part in group.parts.items():
        if end and not maps[part.id].row.opened and follows(group, part, maps[part.id].row):
            given = {"of_run": part.run.id, "of_task": name, "end": end}
            counts = Counter[str]()
            for state, number in _states.fetch(connection, given):
                count = find_count(TaskState(state))
                if count is not None:
                    counts[count] += number
            found[name] = counts
    return found


@Statement
def _states(dialect: str) -> Select[Any]:
    mine = and_(_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task"))
    elements = and_(mine, _TASK.map_index >= literal_column("0"), _TASK.map_index < bindparam("end"))
    return select(_TASK.state, func.count()).where(elements).group_by(_TASK.state)


def _describe_stop(stored: StoredMap, policy: MapPolicy) -> str:
    if stored.row.stop == MapStopReason.TOO_LONG:
        return (
            f"MapError: the map has {stored.row.arrived:,} elements, and at most {policy.max_length:,} are allowed; "
            "map over parts of the values"
        )
    failed = format_count(stored.row.failed, "element")
    return f"MapError: {failed} failed, and max_failed_elements is {policy.max_failed}"


def _tell(board: Board, head: TaskEntry, stored: StoredMap, *, changed: bool) -> None:
    """Feed to the head what its elements have become."""
    row = stored.row
    if head.row.state is TaskState.ENDING:
        news = row.done
    else:
        news = row.opened and (changed or (head.row.state is TaskState.MAPPED and row.done))
    if not news:
        return
    board.give(head, MapTold(head.row.epoch, row.told), _BY)
    if head.row.outcome in (TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED):
        head.error = stored.error or (_describe_failed(board.connection, head, row) if row.failed else None)


def _describe_failed(connection: Connection, head: TaskEntry, row: MapRow) -> str:
    if head.plan.iterated:
        # The map has one element: the attempt, which says how many of the elements failed.
        for (error,) in _attempt_error.fetch(connection, {"of_run": head.run.id, "of_task": head.task_id}):
            if error:
                return str(error)
    return f"{row.failed:,} of {row.arrived:,} elements failed"


@Statement
def _attempt_error(dialect: str) -> Select[Any]:
    mine = and_(_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task"))
    return select(_TASK.error).where(and_(mine, _TASK.map_index == literal_column("0")))
