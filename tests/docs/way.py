"""Draws the path of a message, and what an engine consists of. `python -m tests.docs.way` writes both."""

from __future__ import annotations

from tests.docs.drawing import draw_arrow, draw_box, draw_picture, draw_text
from tests.docs.snippets import ROOT

MESSAGE = ROOT / "docs/explanation/message.svg"
ENGINE = ROOT / "docs/explanation/engine.svg"

#: Name, two lines of text, and whose code it is.
STEPS = (
    ("consumed", ("from a partition", "of the source topic"), "outside"),
    ("window", ("messages of one", "partition, in order"), "box"),
    ("arrange", ("your hook turns", "them into tasks"), "yours"),
    ("tasks", ("a process each,", "side by side"), "box"),
    ("hooks", ("yours turn results", "into payloads"), "yours"),
    ("sinks", ("each payload is", "confirmed"), "outside"),
    ("commit", ("up to the first that", "is not delivered"), "outside"),
)
_WIDTH, _GAP, _MARGIN = 122, 18, 12


def draw_message() -> str:
    """Return the path of a message, with what happens to one that fails."""
    lefts = [_MARGIN + step * (_WIDTH + _GAP) for step in range(len(STEPS))]
    parts: list[str] = []
    for left, (name, texts, kind) in zip(lefts, STEPS, strict=True):
        parts += draw_box(name, texts, left, 16, _WIDTH, 76, kind)
    parts += [draw_arrow((left + _WIDTH, 54), (left + _WIDTH + _GAP, 54)) for left in lefts[:-1]]
    first, last = lefts[2] + _WIDTH / 2, lefts[5] + _WIDTH / 2
    letter = (lefts[3], 148, 2 * _WIDTH + _GAP, 62)
    middle, commit = letter[1] + 31, lefts[6] + _WIDTH / 2
    parts += draw_box("dead-letter topic", ["what cannot be processed or delivered"], *letter, kind="outside")
    parts += [
        draw_arrow((first, 92), (first, middle), (letter[0], middle)),
        draw_arrow((lefts[3] + _WIDTH / 2, 92), (lefts[3] + _WIDTH / 2, letter[1])),
        draw_arrow((lefts[4] + _WIDTH / 2, 92), (lefts[4] + _WIDTH / 2, letter[1])),
        draw_arrow((last, 92), (last, middle - 12), (letter[0] + letter[2], middle - 12)),
        draw_arrow((letter[0] + letter[2], middle + 12), (commit, middle + 12), (commit, 92)),
        draw_text("raises, still fails after its retries,", first - 120, middle - 4),
        draw_text("or is refused permanently", first - 120, middle + 12),
        draw_text("letter confirmed", (letter[0] + letter[2] + commit) / 2, middle + 30),
    ]
    title = "The path of a message: " + ", ".join(name for name, _, _ in STEPS)
    return draw_picture(title, 2 * _MARGIN + len(STEPS) * (_WIDTH + _GAP) - _GAP, 226, parts)


def draw_engine() -> str:
    """Return the driver and one engine, with what they tell each other."""
    parts = [
        *draw_box("driver", ["your process: tidemill run"], 12, 16, 210, 250),
        *draw_box("pipeline", ["checks, signals, status"], 28, 92, 178, 66),
        *draw_box("supervisor", ["one per slot"], 28, 184, 178, 66),
        *draw_box("engine", ["a long Spark task, one per slot"], 392, 16, 556, 250),
        *draw_box("consumer", ["a thread with Kafka"], 408, 92, 154, 66),
        *draw_box("windows", ["per partition"], 586, 92, 154, 66),
        *draw_box("tasks", ["subprocesses, hooks"], 764, 92, 168, 66, kind="yours"),
        *draw_box("ledger", ["what is resolved"], 586, 184, 154, 66),
        *draw_box("outbox", ["sinks, dead letters"], 764, 184, 168, 66),
        draw_arrow((206, 204), (392, 204)),
        draw_text("Spark job", 307, 196),
        draw_arrow((392, 232), (206, 232)),
        draw_text("link: beats, progress", 307, 250),
        draw_arrow((206, 125), (392, 125)),
        draw_text("link: drain, pause", 307, 117),
        draw_arrow((562, 125), (586, 125)),
        draw_arrow((740, 125), (764, 125)),
        draw_arrow((848, 158), (848, 184)),
        draw_arrow((764, 217), (740, 217)),
        draw_arrow((586, 217), (485, 217), (485, 158)),
        draw_text("commits", 530, 234),
        draw_arrow((117, 158), (117, 184)),
    ]
    return draw_picture("The driver and an engine", 960, 282, parts)


if __name__ == "__main__":
    MESSAGE.write_text(draw_message())
    ENGINE.write_text(draw_engine())
