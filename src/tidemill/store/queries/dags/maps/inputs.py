"""Finds what a map has to be fed: its items, the end of its source, and what has ended in the map that it follows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, and_, bindparam, func, literal_column, select, text

from tidemill.core.tasks.dependencies import TaskOutcome
from tidemill.core.tasks.expansion import (
    Arrived,
    ElementsMoved,
    Look,
    MapInput,
    MapStopReason,
    Opened,
    Reopened,
    SourceEnded,
    SourceMarked,
    Stopped,
    count_room,
    feed,
)
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.dag_tables import IS_BAD_ELEMENT, task_instance
from tidemill.store.queries.dags.items.chunks import cut_items
from tidemill.store.queries.dags.items.sources import look_at_sources, open_sources
from tidemill.store.queries.dags.items.stored_sources import StoredSources, read_sources, write_sources
from tidemill.store.queries.dags.maps.creation import READINESS, end_elements
from tidemill.store.queries.dags.maps.follow import Following
from tidemill.store.queries.dags.maps.policy import get_policy, may_start
from tidemill.store.queries.dags.maps.preparation import MapWork
from tidemill.store.queries.dags.maps.reopening import begin_again, find_marked_again, look_again
from tidemill.store.queries.dags.state.map_queue import count_queue, remove_queued
from tidemill.store.queries.dags.state.map_rows import StoredMap
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.statements import Statement

_TASK = task_instance.c
#: The sources of a map that follows another one; its items are the XComs of the elements with its indexes.
_FOLLOWS = StoredSources((), (), ())
_REASONS = {TaskState.MAPPED: MapStopReason.CANCELLED, TaskState.NONE: MapStopReason.CLEARED}


def find_inputs(
    connection: Connection, work: MapWork, stored: StoredMap, now_us: int
) -> tuple[StoredMap, tuple[MapInput, ...]]:
    """Return what the map has to be fed, and the map with its sources if it opens."""
    head = work.head
    if head.row.ending is not None:
        reason = _REASONS.get(head.row.ending.state, MapStopReason.MARKED)
        if stored.row.stop is not None:
            return stored, (Look(),)
        return _count_rest(connection, head, stored), (Stopped(reason),)
    if work.reopens:
        return begin_again(stored, count_failed(connection, head, stored.row.created))
    if stored.row.compared is not None and not stored.row.closed:
        return look_again(connection, head, stored, now_us)
    if head.row.state is TaskState.MAPPED and not stored.row.opened:
        opened = open_sources(connection, head, now_us)
        if opened is None:
            return stored, ()
        stored, arrived = _cut(connection, stored, head, opened.sources, opened.arrived, opened.outcome, now_us)
        return stored._replace(error=opened.error or None), (Opened(arrived), *_end_source(opened.outcome))
    if head.row.state is TaskState.MAPPED and not stored.row.closed:
        sources = read_sources(stored.sources)
        total, outcome = look_at_sources(connection, head, sources, stored.row.created)
        stored, arrived = _cut(connection, stored, head, sources, total, outcome, now_us)
        return stored, (Arrived(arrived), *_end_source(outcome))
    if not stored.row.opened:
        return stored, ()
    return _find_marked_source(connection, head, stored, now_us) or (stored, (Look(),))


def _cut(
    connection: Connection,
    stored: StoredMap,
    head: TaskEntry,
    sources: StoredSources,
    total: int,
    outcome: TaskOutcome | None,
    now_us: int,
) -> tuple[StoredMap, int]:
    """Return a map with its sources, and for how many elements they have items."""
    mapped = head.plan.structure.mapped
    assert mapped is not None
    begins = not stored.row.opened
    found = cut_items(
        connection, head.id, mapped, sources, total, closed=outcome is not None, begins=begins, now_us=now_us
    )
    if begins or found.sources != sources:
        stored = stored._replace(sources=write_sources(found.sources))
    # An attempt that runs all elements begins with the first one.
    arrived = min(found.chunks, 1) if mapped.iterated else found.chunks
    return stored._replace(due_us=found.due_us), arrived


def _find_marked_source(
    connection: Connection, head: TaskEntry, stored: StoredMap, now_us: int
) -> tuple[StoredMap, tuple[MapInput, ...]] | None:
    """Return what a map has to be fed whose generator failed after it had yielded, and was marked as a success since.

    A map whose head a user marked is left alone.
    """
    row = stored.row
    if not (row.closed and row.arrived and row.upstream_failed) or head.row.tells != row.told:
        return None
    elements, sources = count_failed(connection, head, row.created), read_sources(stored.sources)
    if elements >= row.upstream_failed:
        return None
    if sources.stale:
        return find_marked_again(connection, head, stored, now_us, elements)
    _, outcome = look_at_sources(connection, head, sources)
    return (stored, (SourceMarked(elements),)) if outcome is TaskOutcome.SUCCESS else None


def count_failed(connection: Connection, head: TaskEntry, end: int) -> int:
    """Return how many elements of a map below `end` failed with their upstream."""
    given = {"of_run": head.run.id, "of_task": head.task_id, "end": end}
    return int(_upstream_failed.fetch(connection, given)[0][0])


@Statement
def _upstream_failed(dialect: str) -> Select[Any]:
    mine = and_(_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task"), text(IS_BAD_ELEMENT))
    failed = and_(_TASK.state == literal_column("'upstream_failed'"), _TASK.map_index < bindparam("end"))
    return select(func.count()).select_from(task_instance).where(and_(mine, failed))


def _end_source(outcome: TaskOutcome | None) -> tuple[SourceEnded, ...]:
    return () if outcome is None else (SourceEnded(outcome),)


def find_followed_inputs(board: Board, work: MapWork, stored: StoredMap) -> tuple[StoredMap, tuple[MapInput, ...]]:
    """Take over what has ended in the map that is followed, and return what the follower has to be fed."""
    following, sources = work.following, read_sources(stored.sources)
    if work.removed_to is not None:
        stored = stored._replace(made=work.removed_to)
    inputs: list[MapInput] = []
    if work.reopens:
        inputs.append(Reopened(sources.failed, sources.never))
    elif following is not None and not stored.row.opened:
        inputs.append(Opened())
    if inputs:
        stored = stored._replace(sources=write_sources(_FOLLOWS), error=None, swept=False)
    if following is None:
        return stored, (*inputs, Look()) if stored.row.opened else ()
    policy = get_policy(work.head, stored.limits)
    if feed(stored.row, inputs[0] if inputs else Look(), policy, starts=False).stops:
        return _count_rest(board.connection, work.head, stored), (*inputs, Look())
    room = count_room(stored.row, policy) if may_start(work.head) else 0
    moved = _take_over(board, work, following, room)
    inputs += [ElementsMoved(TaskState.REMOVED, state, number) for state, number in moved.items()]
    source = board.find(work.head.run.id, following.source)
    is_changing = source is not None and source.row.outcome is not following.outcome
    if following.outcome is None or is_changing or following.left or len(following.found) >= following.asked:
        return stored, (*inputs, Look())
    # An element that failed with the one that it follows says already that the other map failed.
    says = stored.row.upstream_failed - sources.failed + moved[TaskState.UPSTREAM_FAILED]
    failed = following.failed and not says
    stored = stored._replace(sources=write_sources(StoredSources((), (), (), failed)))
    return stored, (*inputs, SourceEnded(TaskOutcome.UPSTREAM_FAILED if failed else TaskOutcome.SUCCESS))


def _count_rest(connection: Connection, head: TaskEntry, stored: StoredMap) -> StoredMap:
    """Return a map that is about to be stopped with the elements that have not appeared yet; none of them will."""
    source, mapped = head.plan.structure.follows, head.plan.structure.mapped
    if source is None or mapped is None or stored.sources is None:
        return stored
    never = count_queue(connection, head.id, head.run.id, source, mapped.factors[0].key)
    sources = msgspec.structs.replace(read_sources(stored.sources), never=never)
    return stored._replace(row=stored.row._replace(arrived=stored.row.created + never), sources=write_sources(sources))


def _take_over(board: Board, work: MapWork, following: Following, room: int) -> Counter[TaskState]:
    """Choose the elements to start, create those that end at once, and return how many appear, by state."""
    head = work.head
    taken: list[int] = []
    ended: dict[TaskState, list[int]] = {state: [] for state in READINESS}
    for index, state in sorted(following.states.items()):
        entry = board.find(head.run.id, head.task_id, index)
        if state is None or state is TaskState.REMOVED:
            pass  # it is to be run again, or has no result
        elif entry is not None and entry.row.ending is not None and entry.row.ending.state is TaskState.REMOVED:
            continue  # until it has ended
        elif entry is not None and entry.row.state is not TaskState.REMOVED:
            pass  # only the other element ran again
        elif state in ended:
            ended[state].append(index)
        elif room > 0:
            following.fresh.append(index)
            room -= 1
        else:
            continue
        taken.append(index)
    for state, indexes in ended.items():
        end_elements(board, head, state, indexes)
    remove_queued(board.connection, head.id, taken)
    following.left = len(taken) < len(following.found)
    # What needs no room in the window left it to others.
    work.left = work.left or (bool(taken) and room > 0 and len(following.found) >= following.asked)
    return Counter({TaskState.NONE: len(following.fresh), **{state: len(each) for state, each in ended.items()}})
