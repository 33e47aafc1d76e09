"""Checks the arguments of DAGs and tasks while a file is parsed; each error names the task and the argument."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

from tidemill.core.plain_times import make_plain_duration
from tidemill.dags.exceptions import DagError

#: Ids become parts of URLs, where `.` and `..` have a meaning, and command-line arguments, where `-x` does.
_ID: Final = re.compile(r"\w[\w.-]*")
MAX_ID_LENGTH: Final = 250
#: Durations are stored as microseconds in 64 bits.
_MAX_DURATION: Final = timedelta(days=36_500)


def check_id(what: str, value: object) -> str:
    """Return a valid id: at most 250 letters, digits, `-`, `_` and `.`, not starting with `-` or `.`.

    Args:
        what: The name of the argument, for the message.
        value: The id.

    Raises:
        DagError: The value is not a valid id.
    """
    if not isinstance(value, str):
        raise DagError(f"{what} must be a string, got {value!r}")
    if not _ID.fullmatch(value):
        raise DagError(
            f"{what} {value!r} may contain only letters, digits, '-', '_' and '.', and must not start with '-' or '.'; "
            "change it"
        )
    if len(value) > MAX_ID_LENGTH:
        raise DagError(f"{what} {value[:40]!r}... has {len(value)} characters; at most {MAX_ID_LENGTH} are allowed")
    return str.__str__(value)


def check_int(owner: str, name: str, value: object, minimum: int) -> int:
    """Return an int of at least `minimum` and below 2**31."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise DagError(f"{owner}: {name} must be a whole number, got {value!r}")
    if not minimum <= value < 1 << 31:
        raise DagError(f"{owner}: {name} must be at least {minimum} and below 2147483648, got {value}")
    return int(value)


def check_optional_int(owner: str, name: str, value: object, minimum: int) -> int | None:
    """Return an int of at least `minimum` and below 2**31, or None."""
    return None if value is None else check_int(owner, name, value, minimum)


def check_bool(owner: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise DagError(f"{owner}: {name} must be True or False, got {value!r}")
    return value


def check_text(owner: str, name: str, value: object, *, empty: bool = False) -> str:
    """Return a string that every store accepts: valid Unicode without NUL; `empty` allows the empty string."""
    if not isinstance(value, str):
        raise DagError(f"{owner}: {name} must be a string, got {value!r}")
    if not value and not empty:
        raise DagError(f"{owner}: {name} is empty; give it a value, or leave it out")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DagError(f"{owner}: {name} is not Unicode text: {error}") from None
    if "\0" in value:
        raise DagError(f"{owner}: {name} contains a NUL character; remove it")
    return str.__str__(value)


def check_duration(owner: str, name: str, value: object, *, zero: bool = False) -> timedelta:
    """Return a timedelta from a timedelta or a number of seconds; `zero` allows a duration of zero.

    Example:
        >>> check_duration("task 'a'", "retry_delay", 1.5)
        datetime.timedelta(seconds=1, microseconds=500000)
    """
    if isinstance(value, bool) or not isinstance(value, timedelta | int | float):
        raise DagError(f"{owner}: {name} must be a timedelta or a number of seconds, got {value!r}")
    try:
        duration = make_plain_duration(value if isinstance(value, timedelta) else timedelta(seconds=value))
    except (OverflowError, ValueError):
        raise DagError(f"{owner}: {name} is {value} seconds; at most 100 years are allowed") from None
    if duration < timedelta() or (not duration and not zero):
        raise DagError(f"{owner}: {name} must {'not be negative' if zero else 'be positive'}, got {value!r}")
    if duration > _MAX_DURATION:
        raise DagError(f"{owner}: {name} is {duration}; at most 100 years are allowed")
    return duration


def check_optional_duration(owner: str, name: str, value: object) -> timedelta | None:
    """Return a positive timedelta from a timedelta or a number of seconds, or None."""
    return None if value is None else check_duration(owner, name, value)


def check_choice(owner: str, name: str, value: object, choices: Iterable[str]) -> str:
    """Return `value` as a string if it is among `choices`; members of a `StrEnum` count as their values."""
    known = [str(choice) for choice in choices]
    text = str(getattr(value, "value", value))
    if text not in known:
        raise DagError(f"{owner}: {name} is {value!r}; {suggest(text, known)}")
    return text


def check_callbacks(owner: str, name: str, value: object) -> tuple[Callable[..., Any], ...]:
    """Return a tuple of callbacks from one callback, a list of them, or None."""
    callbacks = [] if value is None else value if isinstance(value, list | tuple) else [value]
    for callback in callbacks:
        if not callable(callback):
            raise DagError(f"{owner}: {name} must be a function or a list of functions, got {callback!r}")
    return tuple(callbacks)


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a hint for a misspelt name: the closest known name, or else all known names."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
