"""Plans how one transaction stores trigger events: their numbers, duplicates and refusals.

Pure: it takes the locked rows of the triggers and the known identities, and returns the rows to insert and the counters
to write.

Invariants:
- Events of a trigger are numbered from 0 without gaps, in order, whichever process stores them: a takeover continues
  the sequence.
- An identity is stored once per trigger; later events with it get the number of the first.
- Nothing is stored for an unknown trigger, or for one that another process has claimed since (an old token).
- A plan whose commit was not acknowledged is recognised, so that a retry stores nothing twice.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class NewEvent(NamedTuple):
    """An event to store.

    Attributes:
        trigger_id: The trigger's number in the store.
        token: The ownership token of the claim under which it fired.
        payload: JSON text.
        identity: Identifies the event among the events of this trigger; None: it has no identity.
        created_us: When it fired, in UTC microseconds since the epoch.
        ending: How it ends the task that waits for it, encoded; None: it does not.
    """

    trigger_id: int
    token: int
    payload: str
    identity: str | None
    created_us: int
    ending: str | None = None


class Counter(NamedTuple):
    """The row of a trigger: the number of its next event, and the token of its owner."""

    next_index: int
    token: int


class EventRow(NamedTuple):
    """A row to insert."""

    trigger_id: int
    sequence_index: int
    identity: str | None
    payload: str
    created_us: int


@dataclass(frozen=True, slots=True)
class EventStored:
    """The event is stored durably.

    Attributes:
        sequence_index: Its number within its trigger.
        undelivered: The number of events of the stream of a task that were not handled yet.
    """

    sequence_index: int
    undelivered: int = field(default=0, repr=False)


@dataclass(frozen=True, slots=True)
class Duplicate:
    """An event with the same identity is already stored, with this number."""

    sequence_index: int


class EventRefusal(enum.Enum):
    """Why an event is not stored, and never will be."""

    UNKNOWN_TRIGGER = "the store does not know the trigger"
    FENCED = "another process has claimed the trigger"
    CONTENT = "the database refuses the content"


@dataclass(frozen=True, slots=True)
class EventRefused:
    """The event is not stored, and never will be.

    Attributes:
        reason: The reason.
        detail: The database's error, if there was one.
    """

    reason: EventRefusal
    detail: str = ""


StoreOutcome = EventStored | Duplicate | EventRefused


@dataclass(frozen=True, slots=True)
class EventPlan:
    """The writes of one transaction.

    Attributes:
        rows: The rows to insert.
        outcomes: One per event, in order; valid once the transaction is committed.
        counters: The new counter of each trigger that gets a row.
    """

    rows: list[EventRow]
    outcomes: list[StoreOutcome]
    counters: dict[int, Counter]

    def was_committed(self, found: EventRow | None) -> bool:
        """Return whether this plan was committed, given the row that is stored under the number of `first`.

        A plan is committed as a whole, so one row is enough. The result holds even if the trigger has been claimed or
        has fired again since.
        """
        return found is not None and found == self.first

    @property
    def first(self) -> EventRow | None:
        """The first row; None if the plan stores nothing and may be repeated."""
        return self.rows[0] if self.rows else None


def make_plan(
    events: Iterable[NewEvent], counters: Mapping[int, Counter], known: Mapping[tuple[int, str], int]
) -> EventPlan:
    """Number events, and find duplicates and events to refuse.

    Args:
        events: The events, in the order in which they fired.
        counters: The locked rows of their triggers; a trigger without one is unknown.
        known: The numbers of the (trigger, identity) pairs of these events that are already stored.

    Example:
        >>> event = NewEvent(7, 1, '"x"', "a", 0)
        >>> make_plan([event, event], {7: Counter(3, 1)}, {}).outcomes
        [EventStored(sequence_index=3), Duplicate(sequence_index=3)]
    """
    next_index = {trigger_id: counter.next_index for trigger_id, counter in counters.items()}
    seen = dict(known)
    rows: list[EventRow] = []
    outcomes: list[StoreOutcome] = []
    for event in events:
        trigger_id, token, payload, identity, created_us, _ = event
        counter = counters.get(trigger_id)
        if counter is None:
            outcomes.append(EventRefused(EventRefusal.UNKNOWN_TRIGGER))
            continue
        if counter.token != token:
            outcomes.append(EventRefused(EventRefusal.FENCED))
            continue
        if identity is not None:
            first = seen.setdefault((trigger_id, identity), next_index[trigger_id])
            if first != next_index[trigger_id]:
                outcomes.append(Duplicate(first))
                continue
        index = next_index[trigger_id]
        next_index[trigger_id] = index + 1
        rows.append(EventRow(trigger_id, index, identity, payload, created_us))
        outcomes.append(EventStored(index))
    moved = {row.trigger_id for row in rows}
    return EventPlan(rows, outcomes, {i: Counter(next_index[i], counters[i].token) for i in moved})
