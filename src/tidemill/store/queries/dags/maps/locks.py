"""Locks elements of mapped tasks, in order of their index."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Connection,
    Select,
    and_,
    bindparam,
    func,
    literal_column,
    select,
    text,
)

from tidemill.core.tasks.task_row import ENDED
from tidemill.store.dag_tables import IS_BAD_ELEMENT, task_instance
from tidemill.store.queries.dags.state.task_rows import COLUMNS, TaskEntry
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.statements import Statement

_TASK = task_instance.c
_ENDED = tuple(sorted(state.value for state in ENDED))
#: More elements than any map has.
_MANY = 1 << 62


def fetch_elements(
    board: Board, head: TaskEntry, kind: str, first: int, last: int | None, limit: int, wanted: str = ""
) -> list[Any]:
    """Lock elements of a map between two indexes, and return their rows.

    Args:
        board: The board that has locked the run.
        head: The head of the map.
        kind: Which elements; see `_elements`.
        first: The first index.
        last: The last index; None: the highest.
        limit: The number of elements.
        wanted: How elements end already that are left out, if `kind` is `open`.
    """
    given = {
        "of_run": head.run.id,
        "of_task": head.task_id,
        "first": first,
        "last": _MANY if last is None else last,
        "most": limit,
        "wanted": wanted,
    }
    return _elements.fetch(board.connection, given, kind)


def lock_elements(connection: Connection, run: int, task_id: str, first: int, last: int) -> list[Any]:
    """Lock the elements of a mapped task in a range of indexes, and return their rows."""
    given = {"of_run": run, "of_task": task_id, "first": max(0, first), "last": last, "most": _MANY}
    return _elements.fetch(connection, given, "present")


def lock_failed_elements(connection: Connection, run: int, task_id: str) -> list[Any]:
    """Lock the elements of a mapped task that failed, and return their rows."""
    given = {"of_run": run, "of_task": task_id, "first": 0, "last": _MANY, "most": _MANY}
    return _elements.fetch(connection, given, "failed")


@Statement
def _elements(dialect: str, kind: str) -> Select[Any]:
    """Build the statement that locks elements of a map, in order of their index.

    kind: `waiting`: cleared ones; `open`: unfinished ones, except those that are ending as `wanted` or to be removed;
    `unstarted`: unfinished ones that have not started; `failed`; `present`: those that are not removed; `staying`:
    those of them that are not about to be removed; `any`.
    """
    mine: list[Any] = [_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task")]
    mine += [_TASK.map_index >= bindparam("first"), _TASK.map_index <= bindparam("last")]
    unfinished = _TASK.state.not_in([literal_column(f"'{state}'") for state in _ENDED])
    match kind:
        case "waiting":
            mine.append(_TASK.pending == literal_column("2"))
        case "open":
            after = func.coalesce(_TASK.ending_outcome, literal_column("'none'"))
            decided = after.in_([bindparam("wanted"), literal_column("'removed'")])
            same = and_(_TASK.state == literal_column("'ending'"), decided)
            mine += [unfinished, ~same]
        case "unstarted":
            resting = _TASK.state.in_([literal_column("'none'"), literal_column("'ending'")])
            mine += [unfinished, _TASK.tries == _TASK.tries_before, ~resting]
        case "failed":
            mine.append(text(IS_BAD_ELEMENT))
        case "staying":
            after = func.coalesce(_TASK.ending_outcome, literal_column("'none'"))
            goes = and_(_TASK.state == literal_column("'ending'"), after == literal_column("'removed'"))
            mine += [_TASK.state != literal_column("'removed'"), ~goes]
        case "present":
            mine.append(_TASK.state != literal_column("'removed'"))
    return select(*COLUMNS).where(and_(*mine)).order_by(_TASK.map_index).limit(bindparam("most")).with_for_update()
