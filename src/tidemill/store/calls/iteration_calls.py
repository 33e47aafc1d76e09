"""The calls of attempts that run all elements of a task: which are to be run, and how they ended.

Invariant: results are stored under the epoch of the attempt; a call that is repeated changes nothing.
"""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import Call, answered_by
from tidemill.store.calls.task_calls import MapItem


class PartToRun(msgspec.Struct, frozen=True):
    """An element to run.

    Attributes:
        number: Its index.
        tries: How often it has failed.
        first: The number of its first item.
        size: The number of its items.
        items: Its items; of the last element of a page some may be missing.
    """

    number: int
    tries: int
    first: int
    size: int
    items: tuple[MapItem, ...]


class IterationPage(msgspec.Struct, frozen=True):
    """A page of elements to run.

    Attributes:
        parts: The elements, by index.
        next: The index to continue after: elements up to it that are not in `parts` have ended.
        closed: Whether no further element will arrive.
        leaves: Whether the worker of the attempt stops, which the worker says: the attempt takes no more elements.
    """

    parts: tuple[PartToRun, ...]
    next: int
    closed: bool
    leaves: bool = False


@answered_by("dags.attempts.iterations:get_parts", reads=True)
class GetParts(Call[IterationPage], frozen=True):
    """Return elements that an attempt has to run: those without a result, and those to be tried again.

    A page ends at 1,000 elements or 8 MiB; it may be empty although `next` has moved.

    Attributes:
        task: The task instance of the attempt.
        after: Only elements with a higher index.
        limit: The maximum number of elements.
    """

    task: int
    after: int = -1
    limit: int = 1000


class KeptPart(msgspec.Struct, frozen=True):
    """The end of an element.

    Attributes:
        number: Its index.
        state: `success`, `failed`, `skipped`, or `up_for_retry`.
        tries: The number of its tries.
        value: The encoded result; None: there is none.
        error: Why it failed or was skipped.
        started_us: When its last try began.
    """

    number: int
    state: str
    tries: int
    value: str | None = None
    error: str | None = None
    started_us: int | None = None


class PartCounts(msgspec.Struct, frozen=True):
    """How many elements have ended.

    Attributes:
        success: The number of elements that succeeded.
        failed: The number of elements that failed for good.
        skipped: The number of elements that were skipped.
        first_failed: The lowest index of a failed element, if this was asked for.
        error: Its error.
        leaves: As in `IterationPage`.
    """

    success: int
    failed: int
    skipped: int
    first_failed: int | None = None
    error: str | None = None
    leaves: bool = False


@answered_by("dags.attempts.iterations:keep_parts")
class KeepParts(Call[PartCounts], frozen=True):
    """Store how elements of an attempt ended.

    A result of an element that has succeeded already is passed over. Values of more than 1 MiB are refused (INVALID).

    Attributes:
        task: The task instance.
        epoch: The epoch of its attempt.
        parts: The elements.
        seen: The number of elements that the attempt has read, whether they have ended or not.
        running: The number of elements that run now; 0: the answer names the first failed one.
    """

    task: int
    epoch: int
    parts: tuple[KeptPart, ...]
    seen: int
    running: int = 0
