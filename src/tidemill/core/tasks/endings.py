"""The endings of an attempt: the values that the task's code, the worker and the store pass on.

Invariant: an ending is plain data with the name of its class in `kind`, so that a decoder can choose the class. Values
of users are encoded texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class AttemptEnding:
    """How an attempt ended: one of the classes below."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Success(AttemptEnding):
    """The attempt or the callback returned."""

    kind: str = field(default="Success", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Failure(AttemptEnding):
    """The attempt failed.

    Attributes:
        error: One line for people that says what happened; the traceback is in the log.
        may_retry: Whether the retries of the task apply.
        origin: The class and traceback locations of the exception, for callbacks; None: there was none.
    """

    error: str
    may_retry: bool = True
    origin: str | None = field(default=None, compare=False)
    kind: str = field(default="Failure", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Skip(AttemptEnding):
    """The attempt skipped its task; `reason` is for people."""

    reason: str = ""
    kind: str = field(default="Skip", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Deferral(AttemptEnding):
    """The attempt deferred itself to a trigger.

    Attributes:
        classpath: The import path of the trigger's class.
        kwargs: Its arguments, encoded.
        method: The operator method that resumes the task.
        method_kwargs: The arguments of that method, encoded.
        timeout_us: The time limit of the trigger; None: none.
        stream_key: The key of the shared stream of the trigger, as text; None: it shares none.
        queue: The queue whose triggerers may run it.
        streams: Whether all its events are delivered, and it lives on while attempts handle them.
        idle_us: How long the first event of a stream may take; None: no limit.
        acked: Whether its events are acknowledged upstream once they are stored, so that they cannot come again.
    """

    classpath: str
    kwargs: str
    method: str
    method_kwargs: str = "{}"
    timeout_us: int | None = None
    stream_key: str | None = None
    queue: str = "default"
    streams: bool = False
    idle_us: int | None = None
    acked: bool = False
    kind: str = field(default="Deferral", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Idle(AttemptEnding):
    """The attempt has handled the events that have arrived, and leaves its worker until the next one.

    Attributes:
        idle_us: How long the next event may take; None: no limit.
        pause_us: How long the task takes no event; None: it takes the next one.
    """

    idle_us: int | None = None
    pause_us: int | None = None
    kind: str = field(default="Idle", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Loss(AttemptEnding):
    """The attempt was lost or returned: it is queued again without using up a retry.

    Attributes:
        is_return: Whether its worker returned it because it stops, which happens any number of times.
    """

    is_return: bool = False
    kind: str = field(default="Loss", init=False, repr=False)


#: The class of each `kind`.
ENDINGS: dict[str, type[AttemptEnding]] = {
    kind.__name__: kind for kind in (Success, Failure, Skip, Deferral, Idle, Loss)
}
