"""Filters in query strings: parsed, checked, and encoded again for links.

An error names its filter; invalid values are never guessed at.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Depends, Query

from tidemill.core.recorder.key_text import read_key
from tidemill.core.times import parse_ago, parse_moment
from tidemill.recorder.format.events import EventKind
from tidemill.recorder.reading.queries import TASK_KINDS, EventQuery, MessageQuery, TaskQuery
from tidemill.recorder.reading.runs import RunFilter
from tidemill.web.problems import RequestProblem

_MILLION = 1_000_000
#: A message as logs and pages write it: topic:partition:offset, or with slashes.
_POSITION = re.compile(r"(?P<topic>[A-Za-z0-9._-]+)[:/](?P<partition>\d{1,9})[:/](?P<offset>\d{1,18})", re.ASCII)
STATUSES = ("done", "failed", "rejected")

Text = Annotated[str, Query(max_length=1024)]


def parse_position(text: str) -> tuple[str, int, int] | None:
    """Return topic, partition and offset; None for any other text.

    Example:
        >>> parse_position("orders:3:4711"), parse_position("orders/3/4711"), parse_position("A-17")
        (('orders', 3, 4711), ('orders', 3, 4711), None)
    """
    found = _POSITION.fullmatch(text.strip())
    return (found["topic"], int(found["partition"]), int(found["offset"])) if found else None


def parse_time(name: str, text: str, now: float) -> int | None:
    """Return a time in microseconds since the epoch.

    Args:
        name: The filter's name.
        text: "15m", "2h" or "1d" before now, or a date or time, in UTC unless it has a zone; '' is None.
        now: Seconds since the epoch.

    Raises:
        Problem: The text is not a time.

    Example:
        >>> parse_time("since", "15m", 1000.0), parse_time("since", "1970-01-01T00:01", 0.0)
        (100000000, 60000000)
    """
    if not text:
        return None
    try:
        ago = parse_ago(text)
        return parse_moment(text) if ago is None else max(0, int(now * _MILLION) - ago)
    except ValueError:
        raise RequestProblem(
            422, f"{name}: expected a time such as 2026-05-01T12:00, or 15m, 2h or 1d ago, not {text!r}"
        ) from None


def parse_number(name: str, text: str, kind: type[int] | type[float]) -> int | float | None:
    """Return a non-negative number; None for ''.

    Raises:
        Problem: The text is not such a number.
    """
    if not text:
        return None
    try:
        # Python also accepts digits of other scripts, and 1_0.
        number = kind(text) if text.isascii() and "_" not in text else -1
    except ValueError:
        number = -1
    if not 0 <= number < (2**62 if kind is int else 2**62 / 1e6):  # stored as microseconds
        what = "a whole number" if kind is int else "a number of seconds"
        raise RequestProblem(422, f"{name}: expected {what}, not {text!r}")
    return number


def _parse_int(name: str, text: str) -> int | None:
    number = parse_number(name, text, int)
    return None if number is None else int(number)


def parse_words(name: str, words: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the non-empty words of a filter.

    Raises:
        Problem: A word is unknown.
    """
    chosen = tuple(word for word in words if word)
    for word in chosen:
        if word not in known:
            raise RequestProblem(422, f"{name}: expected one of {', '.join(known)}, not {word!r}")
    return chosen


def read_messages(
    topic: Text = "",
    partition: Text = "",
    offset: Text = "",
    key: Text = "",
    task: Text = "",
    label: Annotated[str, Query(max_length=1024, description="NAME=VALUE")] = "",
    status: Annotated[list[str], Query(description="done, failed, rejected")] = [],  # noqa: B006 - FastAPI copies it
    min_seconds: Annotated[str, Query(max_length=20, description="The shortest time from consumed to resolved.")] = "",
    max_seconds: Annotated[str, Query(max_length=20)] = "",
    since: Annotated[
        str, Query(max_length=40, description="A time such as 2026-05-01T12:00, or 15m, 2h, 1d ago.")
    ] = "",
    until: Annotated[str, Query(max_length=40)] = "",
    error: Annotated[str, Query(max_length=1024, description="A text in an error of the message.")] = "",
    recording: Text = "",
    group: Text = "",
    worker: Text = "",
) -> MessageQuery:
    """Return the query for messages from query parameters."""
    now = time.time()
    return MessageQuery(
        topic=topic or None,
        partition=_parse_int("partition", partition),
        offset=_parse_int("offset", offset),
        key=read_key(key) if key else None,
        task_id=task or None,
        label=_check_label(label),
        statuses=parse_words("status", status, STATUSES),
        min_seconds=parse_number("min_seconds", min_seconds, float),
        max_seconds=parse_number("max_seconds", max_seconds, float),
        since_us=parse_time("since", since, now),
        until_us=parse_time("until", until, now),
        error=error,
        recording=recording or None,
        group=group or None,
        worker=worker or None,
    )


def read_tasks(
    topic: Text = "",
    partition: Text = "",
    offset: Text = "",
    task: Text = "",
    label: Annotated[str, Query(max_length=1024, description="NAME=VALUE")] = "",
    kind: Annotated[list[str], Query(description=", ".join(TASK_KINDS))] = [],  # noqa: B006 - FastAPI copies it
    min_seconds: Annotated[str, Query(max_length=20)] = "",
    max_seconds: Annotated[str, Query(max_length=20)] = "",
    since: Annotated[
        str, Query(max_length=40, description="A time such as 2026-05-01T12:00, or 15m, 2h, 1d ago.")
    ] = "",
    until: Annotated[str, Query(max_length=40)] = "",
    recording: Text = "",
    group: Text = "",
    worker: Text = "",
) -> TaskQuery:
    """Return the query for tasks from query parameters."""
    now = time.time()
    return TaskQuery(
        topic=topic or None,
        partition=_parse_int("partition", partition),
        offset=_parse_int("offset", offset),
        task_id=task or None,
        label=_check_label(label),
        kinds=parse_words("kind", kind, TASK_KINDS),
        min_seconds=parse_number("min_seconds", min_seconds, float),
        max_seconds=parse_number("max_seconds", max_seconds, float),
        since_us=parse_time("since", since, now),
        until_us=parse_time("until", until, now),
        recording=recording or None,
        group=group or None,
        worker=worker or None,
    )


def read_events(
    topic: Text = "",
    partition: Text = "",
    offset: Text = "",
    task: Text = "",
    sink: Text = "",
    kind: Annotated[list[str], Query(description=", ".join(EventKind))] = [],  # noqa: B006 - FastAPI copies it
    error_class: Text = "",
    text: Annotated[str, Query(max_length=1024, description="A part of the event's text.")] = "",
    since: Annotated[
        str, Query(max_length=40, description="A time such as 2026-05-01T12:00, or 15m, 2h, 1d ago.")
    ] = "",
    until: Annotated[str, Query(max_length=40)] = "",
    recording: Text = "",
    group: Text = "",
    worker: Text = "",
) -> EventQuery:
    """Return the query for events from query parameters."""
    now = time.time()
    return EventQuery(
        topic=topic or None,
        partition=_parse_int("partition", partition),
        offset=_parse_int("offset", offset),
        task_id=task or None,
        sink=sink or None,
        kinds=parse_words("kind", kind, tuple(EventKind)),
        error_class=error_class or None,
        text=text,
        since_us=parse_time("since", since, now),
        until_us=parse_time("until", until, now),
        recording=recording or None,
        group=group or None,
        worker=worker or None,
    )


def read_runs(recording: Text = "", group: Text = "", worker: Text = "") -> RunFilter:
    """Return the filter for runs from query parameters."""
    return RunFilter(recording=recording or None, group=group or None, worker=worker or None)


#: Query parameters that select runs; `runs=all` selects all of them.
RUN_NAMES = frozenset({"recording", "group", "worker", "runs"})
RunFilters = Annotated[RunFilter, Depends(read_runs)]
MessageFilters = Annotated[MessageQuery, Depends(read_messages)]
TaskFilters = Annotated[TaskQuery, Depends(read_tasks)]
EventFilters = Annotated[EventQuery, Depends(read_events)]


def _check_label(label: str) -> str | None:
    if label and "=" not in label.strip("="):
        raise RequestProblem(422, f"label: expected NAME=VALUE, not {label!r}")
    return label or None


def change_address(given: Mapping[str, list[str]], **changes: str | None) -> str:
    """Return a query string with some filters changed; None or '' removes a filter.

    Example:
        >>> change_address({"status": ["failed"], "cursor": ["x"]}, cursor=None, since="1h")
        'status=failed&since=1h'
    """
    kept = {name: [value for value in values if value] for name, values in given.items() if name not in changes}
    added = {name: [value] for name, value in changes.items() if value}
    return urlencode({name: values for name, values in {**kept, **added}.items() if values}, doseq=True)
