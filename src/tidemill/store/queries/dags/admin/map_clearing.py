"""Clears and marks maps that follow other maps element by element, together with what they follow.

Invariants: an element of a follower that a user clears runs again at once only if the element with its index, which it
follows, has a result. Otherwise it is removed, and comes back when the other element has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tidemill.core.tasks.attempt import Moved
from tidemill.core.tasks.inputs import Remove
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.task_row import STATES, TaskState
from tidemill.store.queries.dags.items.results import read_results
from tidemill.store.queries.dags.state.map_rows import read_ends
from tidemill.store.queries.dags.state.task_rows import RunEntry, TaskEntry
from tidemill.store.queries.dags.state.transition import Board

_OUTCOMES = frozenset(state.value for state in STATES.values())


@dataclass(slots=True)
class Refollowing:
    """The elements that are cleared with those that they follow.

    Attributes:
        entries: The tasks to clear.
        gone: The elements among them that come back when those that they follow have ended.
        again: Those of `gone` whose other elements have ended already, as follower and index.
        reopened: The heads of the maps that follow again.
    """

    entries: list[TaskEntry]
    gone: set[int] = field(default_factory=set)
    again: list[tuple[str, int]] = field(default_factory=list)
    reopened: dict[int, TaskEntry] = field(default_factory=dict)


def select_followers(board: Board, run: RunEntry, entries: Sequence[TaskEntry]) -> Refollowing:
    """Return the tasks to clear: of a follower of a map that is cleared in part, only elements with the same indexes.

    Args:
        board: The board that has locked the run and the tasks.
        run: The run.
        entries: The tasks that a user wants to clear.
    """
    found = Refollowing(list(entries))
    if not any(plan.followers for plan in run.plan.tasks.values()):
        return found
    ends = read_ends(board.connection, run)
    heads = {entry.task_id: entry for entry in entries if entry.map_index == UNMAPPED}
    parts: dict[str, set[int]] = {}
    for entry in entries:
        if entry.map_index != UNMAPPED:
            parts.setdefault(entry.task_id, set()).add(entry.map_index)
    left = [name for name in parts if name not in heads]
    while left:
        source = left.pop(0)
        for name in run.plan.tasks[source].followers:
            head = heads.get(name)
            if head is None or not ends[name] or head.row.state is TaskState.ENDING:
                continue  # the whole map is cleared, or none of it
            del heads[name]
            found.entries.remove(head)
            found.reopened[head.id] = head
            indexes = parts[source] - parts.get(name, set())
            parts.setdefault(name, set()).update(indexes)
            board.load((run.id, name, index) for index in sorted(indexes))
            elements = [board.find(run.id, name, index) for index in sorted(indexes)]
            found.entries += [entry for entry in elements if entry is not None]
            left.append(name)
    _find_gone(board, run, found, heads.keys(), parts, ends)
    return found


def _find_gone(
    board: Board,
    run: RunEntry,
    found: Refollowing,
    whole: Iterable[str],
    parts: dict[str, set[int]],
    ends: dict[str, int],
) -> None:
    """Find the elements whose other elements have no result, or are cleared too."""
    wholes = set(whole)
    for name, indexes in parts.items():
        structure = run.plan.tasks[name].structure
        source, mapped = structure.follows, structure.mapped
        if source is None or mapped is None or name in wholes:
            continue
        states = read_results(board.connection, run.id, source, mapped.factors[0].key, indexes, name)
        for index in sorted(indexes):
            state, has_item = states.get(index, ("", False))
            cleared = source in wholes or index in parts.get(source, ()) or index >= ends[source]
            if state == "success" and has_item and not cleared:
                continue
            entry = board.find(run.id, name, index)
            if entry is None:
                continue
            found.gone.add(entry.id)
            if state in _OUTCOMES and not cleared:
                found.again.append((name, index))
            board.load([(run.id, name, UNMAPPED)])
            head = board.find(run.id, name)
            if head is not None and head.row.state is not TaskState.ENDING:
                found.reopened[head.id] = head


def forget_failures(board: Board, run: RunEntry, marked: Sequence[TaskEntry], by: str) -> list[TaskEntry]:
    """Remove elements that failed only with elements that a user marked as successes; return the heads of their maps.

    They come back if the marked elements have results.
    """
    if not any(entry.map_index != UNMAPPED and entry.plan.followers for entry in marked):
        return []
    ends = read_ends(board.connection, run)
    heads: dict[int, TaskEntry] = {}
    left = [(entry.plan.followers, entry.map_index) for entry in marked if entry.map_index != UNMAPPED]
    while left:
        followers, index = left.pop()
        board.load((run.id, name, number) for name in followers for number in (UNMAPPED, index))
        for name in followers:
            head, entry = board.find(run.id, name), board.find(run.id, name, index)
            if head is None or entry is None or not ends[name] or head.row.state is TaskState.ENDING:
                continue
            if entry.row.state is TaskState.UPSTREAM_FAILED and isinstance(board.give(entry, Remove(), by), Moved):
                heads[head.id] = head
                left.append((entry.plan.followers, index))
    return list(heads.values())
