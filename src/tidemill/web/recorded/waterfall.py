"""Draws a message's history over time: its stages, the attempts of its tasks, failed deliveries, the commit.

Bars are given in thousandths of the whole time, so that pages draw them without inline styles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemill.web.recorded.models import MessageHistory

#: A thousandth would hardly be visible.
_LEAST_WIDTH = 4.0
_WHOLE = 1000.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of the waterfall.

    Attributes:
        name: The label.
        tone: stage, ok, bad, wait or mark.
        left: The start, in thousandths.
        width: The length, in thousandths.
        at: The start, in seconds since the epoch.
        seconds: The duration; None for a moment.
        note: Further text.
        indent: The level of nesting.
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
class TimeSpan:
    """A named period of time; see `Bar`."""

    name: str
    tone: str
    start: float
    end: float | None
    note: str = ""
    indent: int = 0


def draw_waterfall(told: MessageHistory) -> list[Bar]:
    """Return the bars in order of time; none if no time is known."""
    return draw(list(_list_spans(told)))


def draw(spans: Sequence[TimeSpan]) -> list[Bar]:
    """Return the bars of some spans, in their order."""
    if not spans:
        return []
    begin = min(span.start for span in spans)
    whole = max((span.end or span.start) for span in spans) - begin or 1e-6
    return [_draw_bar(span, begin, whole) for span in spans]


def _draw_bar(span: TimeSpan, begin: float, whole: float) -> Bar:
    seconds = None if span.end is None else max(0.0, span.end - span.start)
    width = max(_LEAST_WIDTH, (seconds or 0.0) / whole * _WHOLE)
    left = min((span.start - begin) / whole * _WHOLE, _WHOLE - width)
    return Bar(span.name, span.tone, max(0.0, left), min(width, _WHOLE), span.start, seconds, span.note, span.indent)


def _list_spans(told: MessageHistory) -> Iterator[TimeSpan]:
    message = told.message
    consumed, arranged, tasks_done = message.consumed_at, message.arranged_at, message.tasks_done_at
    if consumed is not None:
        called = "arrange" if message.tasks else "arrange or transform"
        yield TimeSpan(f"buffer, window and {called}", "stage", consumed, arranged or message.resolved_at)
    if message.tasks and arranged is not None and tasks_done is not None:
        yield TimeSpan("tasks", "stage", arranged, tasks_done)
    yield from sorted(_list_details(told), key=lambda span: span.start)
    if tasks_done is not None and message.resolved_at is not None:
        yield TimeSpan("hooks and delivery", "stage", tasks_done, message.resolved_at)
    if told.committed_at is not None and message.resolved_at is not None:
        yield TimeSpan("waiting for the commit", "wait", message.resolved_at, told.committed_at)
        note = "" if told.committed_exactly else "at this time or earlier"
        yield TimeSpan("committed", "mark", told.committed_at, None, note)


def _list_details(told: MessageHistory) -> Iterator[TimeSpan]:
    for task in told.tasks:
        name = f"{task.task_id}, try {task.attempt}" if task.attempt > 1 else task.task_id
        if task.queued_at is not None and task.started_at is not None:
            yield TimeSpan(f"{name}: queued", "wait", task.queued_at, task.started_at, indent=1)
        start = task.started_at or task.queued_at
        if start is not None:
            tone = "ok" if task.kind == "ok" else "bad"
            yield TimeSpan(name, tone, start, task.ended_at, "" if task.kind == "ok" else task.kind, 1)
    for event in told.events:
        what = event.sink.removeprefix("sinks.") if event.sink else event.task_id or ""
        yield TimeSpan(event.kind.replace("_", " "), "bad", event.at, None, what, 1)
