"""Has the scheduler look at the maps that are marked, and bounds how many elements one turn creates.

Invariants: a map whose window has more room than a turn could use stays marked, or is marked again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Connection,
    Select,
    and_,
    bindparam,
    literal_column,
    or_,
    select,
)

from tidemill.store.batches import find_dialect
from tidemill.store.calls.service_calls import MapLimits
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag_run, task_map
from tidemill.store.queries.dags.maps.groups import UNITS
from tidemill.store.queries.dags.maps.policy import get_policy, may_start
from tidemill.store.queries.dags.maps.preparation import ELEMENTS
from tidemill.store.queries.dags.maps.steps import look_at_maps
from tidemill.store.queries.dags.scheduling.fair_order import PRIME, order_fairly
from tidemill.store.queries.dags.state.map_rows import DEFAULT_LIMITS, read_maps
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.queries.dags.state.tasks import close_board
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.isolation import work_on_runs
from tidemill.store.queries.triggers.cursors import SKIPPED, build_id_rows
from tidemill.store.statements import Statement

#: The most maps that one turn looks at.
MAPS = 50
#: The most elements that one turn creates or starts again.
STARTED = 5_000
#: How many elements one turn compares with new items, those of the tasks of mapped groups included; one map more may
#: exceed it.
COMPARED = 5_000
_MAP = task_map.c


class _Marked(NamedTuple):
    """A map that is marked, and the counts that say how many elements it may start."""

    head: int
    opened: int
    closed: int
    arrived: int
    created: int
    compared: int | None
    waiting: int
    unfinished: int
    retrying: int
    max_outstanding: int | None


def expand_maps(
    connection: Connection,
    context: CallContext,
    skip: Collection[int] = (),
    limits: MapLimits = DEFAULT_LIMITS,
    most: int = STARTED,
    due: bool = False,
) -> int:
    """Look at the maps that are marked; return their number.

    Args:
        connection: A connection inside a transaction.
        context: The transaction's context.
        skip: Runs to skip.
        limits: The limits of maps that open now.
        most: The maximum number of elements to create or to start again, those of the tasks of mapped groups included.
        due: Whether to look at maps with a chunk that is due, too.
    """
    given = SKIPPED.build_parameters(find_dialect(connection), build_id_rows(skip)) if skip else {}
    given |= {"most": MAPS, "turn": context.now_us % PRIME, "now": context.now_us}
    comparable = COMPARED
    found = sorted(_pending.fetch(connection, given, bool(skip), due))

    def expand(marked: list[_Marked]) -> int:
        nonlocal most, comparable
        board = Board(connection, context)
        board.lock([one.head for one in marked])
        heads, limited = [], []
        groups = set()  # those that stay marked
        for one in marked:
            head = board.tasks.get(one.head)
            if head is None or (head.run.id, head.plan.structure.mapped_group) in groups:
                continue
            window = _find_window(head, (one.opened and one.max_outstanding) or limits.max_outstanding)
            wanted = _estimate_starts(head, one, window)
            # An element of a mapped group is created with all its tasks.
            size = 1 + len(head.run.plan.groups.get(head.task_id, ()))
            if one.compared is not None:
                if comparable <= 0:
                    context.left = True
                    groups.add((head.run.id, head.task_id))
                    continue
                comparable -= UNITS * size if size > 1 else ELEMENTS
            room = -(-most // size)
            if wanted > room:
                context.left = True
                if not room:
                    groups.add((head.run.id, head.task_id))
                    continue
                head.window = one.unfinished + _count_retrying(window, one.retrying) + room
                limited.append(head)
            most -= min(wanted * size, most)
            heads.append(head)
        look_at_maps(board, heads, limits)
        _mark_again(board, limited)
        close_board(board, stops=False)
        return len(marked)

    return work_on_runs(connection, context, [(run, _Marked(*values)) for run, *values in found], expand)


@Statement
def _pending(dialect: str, skips: bool, due: bool) -> Select[Any]:
    wanted: list[Any] = [_MAP.pending == literal_column("1")]
    if due:
        wanted = [or_(*wanted, and_(_MAP.due_us.is_not(None), _MAP.due_us <= bindparam("now", type_=BigInteger())))]
    if skips:
        wanted.append(_MAP.run.not_in(select(SKIPPED.build_source(dialect).c.id)))
    counts = [_MAP[name] for name in _Marked._fields if name != "head"]
    statement = select(_MAP.run, _MAP.task, *counts).join(dag_run, dag_run.c.id == _MAP.run).where(and_(*wanted))
    statement = statement.order_by(order_fairly(_MAP.task, bindparam("turn", type_=BigInteger()))).limit(
        bindparam("most")
    )
    return statement.with_for_update(of=dag_run, skip_locked=True, key_share=True)


def _estimate_starts(head: TaskEntry, one: _Marked, window: int) -> int:
    """Return how many elements a map creates or starts again at most."""
    if not may_start(head) or head.plan.structure.mapped_group:
        return 0
    room = window - one.unfinished - _count_retrying(window, one.retrying)
    if one.opened and one.closed:
        # Elements beyond a new end are removed, not started.
        room = min(room, max(0, one.arrived - one.created) + one.waiting)
    return max(room, 0)


def _find_window(head: TaskEntry, max_outstanding: int) -> int:
    """Return how many elements of a map may be unfinished. `max_outstanding`: unless the task sets it."""
    return get_policy(head, MapLimits(max_outstanding)).max_outstanding


def _count_retrying(window: int, retrying: int) -> int:
    """Return how many elements that wait for a retry count in the window, at most."""
    return min(retrying, (window + 1) // 2)


def _mark_again(board: Board, heads: Sequence[TaskEntry]) -> None:
    """Mark maps whose window has more room than this transaction could use."""
    stored = read_maps(board.connection, [head.id for head in heads], locks=False) if heads else {}
    for head in heads:
        head.window = None
        row = stored[head.id].row
        # How many elements a map that follows another one may start is known once it looks.
        more = row.created < row.arrived or (head.plan.structure.follows is not None and not row.closed)
        left = row.waiting or (row.stop is None and more)
        window = _find_window(head, stored[head.id].limits.max_outstanding)
        room = window - row.unfinished - _count_retrying(window, row.retrying)
        if left and room > 0 and may_start(head):
            board.maps.wake(head.run.id, head.task_id)
