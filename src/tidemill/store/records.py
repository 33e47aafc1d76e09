"""The values that go into the store and come out of it; frozen, and independent of any database.

Invariants: what is read is what was written; a page says where the next one begins, or that there is none.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class TriggerState(enum.StrEnum):
    """The state of a trigger.

    REGISTERED: known, but not yet run. RUNNING: a host runs it, or ran it when that host was killed. FINISHED: it ended
    by itself. FAILED: it raised. CANCELLED: it was stopped, for a reason.
    """

    REGISTERED = "registered"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ReportOutcome(enum.Enum):
    """What became of a report about a trigger: recorded, or refused because its token is old or its id unknown."""

    MARKED = "marked"
    FENCED = "fenced"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TriggerSpec:
    """What a trigger is.

    Attributes:
        name: Its stable name.
        classpath: Where its class is imported from.
        kwargs: Its arguments, as JSON text with sorted keys, so that equal arguments are equal texts.
        restart: When it runs again: always, on-failure or never.
    """

    name: str
    classpath: str
    kwargs: str = "{}"
    restart: str = "on-failure"


@dataclass(frozen=True, slots=True)
class TriggerRecord:
    """A trigger as the store knows it.

    Attributes:
        id: Its number.
        spec: What it is.
        state: Its state.
        reason: Why it was cancelled.
        error: The traceback it failed with.
        list: The list that it belongs to; None: none yet.
        session: Where it runs, in words: host and process of the live session that claimed it last.
        serialized: What it is re-created from where that is not its spec: JSON text of classpath and kwargs.
        token: Rises with every claim.
        next_index: How many events of it are stored.
        created_us: When it was first registered, in UTC microseconds since the epoch.
        changed_us: When its state last changed, likewise.
    """

    id: int
    spec: TriggerSpec
    state: TriggerState
    reason: str | None
    error: str | None
    list: str | None
    session: str | None
    serialized: str | None
    token: int
    next_index: int
    created_us: int
    changed_us: int


@dataclass(frozen=True, slots=True)
class TriggerReport:
    """The new state of a trigger, as reported by the run that has the token.

    Attributes:
        trigger_id: The trigger's number.
        token: The token of the claim under which it runs.
        state: Its new state.
        now_us: When it changed, in UTC microseconds since the epoch.
        reason: Why it was cancelled.
        error: The traceback it failed with.
    """

    trigger_id: int
    token: int
    state: TriggerState
    now_us: int
    reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One start of a process that runs triggers.

    Attributes:
        id: Its number; never used again.
        kind: What runs: "triggerer".
        name: Its name.
        host: The name of its machine.
        boot_id: Changes with every boot of the machine.
        pid: The process id.
        list: The name of the list that it runs.
        lock: Identifies the list's lock file on its machine.
        digest: The digest of the list's content.
        beat: Rises while it is alive.
        started_us: When it began, in UTC microseconds since the epoch, by its own clock.
        beat_us: When it last beat, likewise.
        ended_us: When it ended, likewise; None: it has not.
        ended_by: The session that declared it dead; None: it ended by itself, or has not.
    """

    id: int
    kind: str
    name: str
    host: str
    boot_id: str
    pid: int
    list: str
    lock: str
    digest: str
    beat: int
    started_us: int
    beat_us: int
    ended_us: int | None
    ended_by: int | None


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event as it is stored.

    Attributes:
        id: Its number among all events of the store.
        trigger_id: The trigger that fired it.
        trigger_name: The trigger's name.
        sequence_index: Its number among those of the trigger, from 0 without gaps.
        identity: Identifies it among those of the trigger; None: it has no identity.
        payload: JSON text.
        created_us: When it fired, in UTC microseconds since the epoch.
    """

    id: int
    trigger_id: int
    trigger_name: str
    sequence_index: int
    identity: str | None
    payload: str
    created_us: int


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some rows of a list.

    Attributes:
        rows: In the list's order.
        next: Pass it to the same function to continue after these rows; None: there are no more.
    """

    rows: list[T]
    next: int | None
