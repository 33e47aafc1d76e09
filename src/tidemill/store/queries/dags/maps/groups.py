"""Creates the units of mapped groups, and has the maps of their tasks follow them.

A unit is the element of a mapped group: it stands for all tasks of the group with its index. These are ordinary tasks
to the board, which decides them within the unit. Each task of the group is a map, too, whose elements exist exactly
with the units; its row is a copy of the group's, with counts of its own.

Invariants: a step locks all heads of a group, then all tasks of the units that it changes, in one statement, then all
maps of the group. A unit is created, and removed, with all its tasks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    Connection,
    Executable,
    Select,
    and_,
    bindparam,
    case,
    func,
    insert,
    literal,
    literal_column,
    select,
    true,
)

from tidemill.core.tasks.attempt import Moved, order_elements
from tidemill.core.tasks.dependencies import Readiness, TaskOutcome, decide
from tidemill.core.tasks.expansion import (
    Expansion,
    GroupMoved,
    MapPolicy,
    MapRow,
    SourceAgain,
    SourceMarked,
    feed,
    find_count,
)
from tidemill.core.tasks.inputs import Cancel, Clear, Mark, Ready, Remove
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.structure import MapStructure
from tidemill.core.tasks.task_row import ENDED, TaskState
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.dag_plan import NO_COUNTS
from tidemill.store.dag_tables import task_instance
from tidemill.store.queries.dags.items.elements import find_differing
from tidemill.store.queries.dags.items.stored_sources import StoredSources
from tidemill.store.queries.dags.state.map_rows import StoredMap, write_map
from tidemill.store.queries.dags.state.task_rows import TaskEntry, compute_rank
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.statements import Statement

_TASK = task_instance.c
_ENDED = tuple(sorted(state.value for state in ENDED))
_BY = "scheduler"
#: The most units that one step ends or removes.
UNITS = 100
_NEW = RowSet(
    "new_parts",
    map_index=int,
    task_id=str,
    number=int,
    queue=str,
    pool=str,
    pool_slots=int,
    max_tries=int,
    rank=int,
    state=str,
    epoch=int,
)
_NAMES = RowSet("part_names", task_id=str)
_CONSTANT = {"tries": 0, "tries_before": 0, "lost": 0, "tallies": "", "pending": 0, "skip_votes": 0}


@dataclass(slots=True)
class GroupWork:
    """A mapped group that a step looks at, and the units that it locked for that.

    Attributes:
        head: The head of the group.
        parts: The heads of its tasks, by name.
        waiting: The units that wait to be started again, by index.
        known: The indexes of units that the group is about to create, and whose rows exist.
        gone: The indexes of units that have no item any more.
        ordered: The indexes of the elements that have to end, by task.
        comparing: The indexes of units to compare with the items that a source gives again.
        swept: The indexes of units that have not started, and have to end because the group has stopped itself.
    """

    head: TaskEntry
    parts: dict[str, TaskEntry]
    waiting: list[int] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    gone: list[int] = field(default_factory=list)
    ordered: dict[str, list[int]] = field(default_factory=dict)
    comparing: range = range(0)
    swept: list[int] = field(default_factory=list)

    @property
    def is_decided(self) -> bool:
        """Whether the rules of all tasks are decided over their upstream tasks outside of the group."""
        return all(head.row.state is not TaskState.NONE for head in self.parts.values())

    @property
    def indexes(self) -> set[int]:
        """The indexes of all units to lock."""
        ordered = {index for indexes in self.ordered.values() for index in indexes}
        return {*self.waiting, *self.known, *self.gone, *self.comparing, *ordered, *self.swept}


def gather_groups(board: Board, heads: Iterable[TaskEntry]) -> list[TaskEntry]:
    """Return heads with the head of the group instead of those of its tasks; lock all heads of the groups."""
    keys = {
        (head.run.id, head.plan.mapped_group or head.task_id, head.map_index): bool(head.plan.mapped_group)
        for head in heads
    }
    parts = [
        (run, name, UNMAPPED)
        for (run, group, _), is_group in keys.items()
        if is_group
        for name in (group, *board.runs[run].plan.groups[group])
    ]
    board.load(parts)
    return [head for key in keys if (head := board.find(*key)) is not None]


def find_parts(board: Board, head: TaskEntry) -> dict[str, TaskEntry]:
    """Return the heads of the tasks of a group by name."""
    names = head.run.plan.groups.get(head.task_id, ())
    return {name: part for name in names if (part := board.find(head.run.id, name)) is not None}


def lock_units(board: Board, run: int, names: Collection[str], indexes: Iterable[int]) -> None:
    """Lock all tasks of units, in one statement. `names`: the group and its tasks."""
    board.load((run, name, index) for index in indexes for name in names)


def prepare_units(
    board: Board, work: GroupWork, stored: StoredMap, *, window: int, end: int | None, sweeps: bool
) -> bool:
    """Find and lock the units that may get an input; return whether more of them have to end than one step changes.

    Args:
        board: The board.
        work: The group.
        stored: Its map.
        window: The most units that may start; 0: none may.
        end: The index from which on the group has no units; None: it may still create some.
        sweeps: Whether the group has stopped itself, and its units that have not started have to end.
    """
    head, row = work.head, stored.row
    if row.waiting and window:
        work.waiting = _find_indexes(board, head, head.task_id, "waiting", limit=window)
    if row.created < stored.made and row.stop is None:
        work.known = set(range(row.created, min(row.created + window, stored.made)))
    if end is not None and stored.made > end:
        work.gone = _find_indexes(board, head, head.task_id, "staying", first=end, limit=UNITS)
    if sweeps:
        work.swept = _find_indexes(board, head, head.task_id, "unstarted", limit=UNITS)
    for name, part in work.parts.items():
        ordered = order_elements(part.row)
        if ordered is not None and part.row.ending is not None:
            wanted = part.row.ending.state.value if isinstance(ordered, Mark) else "removed"
            work.ordered[name] = _find_indexes(board, head, name, "open", limit=UNITS, wanted=wanted)
    lock_units(board, head.run.id, (head.task_id, *work.parts), sorted(work.indexes))
    return any(len(found) >= UNITS for found in (work.swept, *work.ordered.values()))


def _find_indexes(
    board: Board, head: TaskEntry, name: str, kind: str, *, limit: int, first: int = 0, wanted: str = ""
) -> list[int]:
    given = {"of_run": head.run.id, "of_task": name, "first": first, "most": limit, "wanted": wanted}
    if kind in ("unstarted", "staying"):
        names = head.run.plan.groups[head.task_id]
        given |= _NAMES.build_parameters(find_dialect(board.connection), [(one,) for one in names])
    return [index for (index,) in _indexes.fetch(board.connection, given, kind)]


@Statement
def _indexes(dialect: str, kind: str) -> Select[Any]:
    """Build the statement that finds units, or elements of a task of the group, without locking them.

    kind: `waiting`: units that wait to be started again; `present`: units that are not removed; `staying`: those of
    them with a task that is not removed, or about to be; `unstarted`: open units
    of which no task has started; `open`: unfinished elements, except those that are ending as `wanted` or to be
    removed.
    """
    mine: list[Any] = [_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task")]
    mine.append(_TASK.map_index >= bindparam("first"))
    match kind:
        case "waiting":
            mine.append(_TASK.pending == literal_column("2"))
        case "present":
            mine.append(_TASK.state != literal_column("'removed'"))
        case "staying":
            part = task_instance.alias("part").c
            names = select(_NAMES.build_source(dialect).c.task_id)
            same = and_(part.run == _TASK.run, part.task_id.in_(names), part.map_index == _TASK.map_index)
            after = func.coalesce(part.ending_outcome, literal_column("'none'"))
            goes = and_(part.state == literal_column("'ending'"), after == literal_column("'removed'"))
            stays = and_(part.state != literal_column("'removed'"), ~goes)
            mine += [_TASK.state != literal_column("'removed'"), select(part.id).where(and_(same, stays)).exists()]
        case "unstarted":
            part = task_instance.alias("part").c
            names = select(_NAMES.build_source(dialect).c.task_id)
            same = and_(part.run == _TASK.run, part.task_id.in_(names), part.map_index == _TASK.map_index)
            started = select(part.id).where(and_(same, part.tries > part.tries_before)).exists()
            mine += [_TASK.state == literal_column("'mapped'"), ~started]
        case _:
            after = func.coalesce(_TASK.ending_outcome, literal_column("'none'"))
            decided = after.in_([bindparam("wanted"), literal_column("'removed'")])
            mine.append(_TASK.state.not_in([literal_column(f"'{state}'") for state in _ENDED]))
            mine.append(~and_(_TASK.state == literal_column("'ending'"), decided))
    return select(_TASK.map_index).where(and_(*mine)).order_by(_TASK.map_index).limit(bindparam("most"))


def has_units(board: Board, work: GroupWork, first: int, end: int) -> bool:
    """Whether a group has units between two indexes that are not removed."""
    found = _find_indexes(board, work.head, work.head.task_id, "present", first=first, limit=1)
    return bool(found) and found[0] < end


def clear_units(board: Board, work: GroupWork, mapped: MapStructure, sources: StoredSources, by: str) -> bool:
    """Clear locked units whose items differ from those that a source gives again, with all their tasks.

    Tasks that their upstream outside of the group, or a user, decided before the group began are left alone.

    Returns:
        Whether there are any.
    """
    names = [name for name, head in work.parts.items() if head.row.state is TaskState.MAPPED]
    parts = {index: [part for name in names if (part := _find(board, work, name, index))] for index in work.comparing}
    units = {index: unit for index in work.comparing if (unit := _find(board, work, work.head.task_id, index))}
    elements = {index: [units[index], *parts[index]] for index in units}
    differing = sorted(find_differing(board.connection, mapped, sources, elements))
    wanted = [part for index in differing for part in parts[index] if part.row.state is not TaskState.NONE]
    triggerers = board.find_triggerers(wanted)
    answers = [board.give(part, Clear(triggerer=triggerers.get(part.id)), by) for part in wanted]
    return _restore_decided(board, work, differing) or any(isinstance(answer, Moved) for answer in answers)


def _restore_decided(board: Board, work: GroupWork, indexes: Collection[int]) -> bool:
    """Bring back the tasks of removed units that were decided before the group began; return whether there are any."""
    found = [
        (part, head)
        for name, head in work.parts.items()
        if head.row.outcome is not None
        for index in indexes
        if (part := _find(board, work, name, index)) is not None and part.row.state is TaskState.REMOVED
    ]
    for part, head in found:
        board.give(part, Clear(), _BY)
        _follow_head(board, part, head)
    return bool(found)


def end_parts(board: Board, work: GroupWork, group: MapRow) -> None:
    """Give to the tasks of locked units what ends them: a user's order, the stop of the group, a missing item."""
    for name, indexes in work.ordered.items():
        order = order_elements(work.parts[name].row)
        if order is not None:
            _give_all(board, [entry for index in indexes if (entry := _find(board, work, name, index))], order)
    units = [[part for name in work.parts if (part := _find(board, work, name, index))] for index in work.swept]
    # A worker may have claimed one of them before the unit was locked.
    unstarted = [parts for parts in units if not any(part.row.started for part in parts)]
    _give_all(board, [part for parts in unstarted for part in parts], Cancel(request=group.stop or ""))
    for index in work.gone:
        for name in (*work.parts, work.head.task_id):
            entry = _find(board, work, name, index)
            if entry is not None:
                # A group whose source ran again counts the units that it had before.
                entry.is_counted = index < group.created
                triggerer = board.find_triggerers([entry]).get(entry.id)
                board.give(entry, Remove(triggerer=triggerer), _BY)


def _give_all(board: Board, entries: Sequence[TaskEntry], order: Cancel | Mark | Remove) -> None:
    triggerers = board.find_triggerers(entries)
    for entry in entries:
        if entry.row.state not in ENDED:
            board.give(entry, dataclasses.replace(order, triggerer=triggerers.get(entry.id)), _BY)


def _find(board: Board, work: GroupWork, name: str, index: int) -> TaskEntry | None:
    return board.find(work.head.run.id, name, index)


def start_units(
    board: Board, work: GroupWork, stored: StoredMap, expansion: Expansion
) -> tuple[StoredMap, int, dict[str, Counter[str]]]:
    """Start waiting units again and create new ones; the map of the group counts them already.

    Returns:
        The map; how many units began to wait after the step had looked for them; and the new elements of each task, by
        the count that they belong to.
    """
    waiting = [_find(board, work, work.head.task_id, index) for index in work.waiting]
    again = [unit for unit in waiting if unit is not None and unit.row.state is TaskState.NONE][: expansion.again]
    missing = expansion.again - len(again)
    counts: dict[str, Counter[str]] = {name: Counter() for name in work.parts}
    for unit in again:
        _start(board, unit)
        board.doubt(part for name in work.parts if (part := _find(board, work, name, unit.map_index)))
    known = [index for index in expansion.create if index in work.known]
    for index in known:
        if (row := _find(board, work, work.head.task_id, index)) is not None:
            _start(board, row)
        _create_parts(board, work, index, counts)
    new = [index for index in expansion.create if index not in work.known]
    if new:
        _insert_units(board, work, new)
        if any(head.row.outcome is not None for head in work.parts.values()):
            lock_units(board, work.head.run.id, (work.head.task_id, *work.parts), new)
            for index in new:
                _create_parts(board, work, index, counts)
        else:
            for name, head in work.parts.items():
                counts[name]["unfinished" if _is_root(head) else "waiting"] += len(new)
    counted = stored.row
    if missing:
        counted = counted._replace(waiting=counted.waiting + missing, unfinished=counted.unfinished - missing)
    made = max(stored.made, expansion.create.stop) if expansion.create else stored.made
    return stored._replace(row=counted, made=made), missing, counts


def _start(board: Board, unit: TaskEntry) -> None:
    """Open a unit, which the map of the group counts already."""
    if unit.row.state in ENDED:
        board.give(unit, Clear(), _BY)
    board.give(unit, Ready(unit.row.epoch, Readiness.RUN), _BY)
    unit.counted = find_count(unit.row.state)
    board.doubt([unit])


def _create_parts(board: Board, work: GroupWork, index: int, counts: Mapping[str, Counter[str]]) -> None:
    """Have the tasks of a unit start over, and count them."""
    for name, head in work.parts.items():
        part = _find(board, work, name, index)
        if part is None:
            continue
        if part.row.state in ENDED:
            board.give(part, Clear(), _BY)
        if part.row.state is TaskState.NONE:
            _follow_head(board, part, head)
        part.counted = find_count(part.row.state)
        if part.counted is not None:
            counts[name][part.counted] += 1
        board.doubt([part])


def _follow_head(board: Board, part: TaskEntry, head: TaskEntry) -> None:
    """Decide an element as the upstream tasks outside of the group, or a user, decided all of them."""
    outcome = head.row.outcome
    if outcome is TaskOutcome.SKIPPED or outcome is TaskOutcome.UPSTREAM_FAILED:
        readiness = Readiness.SKIP if outcome is TaskOutcome.SKIPPED else Readiness.FAIL
        board.give(part, Ready(part.row.epoch, readiness), _BY)
    elif outcome is not None:
        board.give(part, Mark(outcome), _BY)


def _is_root(head: TaskEntry) -> bool:
    """Whether an element of a task can run as soon as its unit begins."""
    upstream = head.plan.build_upstream(NO_COUNTS, inner=True)
    return head.row.outcome is None and decide(head.plan.rule, upstream) is Readiness.RUN


def _insert_units(board: Board, work: GroupWork, indexes: Sequence[int]) -> None:
    """Create units with all their tasks."""
    states = {work.head.task_id: TaskState.MAPPED}
    states |= {name: TaskState.SCHEDULED if _is_root(head) else TaskState.NONE for name, head in work.parts.items()}
    rows = []
    for index in indexes:
        for name, head in {work.head.task_id: work.head, **work.parts}.items():
            one, state = head.plan.structure, states[name]
            slots = 0 if one.is_group else one.pool_slots
            rank = compute_rank(one.priority, resumed=False)
            rows.append(
                (
                    index,
                    name,
                    head.plan.number,
                    one.queue,
                    one.pool,
                    slots,
                    one.retries + 1,
                    rank,
                    state.value,
                    int(state is not TaskState.NONE),
                )
            )
    now_us = board.context.now_us
    given = _NEW.build_parameters(find_dialect(board.connection), rows)
    found = _insert.fetch(
        board.connection, {**given, "new_run": work.head.run.id, "new_dag": work.head.run.dag, "new_us": now_us}
    )
    for state in (TaskState.MAPPED, TaskState.SCHEDULED):
        board.note_created([number for number, created in found if created == state.value], _BY, state)


@Statement
def _insert(dialect: str) -> Executable:
    given = _NEW.build_source(dialect)
    copied = [
        "map_index", "task_id", "number", "queue", "pool", "pool_slots", "max_tries", "rank", "state", "epoch",
    ]  # fmt: skip
    values = [bindparam(f"new_{name}", type_=_TASK[name].type).label(name) for name in ("run", "dag")]
    now = bindparam("new_us", type_=_TASK.since_us.type)
    started = case((given.c.state == literal_column("'mapped'"), now)).label("started_us")
    constant = [literal(value).label(name) for name, value in _CONSTANT.items()]
    rows = select(*[given.c[name] for name in copied], *values, now.label("since_us"), started, *constant)
    names = [*copied, "run", "dag", "since_us", "started_us", *_CONSTANT]
    statement = insert(task_instance).from_select(names, rows.where(true()).order_by(given.c.position))
    return statement.returning(_TASK.id, _TASK.state)


def follow_units(
    work: GroupWork,
    stored: StoredMap,
    parts: Mapping[int, StoredMap],
    counts: Mapping[str, Counter[str]],
    outcome: TaskOutcome | None,
    marked: Mapping[str, int],
    recounted: Mapping[str, Mapping[str, int]],
    again: Mapping[str, int],
) -> dict[int, StoredMap]:
    """Return the maps of the tasks of a group after the step, by head.

    Args:
        work: The group.
        stored: The map of the group after the step.
        parts: The maps of its tasks before the step.
        counts: The new elements of each task, by count.
        outcome: How the sources of the group ended, if that is what changed.
        marked: The number of elements of each task that failed with their upstream, if a user marked the source of the
            group as a success.
        recounted: The existing elements of tasks that began anew with the group, which does not: it was cancelled or
            marked before. They are counted again.
        again: The number of elements of each task that failed with their upstream, if a source of the group was
            cleared.
    """
    group = stored.row
    if work.head.row.outcome is not None and not group.opened:
        # The group was skipped, or marked, before it began.
        group, outcome = MapRow(opened=True, closed=True), work.head.row.outcome
    found = {}
    for name, head in work.parts.items():
        part = parts[head.id]
        new = Counter(counts[name])
        new.update(recounted.get(name, {}))
        row = part.row._replace(**{count: getattr(part.row, count) + number for count, number in new.items()})
        if follows(work, head, row):
            if name in again:
                row = feed(row, SourceAgain(again[name]), MapPolicy(), starts=False).row
            if name in marked:
                row = feed(row, SourceMarked(marked[name]), MapPolicy(), starts=False).row
            row = feed(row, GroupMoved(group, outcome), MapPolicy(), starts=False).row
        elif not row.opened:
            row = row._replace(arrived=stored.row.arrived, created=stored.row.created)
        found[head.id] = part._replace(row=row, made=stored.made, error=stored.error)
    return found


def follows(work: GroupWork, head: TaskEntry, row: MapRow) -> bool:
    """Whether the map of a task is open with that of its group, or has been.

    A task whose own rule, or a user, decided it before the group began tells nothing more. A task that was cleared
    while others of the group still end waits for the next life of the group.
    """
    if row.opened:
        return True
    if work.head.row.ending is not None:
        return head.row.state is TaskState.ENDING and work.head.row.ending.state is not TaskState.NONE
    return head.row.state in (TaskState.MAPPED, TaskState.ENDING)


def write_parts(connection: Connection, before: Mapping[int, StoredMap], after: Mapping[int, StoredMap]) -> None:
    """Write the maps of the tasks of a group that have changed."""
    for number, stored in after.items():
        stored = stored._replace(pending=0)
        if stored != before[number]:
            write_map(connection, stored)
