"""The progress of `tidemill send`: a line on the terminal while it sends, and the time it took.

Invariant: the terminal is left alone while little was sent, because a user may be typing the lines.
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

#: Shorter or smaller sends need no progress line.
_SHOW_SECONDS = 1.0
_SHOW_MESSAGES = 1_000


@dataclass(frozen=True, slots=True)
class SentCounts:
    """A snapshot of the progress.

    Attributes:
        messages: The number of confirmed messages.
        failed: The number of lines that were not sent.
        read_bytes: The number of bytes read from the input.
    """

    messages: int
    failed: int
    read_bytes: int


class SendProgress:
    """Follows the progress of one input.

    Args:
        lines: The input.
        moment: Returns the current progress.

    Attributes:
        shown: Whether the line has been shown.
    """

    def __init__(self, lines: BinaryIO, moment: Callable[[], SentCounts]) -> None:
        self._size = _find_size(lines)
        self._moment = moment
        self._started = time.monotonic()
        self.shown = False

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Show the progress line during the block, if standard error is a terminal."""
        if not sys.stderr.isatty():
            yield
            return
        from tidemill.cli.terminal.status_line import StatusLine

        with StatusLine(self.draw):
            yield

    def draw(self, width: int) -> str:
        """Return the progress line for a width; empty while there is little to report."""
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
        """Return the duration and the rate for a number of messages; '' if the line was never shown."""
        if not self.shown:
            return ""
        seconds = time.monotonic() - self._started
        return f" in {format_seconds(seconds)}, {messages / seconds:,.0f}/s"


def _find_size(lines: BinaryIO) -> int:
    """Return the number of bytes left in an input; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        status = os.fstat(lines.fileno())
        if stat.S_ISREG(status.st_mode):
            return max(0, status.st_size - lines.tell())
    return 0
