"""Draws what happened to a message over time: its stages, the tries of its tasks, refused deliveries, the commit.

A bar is given in thousandths of the whole time, so that a page can draw it without any style of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemill.web.recorded.models import Told

#: A thousandth would hardly be seen.
_LEAST_WIDTH = 4.0
_WHOLE = 1000.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A line of the picture.

    Attributes:
        name: What it is.
        tone: stage, ok, bad, wait or mark.
        left: Where it begins, in thousandths.
        width: How long it is, likewise.
        at: When it began, in seconds since the epoch.
        seconds: How long it took; None: it is a moment.
        note: What else there is to say.
        indent: How deep it is.
    """

    name: str
    tone: str
    left: float
    width: float
    at: float
    seconds: float | None
    note: str = ""
    indent: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time; see `Bar`."""

    name: str
    tone: str
    start: float
    end: float | None
    note: str = ""
    indent: int = 0


def draw_waterfall(told: Told) -> list[Bar]:
    """Return the lines, in order of what happened; none if no time is known."""
    return draw(list(_list_spans(told)))


def draw(spans: Sequence[Span]) -> list[Bar]:
    """Return the lines of some stretches of time, in their order."""
    if not spans:
        return []
    begin = min(span.start for span in spans)
    whole = max((span.end or span.start) for span in spans) - begin or 1e-6
    return [_place(span, begin, whole) for span in spans]


def _place(span: Span, begin: float, whole: float) -> Bar:
    seconds = None if span.end is None else max(0.0, span.end - span.start)
    width = max(_LEAST_WIDTH, (seconds or 0.0) / whole * _WHOLE)
    left = min((span.start - begin) / whole * _WHOLE, _WHOLE - width)
    return Bar(span.name, span.tone, max(0.0, left), min(width, _WHOLE), span.start, seconds, span.note, span.indent)


def _list_spans(told: Told) -> Iterator[Span]:
    message = told.message
    consumed, arranged, tasks_done = message.consumed_at, message.arranged_at, message.tasks_done_at
    if consumed is not None:
        called = "arrange" if message.tasks else "arrange or transform"
        yield Span(f"buffer, window and {called}", "stage", consumed, arranged or message.resolved_at)
    if message.tasks and arranged is not None and tasks_done is not None:
        yield Span("tasks", "stage", arranged, tasks_done)
    yield from sorted(_list_details(told), key=lambda span: span.start)
    if tasks_done is not None and message.resolved_at is not None:
        yield Span("hooks and delivery", "stage", tasks_done, message.resolved_at)
    if told.committed_at is not None and message.resolved_at is not None:
        yield Span("waiting for the commit", "wait", message.resolved_at, told.committed_at)
        note = "" if told.committed_exactly else "seen at the latest then"
        yield Span("committed", "mark", told.committed_at, None, note)


def _list_details(told: Told) -> Iterator[Span]:
    for task in told.tasks:
        name = f"{task.task_id}, try {task.attempt}" if task.attempt > 1 else task.task_id
        if task.queued_at is not None and task.started_at is not None:
            yield Span(f"{name}: queued", "wait", task.queued_at, task.started_at, indent=1)
        start = task.started_at or task.queued_at
        if start is not None:
            tone = "ok" if task.kind == "ok" else "bad"
            yield Span(name, tone, start, task.ended_at, "" if task.kind == "ok" else task.kind, 1)
    for event in told.events:
        what = event.sink.removeprefix("sinks.") if event.sink else event.task_id or ""
        yield Span(event.kind.replace("_", " "), "bad", event.at, None, what, 1)
