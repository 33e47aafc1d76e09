"""Has a map follow another one element by element: the elements of one appear as those of the other end.

Theory of operation: the transaction that ends an element adds its index to the queue of each follower, and marks the
follower (`map_queue`). A step of the follower takes the lowest indexes that its window has room for, reads the elements
with these indexes, creates its own, and removes the indexes from the queue. An element costs one short row that is
inserted and removed, however far the follower lags behind.

Invariants: a step locks the elements of all its maps, then the indexes that it takes, then the maps. An index that was
passed on in the meantime leaves the follower marked, so that no element ends unseen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import and_, select

from tidemill.core.tasks.dependencies import TaskOutcome
from tidemill.core.tasks.expansion import follow
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.task_row import STATES, TaskState
from tidemill.store.batches import find_dialect
from tidemill.store.dag_tables import task_instance
from tidemill.store.queries.dags.items.results import read_results
from tidemill.store.queries.dags.state.map_queue import lock_queue, queue_all, read_queue
from tidemill.store.queries.dags.state.map_rows import read_ends
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.queries.dags.state.transition import Board

_TASK = task_instance.c
_OUTCOMES = {state.value: outcome for outcome, state in STATES.items()}


@dataclass(slots=True)
class Following:
    """What a map takes over from the one that it follows in a step.

    Attributes:
        source: The task that it follows.
        key: The key of the XComs that are its items.
        outcome: The outcome of the other map; None: it has not ended.
        end: The index from which on the other map has no elements.
        asked: The number of indexes that the queue was asked for.
        found: The indexes that the queue has.
        states: The states in which the elements with the locked indexes appear; None: there is nothing to follow.
        fresh: The indexes of the elements to start.
        left: Whether some of the indexes that were found have to wait.
    """

    source: str
    key: str
    outcome: TaskOutcome | None
    end: int
    asked: int
    found: list[int]
    states: dict[int, TaskState | None] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)
    left: bool = False

    @property
    def failed(self) -> bool:
        """Whether the other map failed."""
        return self.outcome in (TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED)


def find_passed(board: Board, head: TaskEntry, limit: int, *, opens: bool) -> Following:
    """Return what a follower may take, at most `limit` elements; those of its own that exist are locked.

    Args:
        board: The board.
        head: The head of the follower.
        limit: The number of elements.
        opens: Whether the follower opens: all elements that have ended are passed on to it.
    """
    mapped, source = head.plan.structure.mapped, head.plan.structure.follows
    assert mapped is not None
    assert source is not None
    connection, run = board.connection, head.run
    mine = and_(_TASK.run == run.id, _TASK.task_id == source, _TASK.map_index == UNMAPPED)
    state = connection.execute(select(_TASK.state).where(mine)).scalar_one()
    end = read_ends(connection, run)[source]
    if opens:
        queue_all(connection, head.id, run.id, source, end)
    found = read_queue(connection, head.id, limit) if limit > 0 else []
    board.load((run.id, head.task_id, index) for index in found)
    return Following(source, mapped.factors[0].key, _OUTCOMES.get(state), end, limit, found)


def lock_passed(board: Board, head: TaskEntry, following: Following) -> None:
    """Lock the indexes that a follower may take, and read the elements with them."""
    if not following.found:
        return
    connection = board.connection
    locked = lock_queue(connection, head.id, following.found)
    results = read_results(connection, head.run.id, following.source, following.key, locked, head.task_id)
    for number in locked:
        state, has_item = results.get(number, ("", False))
        outcome = _OUTCOMES.get(state) if number < following.end else None
        following.states[number] = None if outcome is None else follow(outcome, has_item)


def find_unseen(board: Board, head: TaskEntry, following: Following) -> list[int]:
    """Return indexes that a follower could take but has not locked, because others passed them on during the step.

    Call this once the map is locked: a transaction that passes on an index afterwards marks the map again.
    """
    connection = board.connection
    if len(following.found) >= following.asked or find_dialect(connection) != "postgresql":
        return []  # the window is full, or there are no other writers
    numbers = read_queue(connection, head.id, len(following.states) + 1)
    unseen = [number for number in numbers if number not in following.states]
    return lock_queue(connection, head.id, unseen) if unseen else []
