"""Reads, locks and writes the rows of maps; the counts of many elements change by one statement.

Invariants: maps are locked after all other rows, by ascending id. What a mapped task told its successors changes only
while its head is locked. `counted` of an element is the count in which its map has it; the difference to its state is
written with the element, by the same transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Select,
    Update,
    and_,
    bindparam,
    case,
    literal_column,
    or_,
    select,
    update,
)

from tidemill.core.tasks.dependencies import TaskOutcome, Told
from tidemill.core.tasks.expansion import MapRow, find_count
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.service_calls import MapLimits
from tidemill.store.dag_tables import task_map
from tidemill.store.queries.dags.state.map_queue import pass_on
from tidemill.store.queries.dags.state.task_rows import RunEntry, TaskEntry
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.statements import Statement

DEFAULT_LIMITS = MapLimits()
_MAP = task_map.c
_OUTCOMES = tuple(TaskOutcome)
#: The bits of `told`: one per outcome, whether the map is done, whether the head tells this, not just its outcome,
#: whether the map has cancelled the elements that had not started when it stopped itself, and whether elements of its
#: former life with the same items keep their results.
_DONE, _FOLLOWS, _SWEPT, _KEEPS = (factor << len(_OUTCOMES) for factor in (1, 2, 4, 8))
_COUNTS = ("waiting", "unfinished", "retrying", "success", "failed", "upstream_failed", "skipped")
#: `part`: whether the map is that of a task in a mapped group.
_DELTAS = RowSet("deltas", run=int, task_id=str, part=int, **dict.fromkeys(_COUNTS, int))
_WOKEN = RowSet("woken", run=int, task_id=str)
_LIMITS = ("max_outstanding", "max_length", "max_backlog")
_WRITTEN = (
    "opened", "closed", "arrived", "created", "made", *_COUNTS, "told", "pending", "stop", "sources", "error", "due_us",
    "compared", *_LIMITS,
)  # fmt: skip
_OUTCOME_COUNTS = tuple(outcome.value for outcome in _OUTCOMES)
_NULLABLE = ("stop", "sources", "error", "due_us", "compared")
_NO_END = 1 << 62


class StoredMap(NamedTuple):
    """A row of `task_map`.

    Attributes:
        row: The counts, which `core.tasks.expansion` changes.
        follows: Whether the head tells `row.told`.
        swept: Whether the map, after it stopped itself, has cancelled all elements that had not started.
        keeps: Whether elements of its former life keep their results if their items are the same.
        made: The number of elements that have a row; some may be of a former life of the map.
        limits: Those of the settings when it opened.
        due_us: When its unfinished chunk is cut at the latest.
    """

    task: int
    run: int
    task_id: str
    row: MapRow
    follows: bool
    swept: bool
    keeps: bool
    made: int
    pending: int
    sources: str | None
    error: str | None
    limits: MapLimits
    due_us: int | None = None


def write_told(told: Told, *, follows: bool) -> int:
    """Pack what a map told into a number."""
    kinds = sum(1 << place for place, outcome in enumerate(_OUTCOMES) if outcome in told.kinds)
    return kinds + _DONE * told.done + _FOLLOWS * follows


def read_told(number: int) -> tuple[Told, bool]:
    """Return what a map told, and whether its head tells it."""
    kinds = frozenset(outcome for place, outcome in enumerate(_OUTCOMES) if number >> place & 1)
    return Told(kinds, bool(number & _DONE)), bool(number & _FOLLOWS)


@dataclass(slots=True)
class MapWrites:
    """The pending changes of maps.

    Attributes:
        reset: The heads of maps that start over.
        woken: The maps that the scheduler has to look at, as run and task.
        told: What the heads told when they were read, by head.
        ended: The elements that have ended and are followed, as run, follower and index.
        keeps: The heads of maps that will start over, and whether their elements keep results.
        follows: The heads that tell something else than before.
        heads: The maps that change with their heads, as run and task.
        deltas: The counts that elements have changed, by run and task.
        parts: Those of `deltas` that are maps of tasks in mapped groups.
    """

    reset: set[int] = field(default_factory=set)
    woken: set[tuple[int, str]] = field(default_factory=set)
    told: dict[int, Told | None] = field(default_factory=dict)
    ended: set[tuple[int, str, int]] = field(default_factory=set)
    keeps: dict[int, bool] = field(default_factory=dict)
    follows: list[TaskEntry] = field(default_factory=list)
    heads: set[tuple[int, str]] = field(default_factory=set)
    deltas: dict[tuple[int, str], Counter[str]] = field(default_factory=dict)
    parts: set[tuple[int, str]] = field(default_factory=set)

    def pass_on(self, run: int, followers: Iterable[str], index: int) -> None:
        """Have maps follow an element that has ended."""
        for name in followers:
            self.ended.add((run, name, index))
            self.wake(run, name)

    def wake(self, run: int, task_id: str) -> None:
        """Have the scheduler look at a map."""
        self.woken.add((run, task_id))

    def load_told(self, connection: Connection, heads: Collection[TaskEntry]) -> None:
        """Complete the rows of heads by what they told."""
        given = IDS.build_parameters(find_dialect(connection), build_id_rows([entry.id for entry in heads]))
        found = dict(_told.fetch(connection, given))
        for entry in heads:
            told, follows = read_told(found.get(entry.id, 0))
            if follows:
                entry.row = entry.row._replace(told=told)
            self.told[entry.id] = entry.row.told

    def collect(self, entries: Iterable[TaskEntry]) -> None:
        """Note the counts that elements have changed, and what heads tell now."""
        self.told.update(dict.fromkeys(self.reset))
        for entry in entries:
            key = entry.run.id, entry.task_id
            if entry.map_index == UNMAPPED:
                if entry.row.policy.is_map and entry.row.told != self.told.get(entry.id):
                    self.follows.append(entry)
                    self.heads.add(key)
                elif entry.id in self.reset or entry.id in self.keeps:
                    self.heads.add(key)
                continue
            count = find_count(entry.row.state)
            if count != entry.counted and entry.is_counted:
                changed = self.deltas.setdefault(key, Counter())
                if entry.counted is not None:
                    changed[entry.counted] -= 1
                if count is not None:
                    changed[count] += 1
                entry.counted = count
                if entry.is_part:
                    self.parts.add(key)
                if entry.row.outcome is not None:
                    self.pass_on(entry.run.id, entry.plan.followers, entry.map_index)

    def write_heads(self, connection: Connection) -> None:
        """Write what concerns whole maps, which are locked; then nothing is left to write."""
        dialect = find_dialect(connection)
        for entry in self.follows:
            self._follow(connection, entry)
        for keeps in (False, True):
            heads = [head for head, one in self.keeps.items() if one is keeps]
            if heads:
                _keep.fetch(connection, IDS.build_parameters(dialect, build_id_rows(heads)), keeps)
        if self.reset:
            _reset.fetch(connection, IDS.build_parameters(dialect, build_id_rows(self.reset)))
        self.reset, self.woken, self.keeps, self.ended = set(), set(), {}, set()
        self.follows, self.heads, self.deltas, self.parts = [], set(), {}, set()

    def _follow(self, connection: Connection, entry: TaskEntry) -> None:
        """Store whether a head tells what its map told."""
        told = entry.row.told
        self.told[entry.id] = told
        given = {"map_task": entry.id, "told_now": -1 if told is None else write_told(told, follows=True)}
        _follow.fetch(connection, given, told is None)


def write_maps(connection: Connection, writes: Sequence[MapWrites]) -> bool:
    """Write all changes of maps together; return whether one was woken, or its counts have changed."""
    dialect = find_dialect(connection)
    ended = {one for each in writes for one in each.ended}
    if ended:
        pass_on(connection, ended)
    woken = {one for each in writes for one in each.woken}
    parts = {one for each in writes for one in each.parts}
    deltas: dict[tuple[int, str], Counter[str]] = {}
    for each in writes:
        for key, changed in each.deltas.items():
            deltas.setdefault(key, Counter()).update(changed)
    _lock(connection, {*woken, *deltas, *(one for each in writes for one in each.heads)})
    for each in writes:
        each.write_heads(connection)
    if deltas:
        rows: list[tuple[int | str, ...]] = [
            (*key, int(key in parts), *(changed[name] for name in _COUNTS)) for key, changed in sorted(deltas.items())
        ]
        _add_deltas.fetch(connection, _DELTAS.build_parameters(dialect, rows))
    if woken:
        _wake.fetch(connection, _WOKEN.build_parameters(dialect, sorted(woken)))
    return bool(deltas or woken)


@Statement
def _follow(dialect: str, only_outcome: bool) -> Update:
    statement = update(task_map).where(_MAP.task == bindparam("map_task"))
    told = _MAP.told
    if only_outcome:
        return statement.values(told=told.bitwise_and(_KEEPS | _SWEPT | _FOLLOWS - 1))
    return statement.values(told=told.bitwise_and(_KEEPS | _SWEPT).bitwise_or(bindparam("told_now", type_=told.type)))


@Statement
def _told(dialect: str) -> Select[Any]:
    return select(_MAP.task, _MAP.told).where(_MAP.task.in_(select(IDS.build_source(dialect).c.id)))


@Statement
def _lock_named(dialect: str) -> Select[Any]:
    given = _WOKEN.build_source(dialect)
    same = and_(_MAP.run == given.c.run, _MAP.task_id == given.c.task_id)
    return select(_MAP.task).join(given, same).order_by(_MAP.task).with_for_update(of=task_map)


@Statement
def _add_deltas(dialect: str) -> Update:
    given = _DELTAS.build_source(dialect)
    same = and_(_MAP.run == given.c.run, _MAP.task_id == given.c.task_id)
    new = {name: _MAP[name] + given.c[name] for name in _COUNTS}
    return update(task_map).where(same).values(pending=case((_has_work(given, new), 1), else_=_MAP.pending), **new)


def _has_work(given: FromClause, new: Mapping[str, ColumnElement[int]]) -> ColumnElement[bool]:
    """Whether the scheduler has to look at a map whose counts change: most ends of elements change nothing else.

    It has if the map has not opened or is done, tells another kind of outcome, or has room in its window for others.
    The map of a task in a mapped group starts none itself, and has no limit of failures.
    """
    zero: ColumnElement[int] = literal_column("0")
    one: ColumnElement[int] = literal_column("1")
    kinds = [(_MAP[name] > zero) != (new[name] > zero) for name in _OUTCOME_COUNTS]
    has_all = or_(_MAP.created == _MAP.arrived, _MAP.stop.is_not(None))
    is_open = new["waiting"] + new["unfinished"] + new["retrying"] > zero
    done = and_(_MAP.closed == one, has_all, ~is_open)
    frees = or_(given.c.unfinished < zero, given.c.retrying < zero, given.c.waiting > zero)
    has_more = or_(new["waiting"] > zero, _MAP.closed == zero, _MAP.created != _MAP.arrived)
    own = and_(given.c.part == zero, or_(given.c.failed != zero, and_(frees, has_more)))
    return or_(_MAP.opened == zero, *kinds, done, own)


@Statement
def _wake(dialect: str) -> Update:
    given = _WOKEN.build_source(dialect)
    return update(task_map).where(and_(_MAP.run == given.c.run, _MAP.task_id == given.c.task_id)).values(pending=1)


@Statement
def _reset(dialect: str) -> Update:
    kept = {"made", *_LIMITS}
    zero: dict[str, Any] = {name: None if name in _NULLABLE else 0 for name in _WRITTEN if name not in kept}
    wanted = select(IDS.build_source(dialect).c.id)
    kept_bits = {"told": _MAP.told.bitwise_and(_KEEPS)}
    return update(task_map).where(_MAP.task.in_(wanted)).values(zero | kept_bits | {"pending": 1})


@Statement
def _keep(dialect: str, keeps: bool) -> Update:
    wanted = select(IDS.build_source(dialect).c.id)
    changed = _MAP.told.bitwise_or(_KEEPS) if keeps else _MAP.told.bitwise_and(_KEEPS - 1)
    return update(task_map).where(_MAP.task.in_(wanted)).values(told=changed)


def wake_maps(connection: Connection, maps: Collection[tuple[int, str]]) -> None:
    """Have the scheduler look at maps, given as run and task."""
    _lock(connection, maps)
    _wake.fetch(connection, _WOKEN.build_parameters(find_dialect(connection), sorted(maps)))


def _lock(connection: Connection, maps: Collection[tuple[int, str]]) -> None:
    """Lock maps that statements change together, because an UPDATE locks its rows in any order."""
    if len(maps) > 1:
        _lock_named.fetch(connection, _WOKEN.build_parameters(find_dialect(connection), sorted(maps)))


def find_maps_of_runs(connection: Connection, runs: Collection[int]) -> list[tuple[int, str]]:
    """Return all maps of runs, as run and task."""
    found = _of_runs.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(runs)))
    return [(run, name) for run, name in found]


@Statement
def _of_runs(dialect: str) -> Select[Any]:
    return select(_MAP.run, _MAP.task_id).where(_MAP.run.in_(select(IDS.build_source(dialect).c.id)))


def read_ends(connection: Connection, run: RunEntry) -> dict[str, int]:
    """Return the index from which on the maps of a locked run have no elements, by task.

    Rows from there on are of the time before a map started over. A map that follows another one has removed them when
    it opens.
    """
    rows = _ends.fetch(connection, {"of_run": run.id})
    return {
        name: created if run.plan.tasks[name].structure.follows is None else _NO_END if opened else 0
        for name, opened, created in rows
    }


@Statement
def _ends(dialect: str) -> Select[Any]:
    # A map that was stopped before it opened has no sources.
    return select(_MAP.task_id, _MAP.sources.is_not(None), _MAP.created).where(_MAP.run == bindparam("of_run"))


def read_maps(connection: Connection, heads: Collection[int], *, locks: bool) -> dict[int, StoredMap]:
    """Return the maps of heads; with `locks`, lock them until the transaction ends."""
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(heads))
    return {row[0]: _read(row) for row in _rows.fetch(connection, given, locks)}


@Statement
def _rows(dialect: str, locks: bool) -> Select[Any]:
    wanted = select(IDS.build_source(dialect).c.id)
    columns = [_MAP[name] for name in ("task", "run", "task_id", *_WRITTEN)]
    statement = select(*columns).where(_MAP.task.in_(wanted)).order_by(_MAP.task)
    return statement.with_for_update() if locks else statement


def _read(values: Iterable[Any]) -> StoredMap:
    task, run, task_id, opened, closed, arrived, created, made, *counts = values
    *counts, told, pending, stop, sources, error, due_us, compared, outstanding, length, backlog = counts
    said, follows = read_told(told)
    row = MapRow(bool(opened), bool(closed), arrived, created, *counts)._replace(
        stop=stop, told=said, compared=compared
    )
    limits = DEFAULT_LIMITS if outstanding is None else MapLimits(outstanding, length, backlog)
    swept, keeps = bool(told & _SWEPT), bool(told & _KEEPS)
    return StoredMap(task, run, task_id, row, follows, swept, keeps, made, pending, sources, error, limits, due_us)


def write_map(connection: Connection, stored: StoredMap) -> None:
    """Write a locked map."""
    row = stored.row
    values: Mapping[str, Any] = {
        **{name: int(getattr(row, name)) for name in ("opened", "closed", "arrived", "created", *_COUNTS)},
        "made": stored.made,
        "told": write_told(row.told, follows=stored.follows) + _SWEPT * stored.swept + _KEEPS * stored.keeps,
        "pending": stored.pending,
        "stop": row.stop,
        "sources": stored.sources,
        "error": stored.error,
        "due_us": stored.due_us,
        "compared": row.compared,
        "max_outstanding": stored.limits.max_outstanding,
        "max_length": stored.limits.max_map_length,
        "max_backlog": stored.limits.max_backlog,
    }
    _write.fetch(connection, {f"map_{name}": value for name, value in values.items()} | {"map_task": stored.task})


@Statement
def _write(dialect: str) -> Update:
    new = {name: bindparam(f"map_{name}", type_=_MAP[name].type) for name in _WRITTEN}
    return update(task_map).where(_MAP.task == bindparam("map_task")).values(new)
