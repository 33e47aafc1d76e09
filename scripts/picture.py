"""Records `tidemill run` in a terminal and writes what it showed as an SVG that moves.

    python scripts/picture.py FILE

Nothing is staged: a broker gets the lines of the example once the pipeline waits for messages, Ctrl-C stops it when all
are committed, and a pseudo-terminal records what it prints, and when. Pauses in which nothing changes are shortened.
Each version of a line is one element, which is visible for as long as the terminal showed it; a viewer that wants no
motion gets the last screen.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import pyte
from confluent_kafka import KafkaException

from tidemill.cli.demo.demo import find_example
from tidemill.config.loading import load_settings
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.kafka.topic_reader import TopicReader

COLUMNS, ROWS = 96, 24
#: How fast the example's 10,000 lines come.
LINES_PER_SECOND = 800
#: How long the last screen stays, how long nothing may change, and how often the screen is looked at.
END_SECONDS, PAUSE_SECONDS, FRAME_SECONDS = 6.0, 1.0, 0.2
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


def main(target: Path) -> int:
    """Run the example's pipeline; return its exit code, and write the picture if that is 0."""
    command = ("tidemill", "run", "tidemill.yaml", "--handler", "pipeline:AccessLog")
    with tempfile.TemporaryDirectory() as name, EmbeddedBroker(progress=print) as broker:
        folder = Path(name)
        shutil.copytree(find_example(), folder, dirs_exist_ok=True)
        settings = load_settings(folder / "tidemill.yaml", environ={})
        topic, group = settings.kafka.source_topic, settings.kafka.consumer_group
        for each in (topic, settings.sinks.kafka["results"].topic):
            broker.create_topic(each, 4)
        lines = gzip.decompress((folder / "access.log.gz").read_bytes())
        environ = {**os.environ, "TIDEMILL_KAFKA__BROKERS": broker.bootstrap, "WORKER_ID": "picture"}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"

        senders: list[subprocess.Popen[bytes]] = []

        with TopicReader(broker.bootstrap, group) as reader:

            def look(text: str) -> bool:
                if not senders and "messages done" in text:
                    senders.append(_start_sending(topic, lines, folder, environ))
                with contextlib.suppress(KafkaException):  # the group may have no coordinator yet
                    committed = sum(max(offset, 0) for offset in reader.committed(topic).values())
                    return committed >= lines.count(b"\n")
                return False

            code, screens = record(command, folder, environ, look)
        for sender in senders:
            code = code or sender.wait(60)
    if code == 0:
        target.write_text(draw(list_versions(shorten(screens)), " ".join(command)), encoding="utf-8")
    return code


def _start_sending(topic: str, lines: bytes, folder: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    (folder / "access.log").write_bytes(lines)
    rate = ("--rate", str(LINES_PER_SECOND))
    return subprocess.Popen(
        ("tidemill", "send", topic, "access.log", *rate, "--config", "tidemill.yaml"), cwd=folder, env=environ
    )


def record(
    command: Sequence[str], folder: Path, environ: Mapping[str, str], look: Callable[[str], bool]
) -> tuple[int, list[tuple[float, list[Line]]]]:
    """Run a command in a terminal, and press Ctrl-C when it is done.

    Args:
        command: The command.
        folder: Its working folder.
        environ: Its environment.
        look: Called every second with the text on the screen; tells whether the command is done.

    Returns:
        Its exit code, and each screen with the second when it came.
    """
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        ("setsid", "--ctty", "--wait", *command),
        cwd=folder,
        env={**environ, "TERM": "xterm-256color"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    started = time.monotonic()
    screens: list[tuple[float, list[Line]]] = []
    seen, pressed, look_at = True, False, 0.0
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
                if not pressed and now >= look_at:
                    pressed, look_at = look("\n".join(screen.display)), now + 1.0
                    if pressed:
                        os.write(controller, b"\x03")
                if not seen and (not screens or now - screens[-1][0] >= FRAME_SECONDS):
                    screens.append((now, read_screen(screen)))
                    seen = True
        screens.append((time.monotonic() - started, read_screen(screen)))
        return process.wait(60), screens
    finally:
        os.close(controller)
        if process.poll() is None:
            process.kill()  # the terminal that is gone ends what is in it
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
            # Without animation only the last screen is visible.
            still = ";visibility:hidden" if last < 100 else ""
            styles.append(f"@keyframes k{number}{{{steps}}}.a{number}{{animation-name:k{number}{still}}}")
        spans = "".join(_draw_run(*run) for run in version.line)
        texts.append(f'<text{name} y="{_BAR + (version.row + 1) * _HEIGHT - 5:.1f}">{spans}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" role="img" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">'
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
    sys.exit(main(Path(sys.argv[1])))
