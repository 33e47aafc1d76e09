"""The expansion of a mapped task: which elements exist, which are created next, and what they tell together.

`feed(row, given, policy)` returns the map's new row and the work to do; it does nothing itself. A map is one row of
counts, however many elements it has: neither memory nor the cost of a step grows with their number.

Items arrive in order, and elements are created in order of their index. So a cursor says which exist: elements below
`created` do. A window bounds how many are unfinished at a time; elements in retry fill at most half of it, so that
elements that fail for long do not hold up the others. Elements that a user cleared wait until the window has room for
them, and come before new ones.

A map that follows another one element by element has no cursor, because the elements of the other end in any order:
each of its elements appears (`ElementsMoved` from REMOVED) in the state that `follow` says, and `arrived` and `created`
are both the number of elements that exist (`count_existing`). It is closed once the other map is done, and is open
again (`Reopened`) when a user clears elements of both.

Invariants:
1. `created` never falls between two resets, so an element is created exactly once.
2. Nothing is created or started again beyond the window.
3. No count is negative. The elements that exist are those that wait, are unfinished, are in retry, or have ended,
   except removed ones; the counts of outcomes include the elements that a stopped map will never create (skipped), a
   source that failed (upstream_failed) and a map that is too long (failed).
4. A map is done exactly when its sources have ended, all its elements exist and no others, or it was stopped, all that
   exist have been compared with their items, and have ended.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from tidemill.core.tasks.dependencies import NOTHING, TaskOutcome, Told
from tidemill.core.tasks.task_row import TaskState


class MapStopReason(enum.StrEnum):
    """Why a map creates no further element.

    CANCELLED: its run was cancelled, or stops after a failure; MARKED, CLEARED: a user marked or cleared the whole
    mapped task; FAILED_ELEMENTS: more elements failed than may; TOO_LONG: its sources have more items than a map may
    have elements.
    """

    CANCELLED = "cancelled"
    MARKED = "marked"
    CLEARED = "cleared"
    FAILED_ELEMENTS = "failed_elements"
    TOO_LONG = "too_long"


class MapRow(NamedTuple):
    """The counts of a map; a tuple, because one is created with every change.

    Attributes:
        opened: Whether its trigger rule has let it run, and its sources are known.
        closed: Whether no further item can arrive.
        arrived: The number of elements that its sources have items for.
        created: The number of elements that exist; the next one has this index. A stopped map creates no further one.
        waiting: Elements that were cleared and wait to be started again.
        unfinished: Elements that are scheduled, queued, running, deferred or ending.
        retrying: Elements that wait for a retry.
        success: Elements that succeeded.
        failed: Elements that failed; a map that is too long counts as one more.
        upstream_failed: Elements that failed with their upstream; a source that failed counts as one more.
        skipped: Elements that were skipped, and those that a stopped map will never create.
        stop: Why it was stopped (`MapStopReason`); None: it was not.
        told: What it told last.
        compared: The number of elements that have been compared with the items of a source that was cleared, or were
            created with them; None: no source runs again.
    """

    opened: bool = False
    closed: bool = False
    arrived: int = 0
    created: int = 0
    waiting: int = 0
    unfinished: int = 0
    retrying: int = 0
    success: int = 0
    failed: int = 0
    upstream_failed: int = 0
    skipped: int = 0
    stop: str | None = None
    told: Told = NOTHING
    compared: int | None = None

    @property
    def done(self) -> bool:
        """Whether all elements have ended, and no further one follows."""
        if not self.closed or self.compared is not None or self.waiting or self.unfinished or self.retrying:
            return False
        return self.stop is not None or self.created == self.arrived


class MapPolicy(NamedTuple):
    """The limits of a map.

    Attributes:
        max_outstanding: The window: the number of elements that may be unfinished at a time.
        max_failed: The number of elements that may fail; None: any number.
        max_length: The maximum number of elements.
    """

    max_outstanding: int = 128
    max_failed: int | None = None
    max_length: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Opened:
    """The map begins. `arrived`: the elements that its sources have items for; `closed`: there will be no more."""

    arrived: int = 0
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Arrived:
    """The sources have items for this many elements in total."""

    total: int


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """A source ended for good, after its last item arrived. If it failed, that counts as one upstream failure.

    Attributes:
        outcome: Its outcome.
        total: The number of elements that the sources have items for, if one of them was cleared: the map may have
            more. If the source failed, these stay.
    """

    outcome: TaskOutcome
    total: int | None = None


@dataclass(frozen=True, slots=True)
class SourceMarked:
    """A user marked a source that failed as a success, so it no longer counts as an upstream failure.

    Attributes:
        elements: The number of elements that failed with their upstream; these alone still count.
    """

    elements: int = 0


@dataclass(frozen=True, slots=True)
class SourceAgain:
    """A user cleared a source of an open map, which stays as it is until the source gives items again.

    Attributes:
        elements: The number of elements that failed with their upstream; a source that failed no longer counts.
    """

    elements: int = 0


@dataclass(frozen=True, slots=True)
class Compared:
    """The elements below `end` have the items that the sources give now, or are to run again with them."""

    end: int


@dataclass(frozen=True, slots=True)
class Shortened:
    """All elements are removed that the sources have no item for any more."""


@dataclass(frozen=True, slots=True)
class ElementsMoved:
    """This many elements changed from one state to another; see `find_count`."""

    before: TaskState
    after: TaskState
    number: int = 1


@dataclass(frozen=True, slots=True)
class Stopped:
    """A user, or the end of the run, stops the map."""

    reason: MapStopReason


@dataclass(frozen=True, slots=True)
class Reset:
    """The whole mapped task was cleared, and all its elements have ended."""


@dataclass(frozen=True, slots=True)
class GroupMoved:
    """The mapped group has changed of which the task is a part: its elements exist with the units of the group.

    Attributes:
        group: The row of the group.
        outcome: How the sources of the group ended, if that is what changed (`SourceEnded`).
    """

    group: MapRow
    outcome: TaskOutcome | None = None


@dataclass(frozen=True, slots=True)
class Reopened:
    """A map that follows another one follows it again, whatever stopped it.

    Attributes:
        failed: Whether the map counts the other one as a failed source (`SourceEnded`).
        never: The number of elements that it counts as skipped because they never appeared when it was stopped.
    """

    failed: bool = False
    never: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """The counts were changed in the store, by what `find_count` says, or the map may create elements again."""


MapInput = (
    Opened
    | Arrived
    | SourceEnded
    | SourceMarked
    | SourceAgain
    | Compared
    | Shortened
    | ElementsMoved
    | Stopped
    | Reset
    | Reopened
    | GroupMoved
    | Look
)


class Expansion(NamedTuple):
    """The work that follows from an input; the row already counts it.

    Attributes:
        row: The new row of the map.
        again: The number of waiting elements to start again, lowest index first.
        create: The indexes of the elements to create.
        told: The change to feed to the whole mapped task (`MapTold`); None: nothing changed.
        stops: Whether the map stops itself now: elements that have not started are to be cancelled.
    """

    row: MapRow
    again: int = 0
    create: range = range(0)
    told: Told | None = None
    stops: bool = False


_COUNTS = {
    TaskState.NONE: "waiting",
    TaskState.UP_FOR_RETRY: "retrying",
    **{TaskState(outcome.value): outcome.value for outcome in TaskOutcome},
    TaskState.REMOVED: None,
}


_FAILURES = (TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED)


def find_count(state: TaskState) -> str | None:
    """Return the count of `MapRow` that an element in this state belongs to; None: to none, it was removed.

    Example:
        >>> find_count(TaskState.RUNNING), find_count(TaskState.SUCCESS)
        ('unfinished', 'success')
    """
    return _COUNTS.get(state, "unfinished")


def count_room(row: MapRow, policy: MapPolicy) -> int:
    """Return how many elements the window has room for, besides those that wait already."""
    return max(0, _find_room(row, policy) - row.waiting)


def count_existing(row: MapRow, *, failed: bool = False) -> MapRow:
    """Return the row of a map that follows another one, with the number of its elements.

    Args:
        row: The row.
        failed: Whether it counts the other map as a failed source, which is not an element.
    """
    number = row.waiting + row.unfinished + row.retrying + row.success + row.failed + row.upstream_failed + row.skipped
    return row._replace(arrived=number - failed, created=number - failed)


def find_uncompared(row: MapRow, total: int) -> range:
    """Return the indexes of the elements that can be compared with the items that a source gives again.

    Args:
        row: The map.
        total: The number of elements that its sources have items for.

    Example:
        >>> find_uncompared(MapRow(opened=True, arrived=5, created=5, compared=2), 4)
        range(2, 4)
    """
    return range(0) if row.compared is None else range(row.compared, max(row.compared, min(total, row.created)))


def follow(outcome: TaskOutcome, has_item: bool = True) -> TaskState:
    """Return the state in which an element appears whose map follows another one, once the element with its index ends.

    Args:
        outcome: The outcome of the element with its index.
        has_item: Whether that element returned a value; without one there is no element (REMOVED).
    """
    if outcome is TaskOutcome.SKIPPED:
        return TaskState.SKIPPED
    if outcome is not TaskOutcome.SUCCESS:
        return TaskState.UPSTREAM_FAILED
    return TaskState.NONE if has_item else TaskState.REMOVED


def feed(row: MapRow, given: MapInput, policy: MapPolicy, starts: bool = True) -> Expansion:
    """Return the work that follows from an input.

    Args:
        row: The map as it is stored, and locked.
        given: The input.
        policy: Its limits.
        starts: Whether elements may be created and started now: its run is running, and the mapped task is not ending.
    """
    row = _apply(row, given)
    stop = _find_stop(row, policy)
    if stop is not None:
        row = _stop(row, stop)
    again, create = _fill_window(row, policy) if starts else (0, 0)
    first = row.created
    row = row._replace(
        waiting=row.waiting - again,
        unfinished=row.unfinished + again + create,
        created=first + create,
        # New elements have the items that a source gives now.
        compared=first + create if create and row.compared is not None else row.compared,
    )
    told = _tell(row)
    changed = told != row.told
    return Expansion(
        row._replace(told=told), again, range(first, first + create), told if changed else None, stop is not None
    )


def _apply(row: MapRow, given: MapInput) -> MapRow:
    match given:
        case ElementsMoved(before=before, after=after, number=number):
            return _move(row, find_count(before), find_count(after), number)
        case Arrived(total=total) if row.opened and not row.closed:
            return row._replace(arrived=max(row.arrived, total))
        case Opened(arrived=arrived, closed=closed) if not row.opened:
            return row._replace(opened=True, arrived=arrived, closed=closed)
        case SourceEnded(outcome=outcome, total=total) if row.opened and not row.closed:
            return _close(row, outcome, total)
        case SourceAgain(elements=elements) if row.opened:
            return _begin_again(row, elements)
        case Compared(end=end) if row.compared is not None:
            return _finish_comparing(row._replace(compared=max(row.compared, end)))
        case Shortened() if row.closed:
            return row._replace(created=min(row.created, row.arrived))
        case SourceMarked(elements=elements) if row.closed:
            return row._replace(upstream_failed=min(row.upstream_failed, elements))
        case Stopped(reason=reason):
            return _stop(row, reason)
        case Reopened(failed=failed, never=never) if row.opened:
            row = row._replace(upstream_failed=row.upstream_failed - failed, skipped=row.skipped - never)
            return row._replace(closed=False, stop=None)
        case Reset():
            return MapRow()
        case GroupMoved(group=group, outcome=outcome):
            return _follow_group(row, group, outcome)
        case _:
            return row


def _close(row: MapRow, outcome: TaskOutcome, total: int | None) -> MapRow:
    if outcome in _FAILURES:
        # What the source has not given again stays as it is, until the source is cleared once more.
        return row._replace(closed=True, upstream_failed=row.upstream_failed + 1, compared=None)
    if row.compared is None or total is None:
        return row._replace(closed=True)
    return _finish_comparing(row._replace(closed=True, arrived=total))


def _begin_again(row: MapRow, elements: int) -> MapRow:
    """Open a map again that keeps its elements; what only its end has counted is counted no more."""
    never = 0 if row.stop is None else row.arrived - row.created
    return row._replace(
        closed=False,
        arrived=row.created,
        skipped=row.skipped - never,
        failed=row.failed - (row.stop == MapStopReason.TOO_LONG),
        upstream_failed=elements,
        stop=None,
        compared=0,
    )


def _finish_comparing(row: MapRow) -> MapRow:
    assert row.compared is not None
    return row._replace(compared=None) if row.closed and row.compared >= min(row.arrived, row.created) else row


def _follow_group(row: MapRow, group: MapRow, outcome: TaskOutcome | None) -> MapRow:
    failed = not row.closed and outcome in _FAILURES
    row = row._replace(
        opened=group.opened,
        closed=group.closed,
        arrived=group.arrived,
        created=group.created,
        compared=group.compared,
        upstream_failed=row.upstream_failed + failed,
    )
    return row if group.stop is None or row.stop is not None else _stop(row, MapStopReason(group.stop))


def _move(row: MapRow, before: str | None, after: str | None, number: int) -> MapRow:
    for name, change in ((before, -number), (after, number)):
        if name is not None:
            row = row._replace(**{name: getattr(row, name) + change})
    if before is not None and getattr(row, before) < 0:
        raise ValueError(f"{number} elements cannot change from {before} to {after}: the map counts {row}")
    return row


def _find_stop(row: MapRow, policy: MapPolicy) -> MapStopReason | None:
    """Return why the map stops itself now."""
    if row.stop is not None:
        return None
    if row.arrived > policy.max_length:
        return MapStopReason.TOO_LONG
    # Elements beyond the end of a source that ran again count until they are removed.
    is_settled = not _is_comparing(row) and row.created <= row.arrived
    if policy.max_failed is not None and row.failed > policy.max_failed and is_settled:
        return MapStopReason.FAILED_ELEMENTS
    return None


def _stop(row: MapRow, reason: MapStopReason) -> MapRow:
    """Close the map; elements that do not exist count as skipped, all at once."""
    arrived = max(row.arrived, row.created)
    never = 0 if row.stop is not None else arrived - row.created
    failed = row.failed + (reason is MapStopReason.TOO_LONG and row.stop is None)
    skipped, stop = row.skipped + never, reason.value
    return row._replace(
        opened=True, closed=True, arrived=arrived, skipped=skipped, failed=failed, stop=stop, compared=None
    )


def _is_comparing(row: MapRow) -> bool:
    """Whether elements may still have another item than their source gives, so that their outcomes may not count."""
    return row.compared is not None and row.compared < row.created


def _fill_window(row: MapRow, policy: MapPolicy) -> tuple[int, int]:
    """Return how many elements start again, and how many are created."""
    room = _find_room(row, policy)
    again = min(row.waiting, room)
    if row.stop is not None or _is_comparing(row):
        return again, 0
    return again, max(0, min(row.arrived - row.created, room - again))


def _find_room(row: MapRow, policy: MapPolicy) -> int:
    window = policy.max_outstanding
    return max(0, window - row.unfinished - min(row.retrying, (window + 1) // 2))


def _tell(row: MapRow) -> Told:
    kinds = frozenset(outcome for outcome in TaskOutcome if getattr(row, outcome.value))
    done = row.done
    # A map without elements is skipped.
    return Told(kinds or frozenset((TaskOutcome.SKIPPED,)), done) if done else Told(kinds)


def count_elements(lengths: Sequence[int]) -> int:
    """Return the number of elements of a map whose factors have these numbers of items."""
    return prod(lengths)


def locate_items(index: int, lengths: Sequence[int], slowest: int = 0) -> tuple[int, ...]:
    """Return the indexes of the items, by factor, that an element combines.

    Args:
        index: The index of the element.
        lengths: The numbers of items of the factors; the number at `slowest` is not used, so that it may still grow.
        slowest: The position of the factor that varies slowest; of the others, the last varies fastest.

    Example:
        >>> [locate_items(index, (2, 2)) for index in range(4)]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
        >>> [locate_items(index, (2, 2), slowest=1) for index in range(4)]
        [(0, 0), (1, 0), (0, 1), (1, 1)]
    """
    found = [0] * len(lengths)
    for place in reversed(range(len(lengths))):
        if place != slowest:
            index, found[place] = divmod(index, lengths[place])
    found[slowest] = index
    return tuple(found)
