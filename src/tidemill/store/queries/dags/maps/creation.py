"""Creates the elements of maps, and starts those again that exist already."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Executable, and_, bindparam, insert, literal, select, true, update

from tidemill.core.tasks.dependencies import Readiness
from tidemill.core.tasks.expansion import Expansion, find_count
from tidemill.core.tasks.inputs import Clear, Ready
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.dag_tables import task_instance
from tidemill.store.queries.dags.items.chunks import find_ranges
from tidemill.store.queries.dags.items.elements import find_differing
from tidemill.store.queries.dags.items.sources import look_at_sources
from tidemill.store.queries.dags.items.stored_sources import read_sources
from tidemill.store.queries.dags.maps.preparation import MapWork
from tidemill.store.queries.dags.state.map_rows import StoredMap
from tidemill.store.queries.dags.state.task_rows import TaskEntry, compute_rank
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.statements import Statement

_TASK = task_instance.c
_BY = "scheduler"
_INDEXES = RowSet("new_elements", map_index=int)
_LABELS = RowSet("chunk_labels", run=int, task_id=str, map_index=int, label=str)
#: The decisions of a follower over an element that it does not run.
READINESS = {TaskState.SKIPPED: Readiness.SKIP, TaskState.UPSTREAM_FAILED: Readiness.FAIL}
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


def end_elements(board: Board, head: TaskEntry, state: TaskState, indexes: Sequence[int]) -> None:
    """Create elements that have ended with those that they follow; the map counts them already."""
    new = []
    for index in indexes:
        entry = board.find(head.run.id, head.task_id, index)
        if entry is None:
            new.append(index)
        else:
            _bring_back(board, entry, READINESS[state])
        board.maps.pass_on(head.run.id, head.plan.followers, index)
    if new:
        created = _insert_elements(board.connection, head, new, board.context.now_us, state)
        board.note_created(created, _BY, state, READINESS[state])


def _bring_back(board: Board, entry: TaskEntry, readiness: Readiness) -> None:
    """Decide an element whose row exists; the map counts it already."""
    if entry.row.state is not TaskState.NONE:
        board.give(entry, Clear(), _BY)
    board.give(entry, Ready(entry.row.epoch, readiness), _BY)
    entry.counted = find_count(entry.row.state)


def start_elements(board: Board, work: MapWork, stored: StoredMap, expansion: Expansion) -> tuple[StoredMap, int, int]:
    """Start waiting elements again and create new ones; the map counts them already.

    Returns:
        The map, how many elements began to wait after the step had looked for them: the next step starts them, and how
        many keep their results.
    """
    fresh = [] if work.following is None else work.following.fresh
    waiting = [entry for entry in work.waiting if entry.row.state is TaskState.NONE]  # not removed by this step
    again = waiting[: expansion.again - len(fresh)]
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
    elements = {entry.map_index: [entry] for entry in ended}
    differing = find_differing(board.connection, mapped, read_sources(stored.sources), elements)
    return frozenset(elements.keys() - differing)


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
