"""Tasks that start in triggers: the trigger that an admission creates, and the values for its templates.

The arguments are chosen from the structure of the DAG and from stored values; nothing of the user's is executed here.
Texts that are templates stay as they are: a triggerer renders them, with the values that `describe_starts` returns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection

from tidemill.core.tasks.inputs import StartInTrigger
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.structure import StartStructure
from tidemill.store.calls.worker_calls import ClaimedAttempt
from tidemill.store.context import CallContext
from tidemill.store.queries.dags.attempts.claims import build_plain_attempts
from tidemill.store.queries.dags.items.elements import find_elements, note_items
from tidemill.store.queries.dags.state.effects import PackedTrigger, pack_trigger
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.queries.dags.state.transition import Board

#: The queue of triggerers that run such triggers, as for those of `defer`.
_QUEUE = "default"


class StartValues(NamedTuple):
    """The values for the templates of a trigger.

    Attributes:
        attempt: The run and the task.
        element: The mapped arguments of an element, by name, encoded.
        native: Whether templates render to Python values.
        started_us: When the try started.
    """

    attempt: ClaimedAttempt
    element: tuple[tuple[str, str], ...]
    native: bool
    started_us: int


def build_starts(
    connection: Connection, entries: Sequence[TaskEntry], context: CallContext
) -> dict[int, StartInTrigger]:
    """Return how new tries start in triggers, by task; tasks that a worker starts are left out."""
    starting = [entry for entry in entries if starts_in_trigger(entry)]
    if not starting:
        return {}
    reading = [entry for entry in starting if _needs_items(entry)]
    items = find_elements(connection, reading) if reading else {}
    note_items(reading, items)
    return {entry.id: _build(entry, items.get(entry.id, {}), context) for entry in starting}


def starts_in_trigger(entry: TaskEntry) -> bool:
    """Return whether the task begins its next try in a trigger."""
    return entry.plan.structure.start is not None and entry.row.resume is None


def _needs_items(entry: TaskEntry) -> bool:
    start = entry.plan.structure.start
    return start is not None and start.leaf is not None and entry.map_index != UNMAPPED


def _build(entry: TaskEntry, items: Mapping[str, Any], context: CallContext) -> StartInTrigger:
    start = entry.plan.structure.start
    assert start is not None
    kwargs = start.kwargs
    if entry.map_index != UNMAPPED and start.elements:
        kwargs = start.elements[entry.map_index]
    elif entry.map_index != UNMAPPED and start.leaf is not None:
        kwargs = _find_item(start, items, start.leaf) or "null"
    feeds = (2 if start.may_be_empty else 1) if start.feeds else 0
    packed = PackedTrigger(start.classpath, kwargs, _QUEUE, None, int(start.rendered), start.feeds, feeds)
    method_kwargs = context.cipher.encrypt(start.method_kwargs)
    return StartInTrigger(pack_trigger(packed), start.method, method_kwargs, start.timeout_us, start.feeds)


def _find_item(start: StartStructure, items: Mapping[str, Any], leaf: int) -> str | None:
    """Return the encoded item that a leaf gives to an element: a value of another task, or one in the file."""
    stored: tuple[str | None, ...] = items.get("elements", ())
    if leaf < len(stored) and stored[leaf] is not None:
        return stored[leaf]
    own = start.items[leaf] if leaf < len(start.items) else ()
    indexes: tuple[int, ...] = items.get("leaf_indexes", ())
    index = indexes[leaf] if leaf < len(indexes) else -1
    return own[index] if 0 <= index < len(own) else None


def describe_starts(connection: Connection, tasks: Collection[int], context: CallContext) -> dict[int, StartValues]:
    """Return the values for the templates of triggers, by task; a task whose structure is unreadable is left out."""
    if not tasks:
        return {}
    board = Board(connection, context)
    board.read(tasks)
    entries = [entry for entry in board.tasks.values() if entry.plan.structure.start is not None]
    items = find_elements(connection, entries)
    attempts = build_plain_attempts(connection, entries)
    found = {}
    for entry in entries:
        start, mine = entry.plan.structure.start, items.get(entry.id, {})
        assert start is not None
        attempt = msgspec.structs.replace(attempts[entry.id], **mine)
        started_us = entry.started_us if entry.started_us is not None else context.now_us
        found[entry.id] = StartValues(attempt, _list_arguments(entry, start, mine), start.native, started_us)
    return found


def _list_arguments(entry: TaskEntry, start: StartStructure, items: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    mapped = entry.plan.structure.mapped
    if mapped is None:
        return ()
    found, leaf = [], 0
    for name, factor in zip(mapped.arguments, mapped.factors, strict=False):
        text = _find_item(start, items, leaf)
        if text is not None and factor.kind != "zip":
            found.append((name, text))
        leaf += len(factor.leaves)
    return tuple(found)
