"""Stores and reads the items of mapped tasks: what generators yield, and the values of lists that maps are opened over.

A source that was cleared gives its items again: an equal one stays as it is, a different one replaces it, and the time
is noted (`find_changes`), for elements that ended before they read their items. What a cleared generator has yielded so
far is counted, because the items of its last time are still there.

Invariants: the items of a source are numbered from 0 without gaps. An item changes only after its source was cleared;
then the maps over it compare their elements before they end (`maps.reopening`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

from sqlalchemy import (
    Connection,
    Executable,
    FromClause,
    Insert,
    Select,
    and_,
    bindparam,
    delete,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.tasks.inputs import Channel
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.task_calls import EmitItems, ItemsStored
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag_run, dag_version, map_identity, map_item, task_instance, task_map
from tidemill.store.queries.dags.items.backlog import (
    AGAIN,
    YIELDED,
    count_items,
    count_yielded,
    find_consumers,
    read_size,
    read_sizes,
)
from tidemill.store.queries.dags.state.map_rows import wake_maps
from tidemill.store.queries.dags.state.task_rows import load_plan
from tidemill.store.queries.dags.values.task_values import check_attempt
from tidemill.store.queries.dags.values.xcoms import find_fault
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.statements import Statement
from tidemill.store.tables import trigger_stream

_ITEM, _TASK, _MAP = map_item.c, task_instance.c, task_map.c
_IDENTITIES = RowSet("new_identities", identity=str)
_NEW = RowSet("new_items", number=int, value=str, size_up_to=int)
_WANTED = RowSet("wanted_items", task=int, key=str, number=int)
_CHANGED = RowSet("changed_items", number=int, value=str, size_up_to=int)
_NOTES = RowSet("item_notes", number=int, value=str)
#: The end of the key of notes that say when items of a source changed; keys of XComs do not end like this.
_CHANGES = "\x1fchanged"


def emit_items(connection: Connection, request: EmitItems, context: CallContext) -> ItemsStored:
    """Store what a generator yielded; see `EmitItems`."""
    _check_values(request)
    check_attempt(connection, request.task, request.epoch)
    total, yields_again = count_yielded(connection, request.task, YIELDED)
    if request.first > total:
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"element {request.first} follows element {total - 1}: elements between them are missing",
        )
    number = min(total - request.first, len(request.values))
    known = read_range(connection, request.task, YIELDED, request.first, number)
    for number, (stored, value) in enumerate(zip(known, request.values, strict=False), request.first):
        if stored != value:
            raise CallRefusedError(
                RefusalKind.INVALID,
                f"element {number} differs from the one that an earlier try of the generator yielded; make the "
                "generator yield the same elements again, or clear it to start over",
            )
    new = request.values[len(known) :]
    if new:
        _add_yielded(connection, request.task, total, new, context, yields_again=yields_again)
    wanted, full = _wake_maps(connection, request.task, context, rings=bool(new))
    return ItemsStored(total + len(new), wanted, full)


def add_emitted(
    connection: Connection, task: int, emitted: Sequence[tuple[str, str | None]], context: CallContext
) -> bool | None:
    """Store the elements that a streaming task emitted, after those that are stored; known identities are left out.

    Args:
        connection: A connection inside a transaction that holds the task.
        task: The task.
        emitted: Encoded elements, each with its identity, if it has one.
        context: The transaction's context.

    Returns:
        Whether the backlog of a map over the task is full now; None: nothing was stored.
    """
    fresh: dict[str, str] = {}
    for value, identity in emitted:
        if identity is not None:
            fresh.setdefault(identity, value)
    dialect = find_dialect(connection)
    known = set()
    if fresh:
        given = _IDENTITIES.build_parameters(dialect, [(identity,) for identity in fresh])
        added = {identity for (identity,) in _identity_insert.fetch(connection, {**given, "item_task": task})}
        known = fresh.keys() - added
    values = []
    for value, identity in emitted:
        if identity is not None:
            if identity in known:
                continue
            known.add(identity)
        values.append(value)
    if not values:
        return None
    total, yields_again = count_yielded(connection, task, YIELDED)
    _add_yielded(connection, task, total, values, context, yields_again=yields_again)
    _, full = _wake_maps(connection, task, context, rings=True)
    return full


def _add_yielded(
    connection: Connection,
    task: int,
    total: int,
    values: Sequence[str],
    context: CallContext,
    *,
    yields_again: bool,
) -> None:
    """Store values after the `total` that a generator has yielded since it was cleared last."""
    if yields_again:
        put_items(connection, task, YIELDED, total, values, context.now_us)
        _count_again(connection, task, total + len(values))
    else:
        add_items(connection, task, YIELDED, total, values)


@Statement
def _identity_insert(dialect: str) -> Executable:
    given = _IDENTITIES.build_source(dialect)
    mine = bindparam("item_task", type_=map_identity.c.task.type)
    rows = select(mine, given.c.identity).where(literal(1) == 1).order_by(given.c.position)
    insert_into = (postgresql if dialect == "postgresql" else sqlite).insert
    statement = insert_into(map_identity).from_select(["task", "identity"], rows)
    return statement.on_conflict_do_nothing().returning(map_identity.c.identity)  # type: ignore[no-any-return]


def _check_values(request: EmitItems) -> None:
    for number, value in enumerate(request.values, request.first):
        fault = find_fault([(YIELDED, value)])
        if fault is not None:
            raise CallRefusedError(RefusalKind.INVALID, f"element {number} cannot be stored: {fault}")


def _wake_maps(connection: Connection, task: int, context: CallContext, *, rings: bool) -> tuple[bool, bool]:
    """Have the scheduler look at the maps over a generator; return whether its items are wanted, and are enough now."""
    ((run, name, version, digest),) = _plans.fetch(connection, {"item_task": task})
    whole = load_plan(connection, version, digest)
    plan = whole.tasks[name]
    if not plan.feeds:
        return True, False
    if rings:
        # Unconditionally: a scheduler that is about to unset the mark has not seen the new items.
        wake_maps(connection, {(run, name) for name in plan.feeds})
        context.bells.add(Channel.SCHEDULER)
    consumers = find_consumers(connection, whole, run, name)
    full = consumers.measure(connection, task).is_full(consumers.max_items)
    return bool(set(plan.downstream) - set(plan.feeds)) or consumers.wants, full


@Statement
def _plans(dialect: str) -> Select[Any]:
    return (
        select(_TASK.run, _TASK.task_id, dag_version.c.id, dag_version.c.digest)
        .join(dag_run, dag_run.c.id == _TASK.run)
        .join(dag_version, dag_version.c.id == dag_run.c.version_id)
        .where(_TASK.id == bindparam("item_task"))
    )


def begin_again(connection: Connection, tasks: Iterable[int]) -> None:
    """Have generators that were cleared yield from the start; what they yielded stays, to be compared."""
    for task in tasks:
        connection.execute(delete(map_identity).where(map_identity.c.task == task))
        remove_items(connection, [task], YIELDED + AGAIN)
        if count_items(connection, task, YIELDED):
            add_items(connection, task, YIELDED + AGAIN, 0, ["0"])


def forget_streams(connection: Connection, tasks: Collection[int], sources: Collection[int]) -> None:
    """Forget the streams of tasks that were cleared: their checkpoints, and what they have emitted.

    What `sources` of elements have emitted is left, because `begin_again` keeps it to be compared.
    """
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(tasks))
    streams = [task for (task,) in _streamed.fetch(connection, given)]
    if streams:
        of_streams = trigger_stream.c.task.in_(streams)
        connection.execute(update(trigger_stream).where(of_streams).values(checkpoint=None))
    plain = set(streams) - set(sources)
    if plain:
        remove_items(connection, plain, YIELDED)
        connection.execute(delete(map_identity).where(map_identity.c.task.in_(plain)))


@Statement
def _streamed(dialect: str) -> Select[Any]:
    wanted = select(IDS.build_source(dialect).c.id)
    return select(trigger_stream.c.task).where(trigger_stream.c.task.in_(wanted)).distinct()


def _count_again(connection: Connection, task: int, number: int) -> None:
    mine = and_(_ITEM.task == task, _ITEM.key == YIELDED + AGAIN)
    connection.execute(update(map_item).where(mine).values(value=str(number)))


def read_range(connection: Connection, task: int, key: str, first: int, number: int) -> list[str]:
    """Return the items of a source from `first` on, at most `number`."""
    if number <= 0:
        return []
    given = {"item_task": task, "item_key": key, "first": first, "last": first + number - 1}
    return [value for (value,) in _range.fetch(connection, given)]


@Statement
def _range(dialect: str) -> Select[Any]:
    mine = and_(_ITEM.task == bindparam("item_task"), _ITEM.key == bindparam("item_key"))
    wanted = and_(mine, _ITEM.number >= bindparam("first"), _ITEM.number <= bindparam("last"))
    return select(_ITEM.value).where(wanted).order_by(_ITEM.number)


def add_items(connection: Connection, task: int, key: str, first: int, values: Sequence[str]) -> None:
    """Store items of a source."""
    before = read_size(connection, task, key, first)
    sizes = list(accumulate((len(value.encode()) for value in values), initial=before))[1:]
    rows = zip(range(first, first + len(values)), values, sizes, strict=True)
    given = _NEW.build_parameters(find_dialect(connection), rows)
    _insert.fetch(connection, {**given, "item_task": task, "item_key": key})


@Statement
def _insert(dialect: str) -> Insert:
    given = _NEW.build_source(dialect)
    mine = bindparam("item_task", type_=_ITEM.task.type), bindparam("item_key", type_=_ITEM.key.type)
    rows = select(*mine, given.c.number, given.c.value, given.c.size_up_to).order_by(given.c.position)
    return insert(map_item).from_select(["task", "key", "number", "value", "size_up_to"], rows)


def put_items(connection: Connection, task: int, key: str, first: int, values: Sequence[str], now_us: int) -> None:
    """Store items of a source from `first` on, in place of those that it has there; equal ones are left alone."""
    known = read_range(connection, task, key, first, len(values))
    if known:
        before = read_size(connection, task, key, first)
        sizes = list(accumulate((len(value.encode()) for value in values), initial=before))[1:]
        stored = read_sizes(connection, task, key, first, first + len(known) - 1)
        rows = list(zip(range(first, first + len(known)), values, sizes, known, strict=False))
        changed = [number for number, value, _, old in rows if value != old]
        # The sizes of all items after a longer one differ, too.
        written = [(number, value, size) for number, value, size, old in rows if (value, size) != (old, stored[number])]
        _overwrite_items(connection, task, key, written, changed, now_us)
    if len(values) > len(known):
        add_items(connection, task, key, first + len(known), values[len(known) :])


def _overwrite_items(
    connection: Connection,
    task: int,
    key: str,
    rows: Sequence[tuple[int, str, int]],
    changed: Sequence[int],
    now_us: int,
) -> None:
    dialect = find_dialect(connection)
    if rows:
        given = _CHANGED.build_parameters(dialect, rows)
        _overwrite.fetch(connection, {**given, "item_task": task, "item_key": key})
    if changed:
        notes = _NOTES.build_parameters(dialect, [(number, str(now_us)) for number in changed])
        _note.fetch(connection, {**notes, "item_task": task, "item_key": key + _CHANGES})


@Statement
def _overwrite(dialect: str) -> Executable:
    given = _CHANGED.build_source(dialect)
    return _build_upsert(dialect, given, "value", "size_up_to")


@Statement
def _note(dialect: str) -> Executable:
    return _build_upsert(dialect, _NOTES.build_source(dialect), "value")


def _build_upsert(dialect: str, given: FromClause, *names: str) -> Executable:
    """Build the statement that stores items, or new values of them.

    It looks each one up by its key. An UPDATE with a join compares all items of the source with all given ones.
    """
    mine = bindparam("item_task", type_=_ITEM.task.type), bindparam("item_key", type_=_ITEM.key.type)
    rows = select(*mine, given.c.number, *[given.c[name] for name in names]).where(literal(1) == 1)
    insert_into = (postgresql if dialect == "postgresql" else sqlite).insert
    statement = insert_into(map_item).from_select(["task", "key", "number", *names], rows.order_by(given.c.position))
    new = {name: statement.excluded[name] for name in names}
    return statement.on_conflict_do_update(index_elements=["task", "key", "number"], set_=new)  # type: ignore[no-any-return]


def find_changes(connection: Connection, items: Iterable[tuple[int, str, int]]) -> dict[tuple[int, str, int], int]:
    """Return when items changed, given as task, key and number; those that never did are left out."""
    notes = read_items(connection, {(task, key + _CHANGES, number) for task, key, number in items})
    return {(task, key.removesuffix(_CHANGES), number): int(value) for (task, key, number), value in notes.items()}


def cut_items(connection: Connection, task: int, key: str, end: int) -> None:
    """Remove the items of a source from `end` on."""
    connection.execute(delete(map_item).where(and_(_ITEM.task == task, _ITEM.key == key, _ITEM.number >= end)))


def replace_items(
    connection: Connection, task: int, key: str, values: Sequence[str], now_us: int, *, cuts: bool = True
) -> None:
    """Store all items of a source that is known as a whole; equal ones are left alone.

    `cuts`: whether to remove those after them; elements that are about to be removed may still need them.
    """
    put_items(connection, task, key, 0, values, now_us)
    if cuts:
        cut_items(connection, task, key, len(values))


def select_items(task: int, key: str) -> Select[Any]:
    """Select the items of a source, by index."""
    return select(_ITEM.number.label("place"), _ITEM.value).where(and_(_ITEM.task == task, _ITEM.key == key))


def remove_items(connection: Connection, tasks: Iterable[int], key: str) -> None:
    """Remove the items of sources."""
    connection.execute(delete(map_item).where(and_(_ITEM.task.in_(sorted(tasks)), _ITEM.key == key)))


def read_items(connection: Connection, wanted: Iterable[tuple[int, str, int]]) -> dict[tuple[int, str, int], str]:
    """Return items, given as task, key and number."""
    rows = sorted(set(wanted))
    if not rows:
        return {}
    given = _WANTED.build_parameters(find_dialect(connection), rows)
    return {(task, key, number): value for task, key, number, value in _wanted.fetch(connection, given)}


@Statement
def _wanted(dialect: str) -> Select[Any]:
    given = _WANTED.build_source(dialect)
    same = and_(_ITEM.task == given.c.task, _ITEM.key == given.c.key, _ITEM.number == given.c.number)
    return select(_ITEM.task, _ITEM.key, _ITEM.number, _ITEM.value).join(given, same)
