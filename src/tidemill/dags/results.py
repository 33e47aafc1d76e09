"""The results of attempts, as workers report them. Values are encoded by `runtime.json.codec`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AttemptSucceeded:
    """The attempt or the callback returned."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The attempt failed.

    Attributes:
        error: One line for people that says what happened; the traceback is in the log.
        may_retry: Whether the retries of the task apply.
        origin: The class and frames of the exception, for callbacks; None if there was no exception.
    """

    error: str
    may_retry: bool = True
    origin: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class AttemptSkipped:
    """The attempt skipped its task; `reason` is for people."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class AttemptDeferred:
    """The attempt handed its task to a trigger.

    Attributes:
        classpath: The import path of the trigger class.
        kwargs: The arguments of the trigger, encoded.
        method: The operator's method that resumes the task.
        method_kwargs: The arguments of that method, encoded.
        timeout_us: How long to wait for the trigger, in microseconds; None: no limit.
        trigger: The trigger itself, for values derived from it, such as the key of a shared stream.
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
    """The ending of an attempt, and its effects.

    Attributes:
        ending: How the attempt ended.
        xcoms: The returned values by key, encoded; values that the task pushed itself are already stored.
        skip: The direct downstream tasks to skip.
        skip_all_downstream: Whether to skip all downstream tasks except teardowns.
        label: The rendered `map_index_template` of an element; None: there is none.
    """

    ending: Ending
    xcoms: tuple[tuple[str, str], ...] = ()
    skip: tuple[str, ...] = ()
    skip_all_downstream: bool = False
    label: str | None = None
