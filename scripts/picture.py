"""Records a command in a terminal and writes what it showed as an SVG that moves.

    python scripts/picture.py FILE COMMAND...

Nothing is staged: a pseudo-terminal records what the command prints, and when. Pauses in which nothing changes are
shortened. Each version of a line is one element, which is visible for as long as the terminal showed it; a viewer that
wants no motion gets the last screen.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import pyte

COLUMNS, ROWS = 96, 40
#: How long the last screen stays, how long nothing may change, and how often the screen is looked at.
END_SECONDS, PAUSE_SECONDS, FRAME_SECONDS = 6.0, 1.0, 0.12
_WIDTH, _HEIGHT, _MARGIN, _BAR = 8.4, 18.0, 14.0, 30.0
_BACKGROUND, _FOREGROUND = "#16181d", "#d7dae0"
_COLOURS = {
    "black": "#5c6370", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "yellow": "#e5c07b",
    "blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#d7dae0",
}  # fmt: skip

Run = tuple[int, str, str, bool]
Line = tuple[Run, ...]


@dataclass
class Version:
    """What one row showed for some time."""

    row: int
    line: Line
    since: float
    until: float


def main(target: Path, command: Sequence[str]) -> int:
    """Record the command in an empty folder; return its exit code, and write the picture if that is 0."""
    with tempfile.TemporaryDirectory() as folder:
        code, screens = record(command, Path(folder))
    if code == 0:
        # The name that a user types, not where it is installed.
        title = " ".join([Path(command[0]).name, *command[1:]])
        target.write_text(draw(list_versions(shorten(screens)), title), encoding="utf-8")
    return code


def record(command: Sequence[str], folder: Path) -> tuple[int, list[tuple[float, list[Line]]]]:
    """Run a command in a terminal; return its exit code, and each screen with the second when it came."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    started = time.monotonic()
    screens: list[tuple[float, list[Line]]] = []
    seen = True
    try:
        # A terminal without writers ends with an error.
        with contextlib.suppress(OSError):
            while True:
                if select.select([controller], [], [], FRAME_SECONDS)[0]:
                    if not (data := os.read(controller, 65536)):
                        break
                    stream.feed(data)
                    seen = False
                now = time.monotonic() - started
                if not seen and (not screens or now - screens[-1][0] >= FRAME_SECONDS):
                    screens.append((now, read_screen(screen)))
                    seen = True
        screens.append((time.monotonic() - started, read_screen(screen)))
        return process.wait(60), screens
    finally:
        os.close(controller)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_screen(screen: pyte.Screen) -> list[Line]:
    """Return the rows of a screen as runs of text with a column, a colour and a weight each."""
    lines = []
    for row in range(ROWS):
        runs: list[Run] = []
        for column in range(COLUMNS):
            char = screen.buffer[row][column]
            colour = _COLOURS.get(char.fg.removeprefix("bright"), f"#{char.fg}" if len(char.fg) == 6 else _FOREGROUND)
            if runs and runs[-1][2:] == (colour, char.bold):
                runs[-1] = (runs[-1][0], runs[-1][1] + char.data, colour, char.bold)
            else:
                runs.append((column, char.data, colour, char.bold))
        lines.append(tuple(run for run in runs if run[1].strip()))
    return lines


def shorten(screens: list[tuple[float, list[Line]]]) -> list[tuple[float, list[Line]]]:
    """Drop screens that repeat the one before, and shorten the pauses between the others."""
    kept = [(0.0, screens[0][1])]
    before = screens[0][0]
    for at, lines in screens[1:]:
        if lines != kept[-1][1]:
            kept.append((kept[-1][0] + min(at - before, PAUSE_SECONDS), lines))
            before = at
    return kept


def list_versions(screens: list[tuple[float, list[Line]]]) -> list[Version]:
    """Return what each row showed, and from when until when."""
    end = screens[-1][0] + END_SECONDS
    found = []
    for row in range(ROWS):
        current: Version | None = None
        for at, lines in screens:
            if current is None or lines[row] != current.line:
                if current is not None:
                    current.until = at
                current = Version(row, lines[row], at, end)
                found.append(current)
    return [version for version in found if version.line]


def draw(versions: list[Version], title: str) -> str:
    """Return the SVG."""
    end = max(version.until for version in versions)
    rows = max(version.row for version in versions) + 1
    width, height = COLUMNS * _WIDTH + 2 * _MARGIN, rows * _HEIGHT + _BAR + _MARGIN
    styles, texts = [], []
    for number, version in enumerate(versions):
        always = version.since == 0 and version.until == end
        name = "" if always else f' class="a{number}"'
        if not always:
            first, last = 100 * version.since / end, 100 * version.until / end
            steps = f"0%{{visibility:{'visible' if first == 0 else 'hidden'}}}"
            steps += f"{first:.2f}%{{visibility:visible}}" if first else ""
            steps += f"{last:.2f}%{{visibility:hidden}}" if last < 100 else ""
            styles.append(f"@keyframes k{number}{{{steps}}}.a{number}{{animation-name:k{number}}}")
            if last < 100:
                styles.append(f"@media(prefers-reduced-motion:reduce){{.a{number}{{visibility:hidden}}}}")
        spans = "".join(_draw_run(*run) for run in version.line)
        texts.append(f'<text{name} y="{_BAR + (version.row + 1) * _HEIGHT - 5:.1f}">{spans}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
        f"<title>{escape(title)}, recorded in a terminal</title><style>text{{white-space:pre;"
        f"font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;animation:{end:.2f}s step-end infinite}}"
        f"@media(prefers-reduced-motion:reduce){{text{{animation:none!important}}}}{''.join(styles)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="{_BACKGROUND}"/>'
        f'<text x="{_MARGIN}" y="20" fill="#8a919e">$ {escape(title)}</text>{"".join(texts)}</svg>\n'
    )


def _draw_run(column: int, text: str, colour: str, bold: bool) -> str:
    text = text.rstrip()
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{_MARGIN + column * _WIDTH:.1f}" textLength="{len(text) * _WIDTH:.1f}"'
    return f'<tspan {place} fill="{colour}"{weight}>{escape(text)}</tspan>'


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
