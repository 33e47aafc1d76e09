"""The values that queries about triggers take and return; frozen, and independent of the database.

Invariants: values are read back exactly as they were written. A page gives the cursor of the next page, or None.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class TriggerState(enum.StrEnum):
    """The state of a trigger.

    REGISTERED: stored, but never started. RUNNING: a host runs it, or was killed while running it. FINISHED: it ended
    normally. FAILED: it raised. CANCELLED: it was stopped, for the recorded reason.
    """

    REGISTERED = "registered"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TriggerReportOutcome(enum.Enum):
    """The outcome of a report about a trigger: stored, or refused because its token is stale or its id unknown."""

    MARKED = "marked"
    FENCED = "fenced"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TriggerSpec:
    """The definition of a trigger.

    Attributes:
        name: Its stable name.
        classpath: The import path of its class.
        kwargs: Its arguments, as JSON text with sorted keys, so that equal arguments are equal texts.
        restart: When to restart it: always, on-failure or never.
    """

    name: str
    classpath: str
    kwargs: str = "{}"
    restart: str = "on-failure"


@dataclass(frozen=True, slots=True)
class TriggerRecord:
    """A stored trigger.

    Attributes:
        id: Its row id.
        spec: Its definition.
        state: Its state.
        reason: Why it was cancelled.
        error: The traceback of its failure.
        list: The trigger list that it belongs to; None: no list yet.
        session: The host and process of the live service session that last claimed it, for display.
        serialized: JSON text of the classpath and kwargs to re-create it from, if they differ from its spec.
        token: Increases with every claim.
        next_index: The number of its events that are stored.
        created_us: When it was first registered, in UTC microseconds since the epoch.
        changed_us: When its state last changed, in UTC microseconds since the epoch.
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
    """The new state of a trigger, reported by the holder of its token.

    Attributes:
        trigger_id: The trigger's id.
        token: The token of the claim under which it runs.
        state: Its new state.
        now_us: When it changed, in UTC microseconds since the epoch.
        reason: Why it was cancelled.
        error: The traceback of its failure.
    """

    trigger_id: int
    token: int
    state: TriggerState
    now_us: int
    reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ListHostSession:
    """The service session of a process that runs a trigger list: one start of that process.

    Attributes:
        id: Its id; ids are never reused.
        kind: The kind of service: "triggerer".
        name: Its name.
        host: The name of its machine.
        boot_id: Changes with every boot of the machine.
        pid: The process id.
        list: The name of the trigger list.
        lock: Identifies the list's lock file on its machine.
        digest: The digest of the list's content.
        beat: The heartbeat counter.
        started_us: When it started, in UTC microseconds since the epoch, by its own clock.
        beat_us: The time of its last heartbeat, by its own clock.
        ended_us: When it ended, by its own clock; None: it has not ended.
        ended_by: The session that declared it dead; None: it ended cleanly or has not ended.
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
    """A stored event.

    Attributes:
        id: Its id among all events of the store.
        trigger_id: The trigger that fired it.
        trigger_name: The trigger's name.
        sequence_index: Its index among the trigger's events, from 0 without gaps.
        identity: Identifies it among the trigger's events; None: it has no identity.
        payload: JSON text.
        created_us: When it fired, in UTC microseconds since the epoch.
        is_last: Whether it is the last event of a stream that has ended.
    """

    id: int
    trigger_id: int
    trigger_name: str
    sequence_index: int
    identity: str | None
    payload: str
    created_us: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list.

    Attributes:
        rows: The rows, in the list's order.
        next: The cursor to pass to the same function for the next page; None: this is the last page.
    """

    rows: list[T]
    next: int | None
