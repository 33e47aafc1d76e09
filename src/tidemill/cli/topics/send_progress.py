"""How far `tidemill send` is: a line on the terminal while it sends, and how long it took.

Invariant: nothing is shown, and the terminal is left alone, while little was sent: somebody may be typing the lines.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from tidemill.cli.terminal.status_text import Part, fit, format_seconds

#: What is faster, or less, needs no line.
_SHOW_SECONDS = 1.0
_SHOW_MESSAGES = 1_000


@dataclass(frozen=True, slots=True)
class Sent:
    """How far it is at a moment.

    Attributes:
        messages: How many the brokers confirmed.
        failed: How many lines were not sent.
        read_bytes: How much of the input was read.
    """

    messages: int
    failed: int
    read_bytes: int


class SendProgress:
    """Follows the lines of one input on their way.

    Args:
        lines: The input.
        moment: Returns how far it is now.

    Attributes:
        shown: Whether the line was ever shown.
    """

    def __init__(self, lines: BinaryIO, moment: Callable[[], Sent]) -> None:
        """Begin to count the time."""
        self._size = _find_size(lines)
        self._moment = moment
        self._started = time.monotonic()
        self.shown = False

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Show the line while the block runs, if standard error is a terminal."""
        if not sys.stderr.isatty():
            yield
            return
        from tidemill.cli.terminal.status_line import StatusLine

        with StatusLine(self.draw):
            yield

    def draw(self, width: int) -> str:
        """Return the line, in at most this many columns; empty as long as there is little to say."""
        now, seconds = self._moment(), time.monotonic() - self._started
        self.shown = self.shown or (seconds >= _SHOW_SECONDS and now.messages >= _SHOW_MESSAGES)
        if not self.shown:
            return ""
        parts = [Part(3, (f"{now.messages:,} messages sent", f"{now.messages:,} sent"))]
        parts.append(Part(1, (f"{now.messages / seconds:,.0f}/s",)))
        if now.failed:
            parts.append(Part(2, (f"{now.failed:,} failed",)))
        if self._size and now.read_bytes:
            share = min(1.0, now.read_bytes / self._size)
            left = format_seconds(round(seconds * (1 - share) / share))
            parts.append(Part(0, (f"{share:.0%} read, {left} left", f"{share:.0%}")))
        return fit(parts, width)

    def describe_time(self, messages: int) -> str:
        """Return how long this many messages took and how fast that was, if the line was shown; otherwise nothing."""
        if not self.shown:
            return ""
        seconds = time.monotonic() - self._started
        return f" in {format_seconds(seconds)}, {messages / seconds:,.0f}/s"


def _find_size(lines: BinaryIO) -> int:
    """Return how many bytes an input has from here on; 0 if nobody knows."""
    with contextlib.suppress(OSError, ValueError):
        status = os.fstat(lines.fileno())
        if stat.S_ISREG(status.st_mode):
            return max(0, status.st_size - lines.tell())
    return 0
