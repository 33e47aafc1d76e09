"""The line at the bottom of a terminal, on a real pseudo-terminal: what is left of it, and what stands above it."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.spark.terminal import Command
from tests.until import wait_until

from tidemill.cli.terminal.watching import watch

CHILD = """
import os, sys, time
from tidemill.cli.terminal.status_line import StatusLine
from tidemill.config.settings import LoggingSettings
from tidemill.runtime.log.setup import configure
import structlog

def text(width):
    if first:
        first.clear()
        raise RuntimeError("not yet")
    return f"STATUS {width} ".ljust(width, "=")[:width]

first = [1]
with StatusLine(text):
    configure(LoggingSettings())
    structlog.get_logger().info("a log line")
    print("begun", end=""); print(" and finished")
    for line in sys.stdin:
        if line == "raise\\n":
            raise ValueError("as asked")
        if line == "end\\n":
            print("never finished", end="")
            break
        print(f"read {line.strip()}")
"""


#: What a shell does with a job that is suspended and continued.
SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = os.fork()
if job == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
_, status = os.waitpid(job, os.WUNTRACED)
os.tcsetpgrp(0, os.getpgrp())
print("STOPPED" if os.WIFSTOPPED(status) else f"ended {status}", flush=True)
sys.stdin.readline()
os.tcsetpgrp(0, job)
os.killpg(job, signal.SIGCONT)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]))
"""
ENVIRON = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}


class Screen:
    """What a terminal of these columns shows, as far as the line needs it: it does not wrap."""

    def __init__(self) -> None:
        self.rows = [""]
        self.column = 0

    def feed(self, text: str) -> None:
        place = 0
        while place < len(text):
            if text.startswith(("\x1b[J", "\x1b[K"), place):
                # tmux would keep what was erased in its scrollback.
                assert self.column or text[place + 2] == "K"
                self.rows[-1] = self.rows[-1][: self.column]
                place += 3
                continue
            if text.startswith("\x1b[C", place):
                self.column += 1
                place += 3
                continue
            char = text[place]
            place += 1
            if char == "\r":
                self.column = 0
            elif char == "\n":
                self.rows.append("")
            else:
                row = self.rows[-1].ljust(self.column)
                self.rows[-1] = row[: self.column] + char + row[self.column + 1 :]
                self.column += 1


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    made = Command(["-c", CHILD], ENVIRON, tmp_path, terminal=True, program=[sys.executable])
    try:
        yield made
    finally:
        made.close()


def screen(command: Command) -> list[str]:
    shown = Screen()
    shown.feed(command._said.decode(errors="replace"))
    return [row.rstrip() for row in shown.rows]


def table_screen(command: Command) -> list[str]:
    """Return what a terminal shows that moves its cursor up, too."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Za-z]|[\s\S]", command._said.decode(errors="replace")):
        if part.endswith("A") and len(part) > 1:
            row -= int(part[2:-1])
        elif part == "\x1b[J":
            rows[row] = rows[row][:column]
            del rows[row + 1 :]
        elif part == "\x1b[K":
            rows[row] = rows[row][:column]
        elif part == "\x1b[C":
            column += 1
        elif part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif not part.startswith("\x1b"):
            rows[row] = rows[row].ljust(column)[:column] + part + rows[row][column + 1 :]
            column += 1
    return [text for text in rows if text.strip()]


def resize(command: Command, columns: int) -> None:
    fcntl.ioctl(command._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def echoes(command: Command) -> bool:
    return bool(termios.tcgetattr(command._ours)[3] & termios.ECHO)


def test_other_output_stands_above_the_line_and_nothing_of_it_is_left_at_the_end(command: Command) -> None:
    resize(command, 60)
    command.until_said("STATUS 57 ")
    command.type("hello\n")
    command.until_said("read hello")
    command.type("\n\n")
    wait_until(lambda: command.said.count("read ") == 3)
    command.type("end\n")
    assert command.process.wait(60) == 0
    command._reader.join(60)

    rows = screen(command)
    assert [row[8:] if "a log line" in row else row for row in rows] == [
        " info    a log line",
        "begun and finished",
        "read hello",
        "read",
        "read",
        "never finished",
    ]
    assert "\x1b[?25l" not in command._said.decode()


TABLE = CHILD.replace(
    'return f"STATUS {width} ".ljust(width, "=")[:width]',
    r"""return "\n".join(f"STATUS {number}" for number in range(int(open("rows").read())))""",
)


def test_a_table_is_drawn_below_the_log_in_place_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("4")
    command = Command(["-c", TABLE], ENVIRON, tmp_path, terminal=True, program=[sys.executable])
    try:
        resize(command, 60)
        command.until_said("STATUS 3")
        command.type("hello\n")
        command.until_said("read hello")
        (tmp_path / "rows").write_text("2")
        said = len(command._said)
        wait_until(lambda: b"STATUS 1\x1b[J\r\x1b[1A" in command._said[said:], what=lambda: command._said[said:])
        (tmp_path / "rows").write_text("99")
        # No more than half of the 24 lines.
        wait_until(lambda: b"STATUS 11\x1b[J\r\x1b[11A" in command._said[said:], what=lambda: command._said[said:])
        assert b"STATUS 12" not in command._said
        command.type("end\n")
        assert command.process.wait(60) == 0
        command._reader.join(60)

        shown = [row.strip() for row in table_screen(command)]
        assert [row[9:] if "a log line" in row else row for row in shown] == [
            "info    a log line",
            "begun and finished",
            "read hello",
            "never finished",
        ]
        # Lines are written over the old ones: nothing is erased first, but what other output pushes down.
        erased = command._said.count(b"\r\x1b[K\x1b[C\x1b[J\r")
        assert erased <= 4
    finally:
        command.close()


def test_on_a_terminal_that_cannot_move_its_cursor_up_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("4")
    environ = {**ENVIRON, "TERM": "dumb"}
    command = Command(["-c", TABLE], environ, tmp_path, terminal=True, program=[sys.executable])
    try:
        command.until_said("STATUS 0")
        command.type("end\n")
        assert command.process.wait(60) == 0
        command._reader.join(60)
        assert "STATUS 1" not in command.said
    finally:
        command.close()


def test_after_an_exception_only_the_exception_is_left(command: Command) -> None:
    command.until_said("STATUS")
    command.type("raise\n")
    assert command.process.wait(60) == 1
    command._reader.join(60)

    rows = screen(command)
    assert "ValueError: as asked" in rows
    assert not any("STATUS" in row for row in rows)


def test_it_fits_the_terminal_after_a_resize(command: Command) -> None:
    for columns in (60, 40, 200):
        resize(command, columns)
        command.until_said(f"STATUS {columns - 3} ")


def test_a_suspended_process_leaves_no_line_and_a_terminal_as_it_was(tmp_path: Path) -> None:
    shell = Command(["-c", SHELL, CHILD], ENVIRON, tmp_path, terminal=True, program=[sys.executable])
    try:
        shell.until_said("STATUS")
        wait_until(lambda: not echoes(shell))
        shell.type("\x1a")
        shell.until_said("STOPPED")
        assert not any("STATUS" in row for row in screen(shell))
        assert echoes(shell)
        said = len(shell._said)
        shell.type("fg\n")
        wait_until(lambda: b"STATUS" in shell._said[said:], what=lambda: shell.said)
        wait_until(lambda: not echoes(shell))
        shell.type("end\n")
        assert shell.process.wait(60) == 0
        assert echoes(shell)
    finally:
        shell.close()


def test_as_long_as_there_is_nothing_to_say_typed_keys_are_shown(tmp_path: Path) -> None:
    child = CHILD.replace("def text(width):", "def text(width):\n    if not os.path.exists('now'):\n        return ''")
    command = Command(["-c", child], ENVIRON, tmp_path, terminal=True, program=[sys.executable])
    try:
        command.until_said("begun and finished")
        command.type("hello\n")
        command.until_said("hello\r\nread hello")  # once by the terminal, once by the program
        assert "STATUS" not in command.said
        (tmp_path / "now").touch()
        command.until_said("STATUS")
        wait_until(lambda: not echoes(command))
        command.type("end\n")
        assert command.process.wait(60) == 0
    finally:
        command.close()


def test_without_a_terminal_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    with watch(lambda rate, width: "STATUS", lambda: (_ for _ in ()).throw(RuntimeError), lambda *_: {}, plain=False):
        pass

    assert capsys.readouterr() == ("", "")
