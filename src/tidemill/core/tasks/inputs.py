"""The inputs and effects of a task's life: the values that `attempt.feed` takes and returns."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import get_args

from tidemill.core.tasks.dependencies import Readiness, TaskOutcome, Told
from tidemill.core.tasks.endings import Failure, Skip, Success


class TriggerStopReason(enum.StrEnum):
    """Why the trigger of a deferred task is stopped.

    DONE: its event has resumed the task. FAILED: it ended by itself. TIMEOUT: it is too late. USER: a user cleared,
    marked or cancelled the task; only then does `on_kill` run.
    """

    DONE = "done"
    FAILED = "failed"
    TIMEOUT = "timeout"
    USER = "user"


class CallbackKind(enum.StrEnum):
    """The user's callback that is due."""

    SUCCESS = "on_success"
    FAILURE = "on_failure"
    RETRY = "on_retry"
    SKIPPED = "on_skipped"


class Channel(enum.StrEnum):
    """The services that may have new work."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    TRIGGERER = "triggerer"


# Inputs. An input with an epoch is a report: it carries the epoch it was issued, and `request` identifies the report,
# so that a repetition is recognised.


@dataclass(frozen=True, slots=True)
class Ready:
    """The upstream tasks let the task run, or rule it out."""

    epoch: int
    readiness: Readiness
    request: str = ""


@dataclass(frozen=True, slots=True)
class StartInTrigger:
    """The start of a try in a trigger, without a worker (`start_from_trigger`).

    Attributes:
        trigger: The trigger, encoded.
        method: The method of the operator that continues; empty: the trigger itself ends the task.
        kwargs: The encoded arguments of the method.
        timeout_us: How long the trigger may take; None: as long as the try.
        streams: Whether the trigger lives until the try is over, and its end ends the task.
    """

    trigger: str
    method: str = ""
    kwargs: str = "{}"
    timeout_us: int | None = None
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """The task gets its slots. `start`: how a new try begins without a worker; None: a worker runs it."""

    epoch: int
    start: StartInTrigger | None = None
    request: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's session takes the task."""

    epoch: int
    session: int
    request: str = ""


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The attempt returned. `xcoms`: keys and encoded values."""

    epoch: int
    xcoms: tuple[tuple[str, str], ...] = ()
    request: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed.

    Attributes:
        epoch: The epoch of the attempt.
        error: The error, for users.
        may_retry: Whether the retries of the task apply.
        bits: 32 random bits, for the delay before a retry.
        request: Identifies the report.
        origin: The class and the source locations of the exception, for callbacks; None without an exception.
    """

    epoch: int
    error: str
    may_retry: bool = True
    bits: int = 0
    request: str = ""
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """The attempt skipped the task, or an upstream task did (`.branch`, `.short_circuit`)."""

    epoch: int
    request: str = ""


@dataclass(frozen=True, slots=True)
class Deferred:
    """The attempt deferred itself to a trigger.

    Attributes:
        epoch: The epoch of the attempt.
        trigger: The trigger, encoded.
        method: The method of the operator that continues.
        kwargs: The encoded arguments of the method.
        timeout_us: How long the trigger may take; None: as long as the attempt.
        streams: Whether all its events are delivered, and it lives on while an attempt handles them.
        idle_us: How long the first event of a stream may take; None: no limit.
        request: Identifies the report.
    """

    epoch: int
    trigger: str
    method: str
    kwargs: str = "{}"
    timeout_us: int | None = None
    streams: bool = False
    idle_us: int | None = None
    request: str = ""


@dataclass(frozen=True, slots=True)
class StreamIdle:
    """The attempt has handled all events that it was given, and leaves its worker until the next one arrives.

    Attributes:
        epoch: The epoch of the attempt.
        ready: Whether an event, or the end of the trigger, has arrived since.
        idle_us: How long the next event may take; None: no limit.
        pause_us: How long the task takes no event; None: it takes the next one.
        request: Identifies the report.
    """

    epoch: int
    ready: bool = False
    idle_us: int | None = None
    pause_us: int | None = None
    request: str = ""


@dataclass(frozen=True, slots=True)
class StreamReady:
    """An event of the stream that a deferred task waits for has arrived, or its trigger has ended."""

    epoch: int
    request: str = ""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The attempt waits at its `yield`: enough of what it yielded is stored, and no element has taken it yet."""

    epoch: int
    request: str = ""


@dataclass(frozen=True, slots=True)
class Unblocked:
    """Elements have taken enough of what the waiting attempt yielded; it needs slots to go on."""

    epoch: int
    request: str = ""


@dataclass(frozen=True, slots=True)
class WentOn:
    """The waiting attempt has a slot of its worker again, and goes on."""

    epoch: int
    request: str = ""


@dataclass(frozen=True, slots=True)
class TriggerFired:
    """The first event of the task's trigger is being stored. `payload`: encoded."""

    epoch: int
    payload: str
    request: str = ""


@dataclass(frozen=True, slots=True)
class TriggerEnded:
    """The task's trigger has fired an event that ends the task without a worker.

    Attributes:
        epoch: The epoch of the deferral.
        ending: How the task ends; after a failure, its retries apply.
        xcoms: Keys and encoded values.
        bits: 32 random bits, for the delay before a retry.
        request: Identifies the report.
    """

    epoch: int
    ending: Success | Failure | Skip
    xcoms: tuple[tuple[str, str], ...] = ()
    bits: int = 0
    request: str = ""


@dataclass(frozen=True, slots=True)
class TriggerFailed:
    """The task's trigger raised, or ended without an event. The last line of `error` is the message."""

    epoch: int
    error: str
    bits: int = 0
    request: str = ""


@dataclass(frozen=True, slots=True)
class Due:
    """The time that the task waits for may have come: a retry or a deadline."""

    epoch: int
    bits: int = 0
    request: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """The session that ran the attempt has died, or has lost the process of the attempt."""

    epoch: int
    bits: int = 0
    request: str = ""


@dataclass(frozen=True, slots=True)
class Returned:
    """The worker that ran the attempt is stopping, and returned it."""

    epoch: int
    request: str = ""


@dataclass(frozen=True, slots=True)
class FileMissing:
    """No live worker of the task's queue has had the file of its DAG for too long.

    Attributes:
        epoch: The epoch of the queued task.
        error: The error, for users.
        bits: 32 random bits, for the delay before a retry.
        request: Identifies the report.
    """

    epoch: int
    error: str
    bits: int = 0
    request: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt that a user ended is over: its process is gone, or its trigger has cleaned up."""

    epoch: int
    request: str = ""


@dataclass(frozen=True, slots=True)
class CleanedUp:
    """The trigger of an ending task has cleaned up, while the process of its attempt is still being ended."""

    epoch: int
    request: str = ""


@dataclass(frozen=True, slots=True)
class MapTold:
    """The elements of a mapped task have new outcomes, or the map has closed or opened again (`core.tasks.expansion`).

    Attributes:
        epoch: The epoch of the whole mapped task.
        told: The outcomes that its elements have, and whether all have ended.
        request: Identifies the report.
    """

    epoch: int
    told: Told
    request: str = ""


@dataclass(frozen=True, slots=True)
class Clear:
    """A user wants the task to run again from the beginning.

    Attributes:
        epoch: None: in any epoch.
        request: Identifies the request.
        triggerer: The session that runs the trigger of a deferred task; None: no session does.
    """

    epoch: int | None = None
    request: str = ""
    triggerer: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A user sets the outcome of the task; see `Clear`."""

    outcome: TaskOutcome
    epoch: int | None = None
    request: str = ""
    triggerer: int | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """A user cancels the run of the task; see `Clear`."""

    epoch: int | None = None
    request: str = ""
    triggerer: int | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """The map has no item for this element any more, or starts over; see `Clear`."""

    epoch: int | None = None
    request: str = ""
    triggerer: int | None = None


Input = (
    Ready
    | Admit
    | Claim
    | Succeeded
    | Failed
    | Skipped
    | Deferred
    | Blocked
    | Unblocked
    | WentOn
    | StreamIdle
    | StreamReady
    | TriggerFired
    | TriggerEnded
    | TriggerFailed
    | Due
    | Lost
    | Returned
    | FileMissing
    | Ended
    | CleanedUp
    | MapTold
    | Clear
    | Mark
    | Cancel
    | Remove
)


# Effects, in the order in which they are carried out, in the transaction that stores the new state.


@dataclass(frozen=True, slots=True)
class StoreXComs:
    """Store the result of the attempt and the values that it pushed."""

    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ClearXComs:
    """Remove the XComs of earlier tries."""


@dataclass(frozen=True, slots=True)
class MakeTrigger:
    """Create the trigger of the task; its reports carry this epoch."""

    epoch: int
    trigger: str


@dataclass(frozen=True, slots=True)
class StopTrigger:
    """Stop the trigger that the task had."""

    reason: TriggerStopReason


@dataclass(frozen=True, slots=True)
class DiscardEvents:
    """Discard the events of the task's streams that no attempt has handled, and count them."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """End the process of the attempt, which this session runs."""

    session: int


@dataclass(frozen=True, slots=True)
class TellSuccessors:
    """Change the tallies of the direct downstream tasks; an element changes the counts of its map instead."""

    before: Told
    after: Told


@dataclass(frozen=True, slots=True)
class OpenMap:
    """Create elements from now on, as soon as the sources have items for them."""


@dataclass(frozen=True, slots=True)
class StopMap:
    """Create no further element, and end those that are open as `attempt.order_elements` says."""


@dataclass(frozen=True, slots=True)
class ResetMap:
    """Forget the counts of the map; it starts over once it is opened again."""


@dataclass(frozen=True, slots=True)
class RunCallback:
    """Run a callback of the user once the state is stored."""

    callback: CallbackKind
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Ring:
    """Wake the services that have work now."""

    channel: Channel


Effect = (
    StoreXComs
    | ClearXComs
    | MakeTrigger
    | StopTrigger
    | DiscardEvents
    | EndAttempt
    | TellSuccessors
    | OpenMap
    | StopMap
    | ResetMap
    | RunCallback
    | Ring
)


_NAMES: dict[type[Input], str] = {
    kind: re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower() for kind in get_args(Input)
}


def name_input(given: Input) -> str:
    """Return the name users see for the kind of an input; it has no space.

    Example:
        >>> name_input(TriggerFired(3, "null"))
        'trigger-fired'
    """
    return _NAMES[type(given)]


def identify(given: Input) -> str:
    """Return the journal's text for an input, which is equal for repetitions of one report.

    Example:
        >>> identify(Admit(3, request="s7-12"))
        'admit s7-12'
    """
    name = name_input(given)
    return f"{name} {given.request}".rstrip() if given.request else name
