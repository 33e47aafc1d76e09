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
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import (
    Connection,
    Executable,
    Select,
    and_,
    bindparam,
    func,
    insert,
    literal,
    literal_column,
    select,
    text,
    true,
    update,
)

from tidemill.core.tasks.attempt import order_elements
from tidemill.core.tasks.dependencies import Readiness, TaskOutcome, Told
from tidemill.core.tasks.expansion import (
    Arrived,
    ElementsMoved,
    Expansion,
    Look,
    MapInput,
    MapPolicy,
    MapStopReason,
    Opened,
    Reopened,
    SourceEnded,
    SourceMarked,
    Stopped,
    count_existing,
    count_room,
    feed,
    find_count,
)
from tidemill.core.tasks.inputs import Cancel, Channel, Clear, MapTold, Mark, Ready, Remove
from tidemill.core.tasks.task_row import TaskState
from tidemill.core.wording import format_count
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.service_calls import MapLimits
from tidemill.store.dag_tables import IS_BAD_ELEMENT, task_instance
from tidemill.store.queries.dags.items.chunks import cut_items, find_ranges
from tidemill.store.queries.dags.items.items import find_changes
from tidemill.store.queries.dags.items.sources import locate_leaves, look_at_sources, open_sources
from tidemill.store.queries.dags.items.stored_sources import StoredSources, read_sources, write_sources
from tidemill.store.queries.dags.maps.follow import Following, find_passed, find_unseen, lock_passed
from tidemill.store.queries.dags.maps.groups import (
    UNITS,
    GroupWork,
    end_parts,
    find_parts,
    follow_units,
    follows,
    gather_groups,
    prepare_units,
    start_units,
    write_parts,
)
from tidemill.store.queries.dags.maps.locks import fetch_elements
from tidemill.store.queries.dags.maps.policy import get_policy, may_start
from tidemill.store.queries.dags.state.map_queue import count_queue, remove_queued
from tidemill.store.queries.dags.state.map_rows import DEFAULT_LIMITS, StoredMap, read_maps, write_map
from tidemill.store.queries.dags.state.task_rows import TaskEntry, compute_rank
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.statements import Statement

#: The most elements of a map that one step changes, besides new ones.
ELEMENTS = 500
_TASK = task_instance.c

_BY = "scheduler"
_INDEXES = RowSet("new_elements", map_index=int)
_LABELS = RowSet("chunk_labels", run=int, task_id=str, map_index=int, label=str)
#: The decisions of a follower over an element that it does not run.
_READINESS = {TaskState.SKIPPED: Readiness.SKIP, TaskState.UPSTREAM_FAILED: Readiness.FAIL}
#: The sources of a map that follows another one; its items are the XComs of the elements with its indexes.
_FOLLOWS = StoredSources((), (), ())
_REASONS = {TaskState.MAPPED: MapStopReason.CANCELLED, TaskState.NONE: MapStopReason.CLEARED}
#: The values of a new element.
_CONSTANT = {
    "epoch": 1,
    "tries": 0,
    "tries_before": 0,
    "lost": 0,
    "tallies": "",
    "pending": 0,
    "skip_votes": 0,
}


@dataclass(slots=True)
class _Work:
    """A map that a step looks at, and the elements that it locked for that.

    Attributes:
        head: The head of the map.
        orders: The input for elements that have to end, and those elements.
        waiting: Cleared elements that wait, by index.
        known: Existing rows of elements that the map is about to create, by index.
        gone: Rows of elements that have no item any more.
        empty_from: The index from which on no element is left after this step; None: the step does not know one.
        left: Whether more elements have to end than one step changes.
        sweeps: Whether the map has stopped itself, and this step cancels elements that have not started.
        following: What a map takes over from the one that it follows; None: nothing.
        reopens: Whether a map that follows another one follows it again.
        group: The units, if the map is a mapped group; then the fields above have no elements.
        removed_to: The index up to which a map that follows another one has removed the elements of its former life;
            0: all of them.
    """

    head: TaskEntry
    orders: tuple[Cancel | Mark | Remove, list[TaskEntry]] | None = None
    waiting: list[TaskEntry] = field(default_factory=list)
    known: dict[int, TaskEntry] = field(default_factory=dict)
    gone: list[TaskEntry] = field(default_factory=list)
    empty_from: int | None = None
    left: bool = False
    sweeps: bool = False
    following: Following | None = None
    reopens: bool = False
    group: GroupWork | None = None
    removed_to: int | None = None


def look_at_maps(
    board: Board, heads: Sequence[TaskEntry], limits: MapLimits = DEFAULT_LIMITS, reopened: Collection[int] = ()
) -> None:
    """Do what follows from the state of maps.

    Args:
        board: A board that has locked the runs and the heads, and whose changes are flushed.
        heads: The heads.
        limits: The limits of maps that have not opened; they keep those with which they open.
        reopened: The heads of maps that follow another one, and follow it again.
    """
    if not heads:
        return
    connection = board.connection
    heads = gather_groups(board, heads)
    before = _read_maps(connection, heads, limits, locks=False)
    # A map that follows another one sees what that one tells.
    works = [
        _prepare(board, head, before[head.id], head.id in reopened)
        for head in sorted(heads, key=_count_followed)
        if head.id in before
    ]
    for work in works:
        if work.following is not None:
            lock_passed(board, work.head, work.following)
    parts = [part for work in works if work.group is not None for part in work.group.parts.values()]
    stored = _read_maps(connection, [*[work.head for work in works], *parts], limits, locks=True)
    for work in works:
        if work.following is not None and (unseen := find_unseen(board, work.head, work.following)):
            work.following.found += unseen
            work.left = True
    for work in works:
        _step(board, work, stored)


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


def _prepare(board: Board, head: TaskEntry, stored: StoredMap, reopens: bool) -> _Work:
    """Lock the elements that may get an input; a map is locked after them."""
    work, row = _Work(head, reopens=reopens and stored.sources is not None), stored.row
    if head.plan.structure.is_group:
        return _prepare_group(board, work, stored)
    ordered = order_elements(head.row)
    if ordered is not None:
        wanted = "removed" if isinstance(ordered, Remove) else head.row.ending.state.value  # type: ignore[union-attr]
        _order(board, work, ordered, wanted)
    elif _has_to_sweep(stored) and not work.reopens:
        rows = fetch_elements(board, head, "unstarted", 0, None, ELEMENTS)
        work.orders = Cancel(request=row.stop or ""), board.add_elements(rows)
        work.left = len(rows) >= ELEMENTS
        work.sweeps = True
    policy = get_policy(head, stored.limits)
    if row.waiting and may_start(head):
        work.waiting = board.add_elements(fetch_elements(board, head, "waiting", 0, None, policy.max_outstanding))
    follows = head.plan.structure.follows is not None
    if row.created < stored.made and row.stop is None and not follows:
        last = min(row.created + policy.max_outstanding, stored.made) - 1
        entries = board.add_elements(fetch_elements(board, head, "any", row.created, last, policy.max_outstanding))
        work.known = {entry.map_index: entry for entry in entries}
    if row.closed and row.opened and stored.made > _find_end(stored) and not _has_failed_again(stored):
        rows = fetch_elements(board, head, "present", _find_end(stored), stored.made - 1, ELEMENTS)
        work.gone = board.add_elements(rows)
        if len(rows) < ELEMENTS:
            work.empty_from = _find_end(stored)
    if head.row.outcome is not None and not row.opened and not stored.keeps:
        # It ended without elements; those of its former life have no part in it.
        rows = fetch_elements(board, head, "present", 0, None, ELEMENTS)
        work.gone = board.add_elements(rows)
        work.left = len(rows) >= ELEMENTS
    elif follows and head.row.ending is None:
        _prepare_follower(board, work, stored)
    return work


def _prepare_group(board: Board, work: _Work, stored: StoredMap) -> _Work:
    row, head = stored.row, work.head
    group = work.group = GroupWork(head, find_parts(board, head))
    end = _find_end(stored) if row.closed and row.opened else None
    work.sweeps = head.row.ending is None and _has_to_sweep(stored)
    window = get_policy(head, stored.limits).max_outstanding if may_start(head) else 0
    work.left = prepare_units(board, group, stored, window=window, end=end, sweeps=work.sweeps)
    if end is not None and len(group.gone) < UNITS:
        work.empty_from = end
    return work


def _has_to_sweep(stored: StoredMap) -> bool:
    """Whether a map that stopped itself has to cancel elements that have not started.

    That happens once: elements that a user clears afterwards run again.
    """
    return stored.row.stop in (MapStopReason.FAILED_ELEMENTS, MapStopReason.TOO_LONG) and not stored.swept


def _prepare_follower(board: Board, work: _Work, stored: StoredMap) -> None:
    """Lock the elements that a map may take over from the one that it follows."""
    head, row = work.head, stored.row
    if row.opened and (row.closed or row.stop is not None) and not work.reopens:
        return
    if not row.opened:
        if head.row.state is not TaskState.MAPPED:
            return
        # Elements of the time before the map started over would be counted; it opens without any. Meanwhile `made` is
        # the index up to which they are removed.
        rows = fetch_elements(board, head, "present", stored.made, None, ELEMENTS)
        work.gone = board.add_elements(rows)
        work.left = len(rows) >= ELEMENTS
        work.removed_to = work.gone[-1].map_index + 1 if work.left else 0
        if work.left:
            return
    room = min(count_room(row, get_policy(head, stored.limits)), ELEMENTS) if may_start(head) else 0
    work.following = find_passed(board, head, room, opens=not row.opened)


def _find_end(stored: StoredMap) -> int:
    """Return the index from which on a closed map has no elements."""
    return stored.row.arrived if stored.row.stop is None else stored.row.created


def _has_failed_again(stored: StoredMap) -> bool:
    """Whether the source of a map failed after it was cleared; the results beyond its last item wait for the next."""
    return stored.keeps and stored.row.upstream_failed > 0


def _has_to_remove(work: _Work, stored: StoredMap) -> bool:
    """Whether a further step has to remove elements of a closed map that have no item any more."""
    if not stored.row.closed or stored.made <= _find_end(stored) or _has_failed_again(stored):
        return False
    return work.empty_from is None or work.empty_from > _find_end(stored)


def _order(board: Board, work: _Work, ordered: Mark | Remove, wanted: str) -> None:
    rows = fetch_elements(board, work.head, "open", 0, None, ELEMENTS, wanted)
    work.orders = ordered, board.add_elements(rows)
    work.left = len(rows) >= ELEMENTS


def _step(board: Board, work: _Work, maps: Mapping[int, StoredMap]) -> None:
    head = work.head
    stored = maps[head.id]
    before = stored.row
    if work.group is not None:
        end_parts(board, work.group, before.stop or "")
    if work.orders is not None:
        order, entries = work.orders
        triggerers = board.find_triggerers(entries)
        for entry in entries:
            board.give(entry, dataclasses.replace(order, triggerer=triggerers.get(entry.id)), _BY)
    for entry in work.gone:
        board.give(entry, Remove(), _BY)
        entry.counted = find_count(entry.row.state)  # the map does not count it
    # The counts that these elements change are added to the map when they are written; then the map is marked again.
    if work.group is not None and not stored.row.opened and head.row.ending is None and not work.group.is_decided:
        inputs: tuple[MapInput, ...] = ()
    elif head.plan.structure.follows is None or head.row.ending is not None:
        stored, inputs = _find_inputs(board.connection, head, stored, board.context.now_us)
    else:
        stored, inputs = _follow(board, work, stored)
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
        stored, missing, kept = _start_elements(board, work, stored, expansion)
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
    left = left or missing > 0 or kept > 0 or stops or removes
    swept = stored.swept or (work.sweeps and not work.left)
    # A map that has closed, whatever stopped it, cuts no further chunk.
    due_us = None if stored.row.closed else stored.due_us
    write_map(board.connection, stored._replace(pending=int(left), swept=swept, due_us=due_us))
    if left:
        board.context.left = True
        board.context.bells.add(Channel.SCHEDULER)
    if not (holds and stored.row.done):
        _tell(board, head, stored, changed=stored.row.told != before.told)


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
    marked: dict[str, int] = {}
    if any(isinstance(given, SourceMarked) for given in inputs):
        marked = {name: _count_failed(board.connection, part, stored.row.created) for name, part in group.parts.items()}
    before = {part.id: maps[part.id] for part in group.parts.values()}
    recounted = _recount(board.connection, group, maps)
    if recounted and stored.row.upstream_failed > _count_failed(board.connection, group.head, stored.row.created):
        outcome = TaskOutcome.UPSTREAM_FAILED  # of a source; the maps that are open count it already
    after = follow_units(group, stored, before, counts, outcome, marked, recounted)
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


def _find_inputs(
    connection: Connection, head: TaskEntry, stored: StoredMap, now_us: int
) -> tuple[StoredMap, tuple[MapInput, ...]]:
    """Return what the map has to be fed, and the map with its sources if it opens."""
    if head.row.ending is not None:
        reason = _REASONS.get(head.row.ending.state, MapStopReason.MARKED)
        if stored.row.stop is not None:
            return stored, (Look(),)
        return _count_rest(connection, head, stored), (Stopped(reason),)
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
    return stored, (_find_marked_source(connection, head, stored) or Look(),)


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


def _find_marked_source(connection: Connection, head: TaskEntry, stored: StoredMap) -> SourceMarked | None:
    """Return what a map has to be fed whose generator failed after it had yielded, and was marked as a success since.

    A map whose head a user marked is left alone.
    """
    row = stored.row
    if not (row.closed and row.arrived and row.upstream_failed) or head.row.tells != row.told:
        return None
    _, outcome = look_at_sources(connection, head, read_sources(stored.sources))
    if outcome is not TaskOutcome.SUCCESS:
        return None
    elements = _count_failed(connection, head, row.created)
    return SourceMarked(elements) if elements < row.upstream_failed else None


def _count_failed(connection: Connection, head: TaskEntry, end: int) -> int:
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


def _follow(board: Board, work: _Work, stored: StoredMap) -> tuple[StoredMap, tuple[MapInput, ...]]:
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


def _take_over(board: Board, work: _Work, following: Following, room: int) -> Counter[TaskState]:
    """Choose the elements to start, create those that end at once, and return how many appear, by state."""
    head = work.head
    taken: list[int] = []
    ended: dict[TaskState, list[int]] = {state: [] for state in _READINESS}
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
        _end_elements(board, head, state, indexes)
    remove_queued(board.connection, head.id, taken)
    following.left = len(taken) < len(following.found)
    # What needs no room in the window left it to others.
    work.left = work.left or (bool(taken) and room > 0 and len(following.found) >= following.asked)
    return Counter({TaskState.NONE: len(following.fresh), **{state: len(each) for state, each in ended.items()}})


def _end_elements(board: Board, head: TaskEntry, state: TaskState, indexes: Sequence[int]) -> None:
    """Create elements that have ended with those that they follow; the map counts them already."""
    new = []
    for index in indexes:
        entry = board.find(head.run.id, head.task_id, index)
        if entry is None:
            new.append(index)
        else:
            _bring_back(board, entry, _READINESS[state])
        board.maps.pass_on(head.run.id, head.plan.followers, index)
    if new:
        created = _insert_elements(board.connection, head, new, board.context.now_us, state)
        board.note_created(created, _BY, state, _READINESS[state])


def _bring_back(board: Board, entry: TaskEntry, readiness: Readiness) -> None:
    """Decide an element whose row exists; the map counts it already."""
    if entry.row.state is not TaskState.NONE:
        board.give(entry, Clear(), _BY)
    board.give(entry, Ready(entry.row.epoch, readiness), _BY)
    entry.counted = find_count(entry.row.state)


def _start_elements(board: Board, work: _Work, stored: StoredMap, expansion: Expansion) -> tuple[StoredMap, int, int]:
    """Start waiting elements again and create new ones; the map counts them already.

    Returns:
        The map, how many elements began to wait after the step had looked for them: the next step starts them, and how
        many keep their results.
    """
    fresh = [] if work.following is None else work.following.fresh
    again = work.waiting[: expansion.again - len(fresh)]
    missing = expansion.again - len(fresh) - len(again)
    for entry in again:
        board.give(entry, Ready(entry.row.epoch, Readiness.RUN), _BY)
        entry.counted = find_count(entry.row.state)
    known = dict(work.known)
    for index in fresh:
        removed = board.find(work.head.run.id, work.head.task_id, index)
        if removed is not None:
            known[index] = removed
    wanted = [*fresh, *expansion.create]
    kept = _select_kept(board, work.head, stored, [known[index] for index in expansion.create if index in known])
    for index in wanted:
        if index in kept:
            known[index].counted = find_count(known[index].row.state)
        elif index in known:
            _bring_back(board, known[index], Readiness.RUN)
    new = [index for index in wanted if index not in known]
    if new:
        created = _insert_elements(board.connection, work.head, new, board.context.now_us, TaskState.SCHEDULED)
        board.note_created(created, _BY)
    if work.head.plan.chunk is not None and not work.head.plan.iterated:
        _name_chunks(board.connection, work.head, stored, expansion.create)
    row = stored.row
    if missing:
        row = row._replace(waiting=row.waiting + missing, unfinished=row.unfinished - missing)
    for index in sorted(kept):
        board.maps.pass_on(work.head.run.id, work.head.plan.followers, index)
        count = find_count(known[index].row.state)
        assert count is not None
        row = row._replace(unfinished=row.unfinished - 1, **{count: getattr(row, count) + 1})
    made = max(stored.made, expansion.create.stop) if expansion.create else stored.made
    return stored._replace(row=row, made=made), missing, len(kept)


def _name_chunks(connection: Connection, head: TaskEntry, stored: StoredMap, created: Sequence[int]) -> None:
    """Give new elements that are chunks the numbers of their items as labels."""
    mapped = head.plan.structure.mapped
    assert mapped is not None
    total, _ = look_at_sources(connection, head, read_sources(stored.sources))
    found = find_ranges(connection, head.id, mapped, total, created)
    rows = [
        (head.run.id, head.task_id, index, f"items {items.start}-{items.stop - 1}")
        for index, items in sorted(found.items())
    ]
    if rows:
        _label.fetch(connection, _LABELS.build_parameters(find_dialect(connection), rows))


@Statement
def _label(dialect: str) -> Executable:
    given = _LABELS.build_source(dialect)
    # If run and task were parameters, PostgreSQL would compare all elements with the given ones.
    mine = and_(_TASK.run == given.c.run, _TASK.task_id == given.c.task_id)
    return update(task_instance).where(and_(mine, _TASK.map_index == given.c.map_index)).values(label=given.c.label)


def _select_kept(board: Board, head: TaskEntry, stored: StoredMap, known: Sequence[TaskEntry]) -> frozenset[int]:
    """Return the indexes of elements of a former life of a map that have ended with the items that they have now."""
    mapped = head.plan.structure.mapped
    ended = [entry for entry in known if entry.row.outcome is not None]
    if not (stored.keeps and ended) or mapped is None:
        return frozenset()
    sources = read_sources(stored.sources)
    items = {
        entry.map_index: [
            (*owner, number)
            for owner, number in zip(sources.owners, locate_leaves(mapped, sources, entry.map_index), strict=True)
            if owner is not None
        ]
        for entry in ended
    }
    changes = find_changes(board.connection, {one for leaves in items.values() for one in leaves})
    return frozenset(
        entry.map_index
        for entry in ended
        if all(changes.get(one, -1) < entry.since_us for one in items[entry.map_index])
    )


def _insert_elements(
    connection: Connection, head: TaskEntry, indexes: Sequence[int], now_us: int, state: TaskState
) -> list[int]:
    """Create elements that can be admitted at once, or that have ended, and return their ids."""
    structure = head.plan.structure
    given = _INDEXES.build_parameters(find_dialect(connection), [(index,) for index in indexes])
    values = {
        "run": head.run.id,
        "dag": head.run.dag,
        "task_id": head.task_id,
        "number": head.plan.number,
        "queue": structure.queue,
        "pool": structure.pool,
        "pool_slots": structure.pool_slots,
        "max_tries": structure.retries + 1,
        "rank": compute_rank(structure.priority, resumed=False),
        "since_us": now_us,
        "state": state.value,
        "ended_us": None if state is TaskState.SCHEDULED else now_us,
    }
    parameters = {**given, **{f"new_{name}": value for name, value in values.items()}}
    return [number for (number,) in _insert.fetch(connection, parameters)]


@Statement
def _insert(dialect: str) -> Executable:
    given = _INDEXES.build_source(dialect)
    copied = (
        "run", "dag", "task_id", "number", "queue", "pool", "pool_slots", "max_tries", "rank", "since_us", "state",
        "ended_us",
    )  # fmt: skip
    values = [bindparam(f"new_{name}", type_=_TASK[name].type).label(name) for name in copied]
    constant = [literal(value).label(name) for name, value in _CONSTANT.items()]
    rows = select(given.c.map_index, *values, *constant).where(true()).order_by(given.c.position)
    statement = insert(task_instance).from_select(["map_index", *copied, *_CONSTANT], rows)
    return statement.returning(_TASK.id)


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
        head.error = stored.error or (f"{row.failed:,} of {row.arrived:,} elements failed" if row.failed else None)
