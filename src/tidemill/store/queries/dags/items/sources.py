"""Finds the items of a map when it opens, and which of them an element combines.

Invariants: the sources of a map are read while its run is locked, so that none of them ends in the meantime. The items
of lists are stored when the map opens, and once more after a source was cleared and has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, and_, bindparam, literal_column, select

from tidemill.core.tasks.dependencies import TaskOutcome
from tidemill.core.tasks.expansion import locate_items
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.structure import LoopStructure, MapSource, MapStructure
from tidemill.core.tasks.task_row import STATES
from tidemill.runtime.json import codec
from tidemill.store.dag_tables import dag_run, task_instance, xcom
from tidemill.store.queries.dags.items.backlog import YIELDED, count_items
from tidemill.store.queries.dags.items.conf_lists import find_list
from tidemill.store.queries.dags.items.items import remove_items, replace_items, select_items
from tidemill.store.queries.dags.items.results import copy_pairs, copy_parts, copy_results, select_parts, select_results
from tidemill.store.queries.dags.items.stored_sources import NO_SOURCES, StoredSources
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.queries.dags.values.list_marks import read_mark
from tidemill.store.queries.dags.values.run_params import build_params
from tidemill.store.statements import Statement

_OUTCOMES = {state.value: outcome for outcome, state in STATES.items()}
_FAILURES = (TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED)


class OpenedSources(msgspec.Struct, frozen=True):
    """The state of the sources of a map.

    Attributes:
        sources: Where their items are.
        arrived: The number of elements that they have items for.
        outcome: How they ended; None: a generator may still yield.
        error: Why they have no items, for users; empty: they have.
    """

    sources: StoredSources
    arrived: int = 0
    outcome: TaskOutcome | None = None
    error: str = ""


class _Instance(msgspec.Struct, frozen=True):
    id: int
    outcome: TaskOutcome | None


class _UnusableValueError(Exception):
    """A value cannot be mapped over; the message is for users."""


def open_sources(connection: Connection, head: TaskEntry, now_us: int, *, cuts: bool = True) -> OpenedSources | None:
    """Store the items of the sources of a map; None: the map has to wait until a source has ended.

    Args:
        connection: A connection inside a transaction.
        head: The head of the map.
        now_us: The database's time.
        cuts: Whether to remove items that sources no longer have.
    """
    mapped = head.plan.structure.mapped
    assert mapped is not None
    found = _find_instances(connection, head.run.id, mapped.sources)
    lists = {leaf.task for leaf in mapped.leaves if leaf.kind == "xcom"}
    ended = [found[name].outcome for name in mapped.sources if name in lists]
    # The rule of the mapped task has decided over maps that it needs as a whole; it may tolerate that they failed.
    if None in ended or any(found[name].outcome is None for name in mapped.maps):
        return None
    bad = next((one for one in (*_FAILURES, TaskOutcome.SKIPPED) if one in ended), None)
    if bad is not None:
        return OpenedSources(NO_SOURCES, 0, bad)
    try:
        sources = _store_sources(connection, head, mapped, found, now_us, cuts=cuts)
    except _UnusableValueError as error:
        return OpenedSources(NO_SOURCES, 0, TaskOutcome.FAILED, str(error))
    arrived, outcome = look_at_sources(connection, head, sources)
    return OpenedSources(sources, arrived, outcome)


def look_at_sources(
    connection: Connection, head: TaskEntry, sources: StoredSources, created: int = 0
) -> tuple[int, TaskOutcome | None]:
    """Return for how many elements the sources of an open map have items, and how they ended.

    Args:
        connection: A connection inside a transaction.
        head: The head of the map.
        sources: Its sources.
        created: The number of its elements; a loop goes on after the last of them.
    """
    mapped = head.plan.structure.mapped
    assert mapped is not None
    if mapped.loop is not None:
        return look_at_gate(connection, head.run.id, mapped.loop, created)
    place = next((place for place, factor in enumerate(mapped.factors) if factor.kind == "generator"), None)
    if place is None:
        return prod(sources.factors), TaskOutcome.SUCCESS
    name = mapped.factors[place].task
    source = _find_instances(connection, head.run.id, (name,))[name]
    rest = prod(length for number, length in enumerate(sources.factors) if number != place)
    return count_items(connection, source.id, YIELDED) * rest, source.outcome


def look_at_gate(connection: Connection, run: int, loop: LoopStructure, created: int) -> tuple[int, TaskOutcome | None]:
    """Return how many iterations a loop has, and how it ended; None: it may go on.

    Args:
        connection: A connection inside a transaction.
        run: The run.
        loop: The loop.
        created: The number of iterations that exist.
    """
    if not created:
        return 1, None
    given = {"of_run": run, "of_gate": loop.gate, "last": created - 1, "next": created}
    rows = {index: (state, value) for index, state, value in _gates.fetch(connection, given)}
    state, decision = rows.get(created - 1, ("none", None))
    outcome = _OUTCOMES.get(state)
    if outcome is None:
        return created, None
    if outcome is not TaskOutcome.SUCCESS or _is_done(decision) or created >= loop.max_iterations:
        return created, TaskOutcome.SUCCESS
    # An iteration that a user has taken back may still be ending; it is made anew after that.
    following = rows.get(created, ("removed", None))[0]
    return created + (following == "removed" or following in _OUTCOMES), None


def _is_done(decision: str | None) -> bool:
    """Return whether the gate of a loop has decided to end it."""
    value = None if decision is None else codec.decode(decision)
    return not isinstance(value, dict) or bool(value.get("done", True))


@Statement
def _gates(dialect: str) -> Select[Any]:
    columns = task_instance.c
    mine = and_(columns.run == bindparam("of_run"), columns.task_id == bindparam("of_gate"))
    stored = and_(xcom.c.task == columns.id, xcom.c.key == literal_column("'return_value'"))
    there = and_(columns.map_index >= bindparam("last"), columns.map_index <= bindparam("next"))
    rows = select(columns.map_index, columns.state, xcom.c.value).select_from(task_instance).outerjoin(xcom, stored)
    return rows.where(and_(mine, there))


def _find_instances(connection: Connection, run: int, names: Sequence[str]) -> dict[str, _Instance]:
    columns = task_instance.c
    mine = and_(columns.run == run, columns.task_id.in_(names), columns.map_index == UNMAPPED)
    rows = connection.execute(select(columns.id, columns.task_id, columns.state).where(mine))
    return {name: _Instance(number, _OUTCOMES.get(state)) for number, name, state in rows}


def _store_sources(
    connection: Connection,
    head: TaskEntry,
    mapped: MapStructure,
    found: dict[str, _Instance],
    now_us: int,
    *,
    cuts: bool,
) -> StoredSources:
    owners: list[tuple[int, str] | None] = []
    lengths: list[int] = []
    factors: list[int] = []
    for argument, factor in zip(mapped.arguments, mapped.factors, strict=True):
        if len(factor.leaves) > 1 and any(leaf.has_gaps for leaf in factor.leaves):
            paired, number = _store_pairs(connection, head, factor, found, now_us, first=len(owners))
            owners += paired
            lengths += [number] * len(paired)
            factors.append(number)
            continue
        parts = []
        for leaf in factor.leaves:
            owner, length = _store_leaf(connection, head, leaf, found, now_us, takes_dict=argument != "**", cuts=cuts)
            owners.append(owner)
            parts.append(length)
        lengths += parts
        factors.append(_count_factor(factor, parts))
    return StoredSources(tuple(owners), tuple(lengths), tuple(factors))


def _store_pairs(
    connection: Connection, head: TaskEntry, factor: MapSource, found: dict[str, _Instance], now_us: int, *, first: int
) -> tuple[list[tuple[int, str]], int]:
    """Store the items of a zip with the results of maps: equal indexes belong together, and some may be missing.

    Returns:
        The owners of the items, by leaf, and the number of pairs.
    """
    owners, parts = [], []
    for place, leaf in enumerate(factor.leaves, first):
        # As below, the name cannot be that of a param.
        owners.append((head.id, f"{leaf.task}[{place}].{leaf.key}"))
        remove_items(connection, [head.id], owners[-1][1])
        if leaf.kind == "map":
            parts.append(select_results(head.run.id, leaf.task, leaf.key))
        elif leaf.kind == "results":
            parts.append(select_parts(head.run.id, leaf.task))
        else:
            owner, _ = _store_leaf(connection, head, leaf, found, now_us, takes_dict=True)
            assert owner is not None  # zip() takes no literals
            parts.append(select_items(*owner))
    return owners, copy_pairs(connection, parts, owners, fills=factor.fills)


def _count_factor(factor: MapSource, parts: Sequence[int]) -> int:
    return max(parts) if factor.fills else min(parts)


def _store_leaf(
    connection: Connection,
    head: TaskEntry,
    leaf: MapSource,
    found: dict[str, _Instance],
    now_us: int,
    *,
    takes_dict: bool,
    cuts: bool = True,
) -> tuple[tuple[int, str] | None, int]:
    match leaf.kind:
        case "literal":
            return None, leaf.length or 0
        case "loop":
            return None, 0
        case "generator":
            return (found[leaf.task].id, YIELDED), 0
        case "map":
            # The name of a param may be anything, but a task's id has no brackets.
            name = f"{leaf.task}[].{leaf.key}"
            remove_items(connection, [head.id], name)
            copy_results(connection, head.run.id, leaf.task, leaf.key, head.id, name)
            return (head.id, name), count_items(connection, head.id, name)
        case "results":
            name = f"{leaf.task}[].{leaf.key}"
            remove_items(connection, [head.id], name)
            copy_parts(connection, head.run.id, leaf.task, head.id, name)
            return (head.id, name), count_items(connection, head.id, name)
        case "xcom":
            task = found[leaf.task].id
            value = connection.execute(select(xcom.c.value).where(and_(xcom.c.task == task, xcom.c.key == leaf.key)))
            text = value.scalar()
            length = read_mark(text)
            if length is not None:
                return (task, leaf.key), length
            items = _split(text, f"the XCom {leaf.key!r} of task {leaf.task!r}", takes_dict=takes_dict)
            replace_items(connection, task, leaf.key, items, now_us, cuts=cuts)
            return (task, leaf.key), len(items)
        case _:
            text = _read_param(connection, head, leaf.key)
            length = read_mark(text)
            if length is not None:
                list_of = find_list(connection, head.run.id, leaf.key)
                assert list_of is not None  # this task is mapped over it
                return (list_of, leaf.key), length
            items = _split(text, f"the param {leaf.key!r}", takes_dict=takes_dict)
            replace_items(connection, head.id, leaf.key, items, now_us)
            return (head.id, leaf.key), len(items)


def _read_param(connection: Connection, head: TaskEntry, name: str) -> str | None:
    conf = connection.execute(select(dag_run.c.conf).where(dag_run.c.id == head.run.id)).scalar_one()
    params = msgspec.json.decode(build_params(head.run.plan, conf), type=dict[str, msgspec.Raw])
    return bytes(params[name]).decode() if name in params else None


def _split(text: str | None, name: str, *, takes_dict: bool) -> list[str]:
    """Return the encoded items of an encoded list or dict; those of a dict are pairs of key and value.

    Raises:
        _UnusableValueError: The value is neither.
    """
    if text is not None and text.startswith("["):
        return [bytes(item).decode() for item in msgspec.json.decode(text, type=list[msgspec.Raw])]
    value = None if text is None else codec.decode(text)
    if isinstance(value, (list, tuple)):
        return [codec.encode(item) for item in value]
    if isinstance(value, dict) and takes_dict:
        return [codec.encode(pair) for pair in value.items()]
    wanted = "a list or a dict" if takes_dict else "a list of dicts"
    given = "there is none" if text is None else f"it is {type(value).__name__}"
    raise _UnusableValueError(f"MapError: a task is mapped over {name}, which must be {wanted}; {given}")


def locate_leaves(mapped: MapStructure, sources: StoredSources, index: int) -> tuple[int, ...]:
    """Return, per leaf, the number of the item that an element has; -1: the part of a zip has ended and is filled."""
    found: list[int] = []
    for factor, number in zip(mapped.factors, locate_items(index, sources.factors, mapped.slowest), strict=True):
        for leaf in factor.leaves:
            ended = leaf.kind != "generator" and number >= sources.lengths[len(found)]
            found.append(-1 if ended else number)
    return tuple(found)
