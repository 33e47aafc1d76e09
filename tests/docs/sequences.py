"""Draws how pages reach a task: a defer per page, and a stream. `python -m tests.docs.sequences` writes both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.docs.drawing import draw_arrow, draw_box, draw_picture, draw_text
from tests.docs.snippets import ROOT

DEFERRING = ROOT / "docs/explanation/deferring.svg"
STREAM = ROOT / "docs/explanation/stream.svg"

#: Name, a line of text, and whose code it is.
LANES = (
    ("worker", "runs an attempt, in a process", "yours"),
    ("store", "state of tasks, events, journal", "box"),
    ("triggerer", "runs the trigger", "yours"),
    ("API", "a server elsewhere", "outside"),
)
_WIDTH, _GAP, _MARGIN, _TOP, _ROW = 196, 40, 16, 100, 30


@dataclass(frozen=True)
class Loop:
    """Steps that are repeated, with the condition."""

    text: str
    steps: Sequence[tuple[int, int, str]]


#: From lane, to lane, text.
Steps = Sequence["tuple[int, int, str] | Loop"]

DEFERRING_STEPS: Steps = (
    (1, 0, "claim: execute"),
    (0, 1, "defer: a trigger for page 0"),
    Loop(
        "for each page",
        (
            (1, 2, "claim the trigger"),
            (2, 3, "request the page"),
            (3, 2, "the page"),
            (2, 1, "event; the trigger ends"),
            (1, 0, "claim: a new process"),
            (0, 0, "handle the page"),
            (0, 1, "defer: a trigger for the next"),
        ),
    ),
    (0, 1, "success: the map begins"),
)
STREAM_STEPS: Steps = (
    (1, 0, "claim: execute"),
    (0, 1, "defer: a trigger for all pages"),
    (1, 2, "claim the trigger"),
    (2, 3, "request the first page"),
    (3, 2, "the page"),
    (2, 1, "event 0"),
    (1, 0, "claim: a new process"),
    Loop(
        "while pages arrive",
        (
            (2, 3, "request the next page"),
            (1, 0, "take the events that are there"),
            (3, 2, "the page"),
            (0, 0, "handle the batch"),
            (2, 1, "event"),
            (0, 1, "keep: cursor, elements of maps"),
        ),
    ),
    (2, 1, "end of the stream"),
    (0, 1, "success"),
)


def draw_sequence(title: str, steps: Steps) -> str:
    """Return lanes with arrows between them, the first step on top."""
    centres = [_MARGIN + _WIDTH / 2 + lane * (_WIDTH + _GAP) for lane in range(len(LANES))]
    width = 2 * _MARGIN + len(LANES) * (_WIDTH + _GAP) - _GAP
    parts: list[str] = []
    top = _TOP + _ROW
    for step in steps:
        if not isinstance(step, Loop):
            parts += _draw_step(step, centres, top)
            top += _ROW
            continue
        height = _ROW * (len(step.steps) + 1)
        frame = f'x="{_MARGIN / 2:.0f}" y="{top - 18:.0f}" width="{width - _MARGIN:.0f}" height="{height:.0f}"'
        parts += [
            f'<rect class="line" {frame} rx="6" stroke-dasharray="6 4"/>',
            draw_text(step.text, (centres[-2] + centres[-1]) / 2, top - 2),
        ]
        for inner in step.steps:
            top += _ROW
            parts += _draw_step(inner, centres, top - 6)
        top += _ROW + 10
    boxes = [
        part
        for centre, (name, text, kind) in zip(centres, LANES, strict=True)
        for part in draw_box(name, [text], centre - _WIDTH / 2, 16, _WIDTH, 62, kind)
    ]
    lines = [
        f'<path class="line" d="M{centre:.0f} 78 {centre:.0f} {top - 4:.0f}" stroke-dasharray="2 5"/>'
        for centre in centres
    ]
    return draw_picture(title, width, top + 8, [*lines, *boxes, *parts])


def _draw_step(step: tuple[int, int, str], centres: Sequence[float], top: float) -> list[str]:
    source, target, text = step
    if source == target:
        left = centres[source]
        return [
            f'<rect class="yours" x="{left - 70:.0f}" y="{top - 14:.0f}" width="140" height="22" rx="4"/>',
            draw_text(text, left, top + 1),
        ]
    middle = (centres[source] + centres[target]) / 2
    return [draw_arrow((centres[source], top), (centres[target], top)), draw_text(text, middle, top - 5)]


def draw_deferring() -> str:
    """Return an operator that defers once per page."""
    return draw_sequence("A defer per page: claim, defer, trigger, event, for each page", DEFERRING_STEPS)


def draw_stream() -> str:
    """Return an operator that handles a stream."""
    return draw_sequence("A stream: one claim handles the pages while they arrive", STREAM_STEPS)


if __name__ == "__main__":
    DEFERRING.write_text(draw_deferring())
    STREAM.write_text(draw_stream())
