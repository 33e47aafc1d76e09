"""Chooses and locks the elements that a step of a map may change; the map is locked after them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.core.tasks.attempt import order_elements
from tidemill.core.tasks.expansion import MapStopReason, count_room
from tidemill.core.tasks.inputs import Cancel, Mark, Remove
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.queries.dags.maps.follow import Following, find_passed
from tidemill.store.queries.dags.maps.groups import UNITS, GroupWork, find_parts, has_units, prepare_units
from tidemill.store.queries.dags.maps.locks import fetch_elements
from tidemill.store.queries.dags.maps.policy import get_policy, may_start
from tidemill.store.queries.dags.maps.reopening import find_next
from tidemill.store.queries.dags.state.map_rows import StoredMap
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.queries.dags.state.transition import Board

#: The most elements of a map that one step changes, besides new ones.
ELEMENTS = 500


@dataclass(slots=True)
class MapWork:
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
        reopens: Whether a map that follows another one follows it again, or a source of another map was cleared.
        comparing: The indexes of the elements to compare with the items that a source gives again.
        compared: These elements.
        is_short: Whether no element is left beyond the end of sources that ran again.
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
    comparing: range = range(0)
    compared: list[TaskEntry] = field(default_factory=list)
    is_short: bool = False
    group: GroupWork | None = None
    removed_to: int | None = None


def prepare(board: Board, head: TaskEntry, stored: StoredMap, reopens: bool) -> MapWork:
    """Lock the elements that may get an input; a map is locked after them."""
    follows = head.plan.structure.follows is not None
    work, row = MapWork(head, reopens=reopens and (stored.sources is not None or not follows)), stored.row
    if not (follows or work.reopens) and head.row.ending is None:
        work.comparing = find_next(board.connection, head, stored)
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
    if work.comparing:
        work.comparing = work.comparing[:ELEMENTS]
        first, last = work.comparing[0], work.comparing[-1]
        work.compared = board.add_elements(fetch_elements(board, head, "any", first, last, ELEMENTS))
    if row.created < stored.made and row.stop is None and not follows:
        last = min(row.created + policy.max_outstanding, stored.made) - 1
        entries = board.add_elements(fetch_elements(board, head, "any", row.created, last, policy.max_outstanding))
        work.known = {entry.map_index: entry for entry in entries}
    end = find_end(stored)
    if row.closed and row.opened and stored.made > end and not has_failed_again(stored):
        rows = fetch_elements(board, head, "staying", end, stored.made - 1, ELEMENTS)
        work.gone = board.add_elements(rows)
        if len(rows) < ELEMENTS:
            work.empty_from = end
        # Those that are ending mark the map when they have ended.
        if not rows and row.created > end:
            work.is_short = not fetch_elements(board, head, "present", end, row.created - 1, 1)
    if head.row.outcome is not None and not row.opened and not stored.keeps:
        # It ended without elements; those of its former life have no part in it.
        rows = fetch_elements(board, head, "present", 0, None, ELEMENTS)
        work.gone = board.add_elements(rows)
        work.left = len(rows) >= ELEMENTS
    elif follows and head.row.ending is None:
        _prepare_follower(board, work, stored)
    return work


def _prepare_group(board: Board, work: MapWork, stored: StoredMap) -> MapWork:
    row, head = stored.row, work.head
    group = work.group = GroupWork(head, find_parts(board, head))
    end = find_end(stored) if row.closed and row.opened else None
    work.sweeps = head.row.ending is None and _has_to_sweep(stored)
    window = get_policy(head, stored.limits).max_outstanding if may_start(head) else 0
    work.comparing = group.comparing = work.comparing[:UNITS]
    work.left = prepare_units(board, group, stored, window=window, end=end, sweeps=work.sweeps)
    if end is not None and len(group.gone) < UNITS:
        work.empty_from = end
        if not group.gone and row.created > end:
            work.is_short = not has_units(board, group, end, row.created)
    return work


def _has_to_sweep(stored: StoredMap) -> bool:
    """Whether a map that stopped itself has to cancel elements that have not started.

    That happens once: elements that a user clears afterwards run again.
    """
    return stored.row.stop in (MapStopReason.FAILED_ELEMENTS, MapStopReason.TOO_LONG) and not stored.swept


def _prepare_follower(board: Board, work: MapWork, stored: StoredMap) -> None:
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


def find_end(stored: StoredMap) -> int:
    """Return the index from which on a closed map has no elements."""
    return stored.row.arrived if stored.row.stop is None else stored.row.created


def has_failed_again(stored: StoredMap) -> bool:
    """Whether the source of a map failed after it was cleared; the results beyond its last item wait for the next."""
    return stored.keeps and stored.row.upstream_failed > 0


def _order(board: Board, work: MapWork, ordered: Mark | Remove, wanted: str) -> None:
    rows = fetch_elements(board, work.head, "open", 0, None, ELEMENTS, wanted)
    work.orders = ordered, board.add_elements(rows)
    work.left = len(rows) >= ELEMENTS
