"""What a task writes through Python: `print` and `logging`, entry by entry, with the time at which it is written.

The entries go to the worker over a socket that keeps them apart. What writes to the standard descriptors by itself, C
code and other programs, is read there as it comes.

Invariants: an entry that is written before an attempt reports is part of its log, and no entry is split between two
attempts; what the user does to `sys.stdout`, or to the handlers of `logging`, ends with the attempt.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import logging
import os
import socket
import sys
import time
from typing import Any, BinaryIO

import msgspec

from tidemill.runtime.log.task_lines import STREAM_LEVELS

#: The most characters of one packet; a longer text is sent in pieces, which the worker puts together.
_MAX_CHARS = 16_384

_encode = msgspec.msgpack.Encoder().encode
_flush_c = ctypes.CDLL(None).fflush


class Lines:
    """Sends entries to the worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._numbers = itertools.count()

    def write(self, level: str, source: str, text: str, time_us: int = 0) -> None:
        """Send an entry; waits if the worker does not keep up."""
        time_us = time_us or time.time_ns() // 1000
        if len(text) <= _MAX_CHARS:
            self._send((time_us, level, source, text))
            return
        # Other threads write meanwhile, and processes that the task forked.
        stream = f"{os.getpid()}.{next(self._numbers)}"
        pieces = range(0, len(text), _MAX_CHARS)
        for start in pieces:
            self._send((time_us, level, source, text[start : start + _MAX_CHARS], stream, start == pieces[-1]))

    def write_piece(self, level: str, source: str, text: str, *, ended: bool) -> None:
        """Send a piece of a line. `ended`: whether the line ends with it."""
        stream = f"{os.getpid()}.{source}"
        time_us = time.time_ns() // 1000
        for start in range(0, len(text), _MAX_CHARS):
            self._send((time_us, level, source, text[start : start + _MAX_CHARS], stream))
        if ended:
            self._send((time_us, level, source, "", stream, True))

    def _send(self, entry: tuple[Any, ...]) -> None:
        try:
            packet = _encode(entry)
        except UnicodeEncodeError:  # what is not Unicode text, such as the name of a file
            packet = _encode((*entry[:3], entry[3].encode("utf-8", "backslashreplace").decode(), *entry[4:]))
        # A worker that is gone ends this process soon; and what closed the socket is reported after the attempt.
        with contextlib.suppress(OSError):
            self._connection.sendall(packet)


class PrintStream(io.TextIOBase):
    """Takes the place of `sys.stdout` or `sys.stderr`."""

    def __init__(self, lines: Lines, source: str, level: str, fd: int) -> None:
        self._lines, self._source, self._level, self._fd = lines, source, level, fd
        self._begun = ""
        #: Whether a piece of the line has been sent.
        self._is_open = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Text is sent as it is."""
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """Anything can be printed."""
        return "backslashreplace"

    @property
    def buffer(self) -> BinaryIO:
        """The descriptor, for those who write bytes."""
        return open(self._fd, "wb", buffering=0, closefd=False)

    def fileno(self) -> int:
        """Return the descriptor, for programs that are to write there, too."""
        return self._fd

    def writable(self) -> bool:
        """Return that it is."""
        return True

    def write(self, text: str) -> int:
        """Send each line that is whole."""
        if "\n" not in text:
            self._begun += text
            if len(self._begun) >= _MAX_CHARS:
                self.flush()
            return len(text)
        *lines, begun = (self._begun + text).split("\n")
        self._begun = begun
        if self._is_open:
            self._is_open = False
            self._lines.write_piece(self._level, self._source, lines.pop(0), ended=True)
        for line in lines:
            self._lines.write(self._level, self._source, line)
        return len(text)

    def flush(self) -> None:
        """Send what the line has so far."""
        if self._begun:
            begun, self._begun = self._begun, ""
            self._is_open = True
            self._lines.write_piece(self._level, self._source, begun, ended=False)


class LineHandler(logging.Handler):
    """Sends the records of `logging`."""

    def __init__(self, lines: Lines) -> None:
        """Send nothing yet."""
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record with its traceback."""
        try:
            text = self.format(record)
        except Exception as error:  # the arguments of the user do not fit, or their `__str__` raises
            text = f"{record.msg!r} cannot be formatted: {type(error).__name__}: {error}"
        self._lines.write(record.levelname.lower(), record.name, text, int(record.created * 1e6))


class TaskOutput:
    """All that a task writes through Python.

    Args:
        lines: Where it goes.
        level: The lowest level of `logging` that is kept.
    """

    def __init__(self, lines: Lines, level: str) -> None:
        """Change nothing yet."""
        self.lines = lines
        self._level = level
        self._streams = [
            PrintStream(lines, name, STREAM_LEVELS[name], fd) for name, fd in (("stdout", 1), ("stderr", 2))
        ]
        self._handler = LineHandler(lines)

    def attach(self) -> None:
        """Have `print` and `logging` write here, whatever they were made to do before."""
        stdout: Any
        stdout, sys.stderr = self._streams
        sys.stdout = stdout
        root = logging.getLogger()
        root.handlers[:] = [self._handler]
        # Each of these looks at all loggers.
        if logging.getLevelName(root.level) != self._level:
            root.setLevel(self._level)
        if root.manager.disable != logging.NOTSET:
            logging.disable(logging.NOTSET)

    def flush(self) -> None:
        """Send all that has been written."""
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, *self._streams):
            # The user may have replaced or closed them.
            with contextlib.suppress(Exception):
                stream.flush()  # type: ignore[union-attr]
        _flush_c(None)


def list_standard() -> list[tuple[int, int]]:
    """Return which files the standard descriptors are; one that is closed is (-1, -1)."""
    found = []
    for fd in (0, 1, 2):
        try:
            stat = os.fstat(fd)
            found.append((stat.st_dev, stat.st_ino))
        except OSError:
            found.append((-1, -1))
    return found
