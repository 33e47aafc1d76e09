"""How an attempt ended: what a worker reports. Values are encoded (`runtime.json.codec`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AttemptSucceeded:
    """The attempt returned, or the callback did."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The attempt failed.

    Attributes:
        error: What happened, in a line, for people; the traceback is in the log.
        may_retry: Whether the retries of the task apply.
        origin: The class and the places of the exception, for callbacks; None: there was none.
    """

    error: str
    may_retry: bool = True
    origin: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class AttemptSkipped:
    """The attempt skipped its task. `reason`: for people."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class AttemptDeferred:
    """The attempt handed its task to a trigger.

    Attributes:
        classpath: Where the class of the trigger is imported from.
        kwargs: Its arguments, encoded.
        method: The method of the operator that continues.
        method_kwargs: The arguments of that method, encoded.
        timeout_us: How long the trigger may take, in microseconds; None: any time.
        trigger: The trigger itself, for what else depends on it, such as the key of a shared stream.
    """

    classpath: str
    kwargs: str
    method: str
    method_kwargs: str
    timeout_us: int | None
    trigger: Any = field(compare=False)


Ending = AttemptSucceeded | AttemptFailed | AttemptSkipped | AttemptDeferred


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended, and what follows from it.

    Attributes:
        ending: How.
        xcoms: What it returned, by key, encoded; what it pushed itself is stored already.
        skip: The tasks directly downstream that are skipped.
        skip_all_downstream: Whether all tasks downstream but teardowns are skipped.
    """

    ending: Ending
    xcoms: tuple[tuple[str, str], ...] = ()
    skip: tuple[str, ...] = ()
    skip_all_downstream: bool = False
