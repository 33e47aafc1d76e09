"""Stores the long lists in the configuration of a run that tasks are mapped over, item by item.

They arrive before the run exists, in parts, under a number that the client has chosen; the new run takes them over. Its
configuration has a mark with the length in place of each.

Invariants: the items of a list belong to the first mapped task over the param: `map_item.task` is its head. Until the
run takes them over, it is the negated number of the client.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, and_, delete, select, update

from tidemill.core.tasks.instance import UNMAPPED
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.run_calls import StageConfItems
from tidemill.store.context import CallContext, read_now
from tidemill.store.dag_plan import DagPlan
from tidemill.store.dag_tables import dag_run, dag_version, map_item, task_instance
from tidemill.store.queries.dags.items.backlog import count_items, read_size
from tidemill.store.queries.dags.items.items import add_items, put_items
from tidemill.store.queries.dags.state.task_rows import load_plan
from tidemill.store.queries.dags.values.xcoms import find_fault

#: The limit of all lists of a run together.
MAX_STAGED_BYTES = 64 << 20
#: The maximum number of runs for which a user has sent lists, and that do not exist yet.
MAX_STAGES = 20
#: The key of the row that says when the first part of the lists of a client arrived, and the user; no param has this
#: name.
_STAGED = "\x1fstaged"
_DAY_US = 24 * 60 * 60 * 1_000_000
#: The most items of lists that no run has taken over that one call removes.
_REMOVED = 2_000
_ITEM, _TASK = map_item.c, task_instance.c


def stage_items(connection: Connection, request: StageConfItems, context: CallContext) -> None:
    """Store a part of a list for a run that is about to be created; see `StageConfItems`."""
    if not 0 < request.stage < 1 << 62:
        raise CallRefusedError(RefusalKind.INVALID, "the number of the client must be positive and below 2**62")
    for number, value in enumerate(request.values, request.first):
        fault = find_fault([(request.key, value)])
        if fault is not None:
            raise CallRefusedError(RefusalKind.INVALID, f"item {number} of the list cannot be stored: {fault}")
    if request.most is not None and request.first + len(request.values) > request.most:
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"the list {request.key!r} has more than {request.most:,} items (dags.max_map_length); map over parts of "
            "it, or have a generator task read it",
        )
    owner = -request.stage
    if request.first > count_items(connection, owner, request.key):
        raise CallRefusedError(
            RefusalKind.INVALID, f"item {request.first} of the list {request.key!r} follows items that are missing"
        )
    if not count_items(connection, owner, _STAGED):
        _remove_abandoned(connection, context.now_us)
        if request.by and sum(by == request.by for _, _, by in _list_stages(connection)) >= MAX_STAGES:
            raise CallRefusedError(
                RefusalKind.CONFLICT,
                f"{request.by} has sent lists for {MAX_STAGES} runs that do not exist yet; create these runs, or wait "
                "until the lists are removed, a day after their first parts",
            )
        add_items(connection, owner, _STAGED, 0, [f"{context.now_us} {request.by}"])
    put_items(connection, owner, request.key, request.first, request.values, context.now_us)
    _check_size(connection, owner, request.key)


def _check_size(connection: Connection, owner: int, key: str) -> int:
    size = read_size(connection, owner, key, count_items(connection, owner, key))
    if size > MAX_STAGED_BYTES:
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"the list {key!r} has more than {MAX_STAGED_BYTES:,} bytes; pass a reference to larger data, or have a "
            "generator task read it",
        )
    return size


def remove_abandoned(connection: Connection) -> bool:
    """Remove items of lists that no run took over within a day; a bounded number; return whether there may be more."""
    return _remove_abandoned(connection, read_now(connection))


def _remove_abandoned(connection: Connection, now_us: int) -> bool:
    for owner, staged_us, _ in _list_stages(connection):
        if staged_us >= now_us - _DAY_US:
            continue
        mine = and_(_ITEM.task == owner, _ITEM.key != _STAGED)
        some = select(_ITEM.key, _ITEM.number).where(mine).order_by(_ITEM.key, _ITEM.number).limit(_REMOVED)
        rows = connection.execute(some).all()
        for key in {row.key for row in rows}:
            numbers = [row.number for row in rows if row.key == key]
            part = and_(_ITEM.task == owner, _ITEM.key == key, _ITEM.number.between(min(numbers), max(numbers)))
            connection.execute(delete(map_item).where(part))
        if len(rows) < _REMOVED:
            connection.execute(delete(map_item).where(_ITEM.task == owner))
        return True
    return False


def _list_stages(connection: Connection) -> list[tuple[int, int, str]]:
    """Return the owners of lists that no run has taken over, with the time of the first part and the user."""
    mine = and_(_ITEM.task < 0, _ITEM.key == _STAGED)
    rows = connection.execute(select(_ITEM.task, _ITEM.value).where(mine).order_by(_ITEM.task)).all()
    stages = [(owner, *value.partition(" ")) for owner, value in rows]
    return [(owner, int(staged_us), by) for owner, staged_us, _, by in stages]


def take_lists(connection: Connection, run: int, plan: DagPlan, lists: Mapping[str, int], stage: int) -> None:
    """Have a new run take over the lists that a client has stored for it.

    Args:
        connection: A connection inside the transaction that has created the run and its tasks.
        run: The run.
        plan: Its plan.
        lists: The lengths of the lists by param.
        stage: The number that the client has chosen.

    Raises:
        CallRefusedError: A list is incomplete, no task is mapped over it, or all are too large together.
    """
    size = 0
    for name, length in lists.items():
        task_id = find_owner(plan, name)
        if task_id is None or stage <= 0 or count_items(connection, -stage, name) != length:
            reason = "no task is mapped over it" if task_id is None else "not all of its items have been sent"
            raise CallRefusedError(
                RefusalKind.INVALID, f"the list {name!r} of the configuration cannot be stored by items: {reason}"
            )
        size += _check_size(connection, -stage, name)
        mine = and_(_TASK.run == run, _TASK.task_id == task_id, _TASK.map_index == UNMAPPED)
        head = connection.execute(select(_TASK.id).where(mine)).scalar_one()
        staged = and_(_ITEM.task == -stage, _ITEM.key == name)
        connection.execute(update(map_item).where(staged).values(task=head))
    if size > MAX_STAGED_BYTES:
        raise CallRefusedError(
            RefusalKind.INVALID, f"the lists of a configuration may have up to {MAX_STAGED_BYTES:,} bytes together"
        )
    if stage > 0:
        connection.execute(delete(map_item).where(_ITEM.task == -stage))


def find_owner(plan: DagPlan, name: str) -> str | None:
    """Return the task that the items of a list belong to: the first one that is mapped over the param."""
    for task_id, one in plan.tasks.items():
        mapped = one.structure.mapped
        if mapped is not None and any((leaf.kind, leaf.key) == ("param", name) for leaf in mapped.leaves):
            return task_id
    return None


def find_list(connection: Connection, run: int, name: str) -> int | None:
    """Return the task instance that the items of a list in the configuration of a run belong to."""
    of_run = select(dag_version.c.id, dag_version.c.digest).join(dag_run, dag_run.c.version_id == dag_version.c.id)
    plan = load_plan(connection, *connection.execute(of_run.where(dag_run.c.id == run)).one())
    task_id = find_owner(plan, name)
    mine = and_(_TASK.run == run, _TASK.task_id == task_id, _TASK.map_index == UNMAPPED)
    found = connection.execute(select(_TASK.id).where(mine)).scalar()
    return None if found is None else int(found)
