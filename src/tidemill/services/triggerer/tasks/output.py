"""Routes the output of triggers that share a process: each line goes to the log of its own task.

A trigger writes with `self.log`, with the standard library's `logging`, and with `print`. The context in which the
trigger runs tells which task a line belongs to; threads started by `asyncio.to_thread` inherit it. Lines without such a
context go to their usual destination.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

from tidemill.runtime.log.task_lines import STREAM_LEVELS


class LineSink(Protocol):
    """Takes the lines of one trigger."""

    def write(self, level: str, text: str) -> None:
        """Add an entry; a text of several lines stays one entry. Never raises; callable from any thread."""

    def write_piece(self, level: str, text: str, stream: str, *, ended: bool) -> None:
        """Add a piece of an entry: `stream` separates concurrent entries, `ended` marks the last piece."""


#: The log of the task whose trigger is running.
SINK: ContextVar[LineSink | None] = ContextVar("tidemill_task_log", default=None)


class _LevelSink:
    """The output of structlog: a method for each level."""

    def __init__(self, sink: LineSink) -> None:
        self._sink = sink

    def __getattr__(self, level: str) -> Any:
        return lambda text: self._sink.write(level, text)


def make_logger(sink: LineSink, level: int = logging.INFO) -> Any:
    """Return a structlog logger whose entries go to a sink."""
    return structlog.wrap_logger(
        _LevelSink(sink),
        processors=[structlog.processors.StackInfoRenderer(), structlog.processors.format_exc_info, _render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        context_class=dict,
        cache_logger_on_first_use=False,
    )


def _render(logger: WrappedLogger, method: str, event: EventDict) -> str:
    text, after = (
        str(event.pop("event", "")),
        [str(event.pop(name)) for name in ("stack", "exception") if name in event],
    )
    about = " ".join(f"{name}={value}" for name, value in event.items())
    return "\n".join([f"{text} {about}" if about else text, *after])


class SinkHandler(logging.Handler):
    """Sends records of the standard library's `logging` to the task whose trigger logs them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record to the log of its task, if it has one."""
        sink = SINK.get()
        if sink is None:
            return
        try:
            text = self.format(record)
        except Exception as error:  # the arguments do not fit the format, or their `__str__` raises
            text = f"{record.msg!r} cannot be formatted: {type(error).__name__}: {error}"
        sink.write(record.levelname.lower(), text)


def _is_untasked(record: logging.LogRecord) -> bool:
    return SINK.get() is None


class SinkStream(io.TextIOBase):
    """Sends printed text to the task whose trigger prints it, line by line.

    Args:
        stream: Receives all other text.
        level: The level of the lines.
    """

    def __init__(self, stream: TextIO, level: str) -> None:
        self._stream, self._level = stream, level
        self._begun: ContextVar[str] = ContextVar("tidemill_begun_line", default="")
        #: Whether a piece of the current line has been written.
        self._is_open: ContextVar[bool] = ContextVar("tidemill_open_line", default=False)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Write text; an incomplete line is buffered."""
        sink = SINK.get()
        if sink is None:
            return self._stream.write(text)
        *lines, begun = (self._begun.get() + text).split("\n")
        self._begun.set(begun)
        if lines and self._is_open.get():
            self._is_open.set(False)
            sink.write_piece(self._level, lines.pop(0), self._level, ended=True)
        for line in lines:
            sink.write(self._level, line)
        return len(text)

    def flush(self) -> None:
        """Write the buffered part of the current line."""
        sink = SINK.get()
        if sink is None:
            self._stream.flush()
        elif begun := self._begun.get():
            self._begun.set("")
            self._is_open.set(True)
            sink.write_piece(self._level, begun, self._level, ended=False)


@contextlib.contextmanager
def route_output() -> Iterator[None]:
    """Send the output of triggers to their tasks while the block runs."""
    root, handler = logging.getLogger(), SinkHandler()
    others = list(root.handlers)
    for other in others:
        other.addFilter(_is_untasked)
    root.addHandler(handler)
    before = sys.stdout, sys.stderr
    sys.stdout = SinkStream(before[0], STREAM_LEVELS["stdout"])
    sys.stderr = SinkStream(before[1], STREAM_LEVELS["stderr"])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        root.removeHandler(handler)
        for other in others:
            other.removeFilter(_is_untasked)
