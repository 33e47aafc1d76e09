"""Draws a probe over time: calls of hooks, and the attempts of tasks between them."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.web.probe.models import AttemptView, HookCallView, ProbeReportView
from tidemill.web.recorded.waterfall import Bar, TimeSpan, draw

_MOST_BARS = 200


def draw_probe(report: ProbeReportView) -> list[Bar]:
    """Return the bars, in order of their start."""
    spans = sorted(_list_spans(report), key=lambda span: span.start)[:_MOST_BARS]
    return draw(spans)


def _list_spans(report: ProbeReportView) -> Iterator[TimeSpan]:
    for stage in report.stages:
        yield _draw_stage(stage, report.seconds)
    for task in report.tasks:
        for attempt in task.attempts:
            name = f"{task.task_id}, try {attempt.attempt}" if attempt.attempt > 1 else task.task_id
            yield _draw_attempt(name, attempt, report.seconds)


def _draw_stage(stage: HookCallView, whole: float) -> TimeSpan:
    name = f"{stage.hook} of {stage.about}" if stage.about else stage.hook
    if stage.seconds is None:
        return TimeSpan(name, "bad", stage.at, whole, "has not returned")
    is_bad = bool(stage.trace.text)
    return TimeSpan(name, "bad" if is_bad else "stage", stage.at, stage.at + stage.seconds, "raised" if is_bad else "")


def _draw_attempt(name: str, attempt: AttemptView, whole: float) -> TimeSpan:
    if attempt.seconds is None:
        return TimeSpan(name, "bad", attempt.at, whole, "was ended", 1)
    is_ok = attempt.kind == "ok"
    note = "" if is_ok else attempt.kind
    return TimeSpan(name, "ok" if is_ok else "bad", attempt.at, attempt.at + attempt.seconds, note, 1)
