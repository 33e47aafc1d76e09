"""Captures what a task writes through Python, by `print` and `logging`, as entries with their times.

The entries go to the worker over a socket that preserves their boundaries. Output written directly to the standard
descriptors, by C code and other programs, is read from there as it comes.

Invariants: an entry written before an attempt reports is part of its log, and no entry is split between two attempts;
the user's changes of `sys.stdout` or of the handlers of `logging` end with the attempt.
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
from typing import Any, BinaryIO

import msgspec

from tidemill.runtime.log.task_lines import STREAM_LEVELS
from tidemill.runtime.store_clock import STORE_CLOCK

#: Maximum number of characters per packet; longer texts are sent in pieces, which the worker joins.
_MAX_CHARS = 16_384

_encode = msgspec.msgpack.Encoder().encode
_flush_c = ctypes.CDLL(None).fflush


class Lines:
    """Sends entries to the worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._numbers = itertools.count()

    def write(self, level: str, source: str, text: str, time_us: int = 0) -> None:
        """Send an entry; blocks if the worker does not keep up."""
        time_us = time_us or STORE_CLOCK.now_us()
        if len(text) <= _MAX_CHARS:
            self._send((time_us, level, source, text))
            return
        # Other threads, and processes that the task forked, may write at the same time.
        stream = f"{os.getpid()}.{next(self._numbers)}"
        pieces = range(0, len(text), _MAX_CHARS)
        for start in pieces:
            self._send((time_us, level, source, text[start : start + _MAX_CHARS], stream, start == pieces[-1]))

    def write_piece(self, level: str, source: str, text: str, *, ended: bool) -> None:
        """Send a piece of a line. `ended` tells whether it is the last piece."""
        stream = f"{os.getpid()}.{source}"
        time_us = STORE_CLOCK.now_us()
        for start in range(0, len(text), _MAX_CHARS):
            self._send((time_us, level, source, text[start : start + _MAX_CHARS], stream))
        if ended:
            self._send((time_us, level, source, "", stream, True))

    def _send(self, entry: tuple[Any, ...]) -> None:
        try:
            packet = _encode(entry)
        except UnicodeEncodeError:  # text that is not valid Unicode, such as some file names
            packet = _encode((*entry[:3], entry[3].encode("utf-8", "backslashreplace").decode(), *entry[4:]))
        # If the worker has exited, this process ends soon; a closed socket is reported after the attempt.
        with contextlib.suppress(OSError):
            self._connection.sendall(packet)


class PrintStream(io.TextIOBase):
    """Replaces `sys.stdout` or `sys.stderr`."""

    def __init__(self, lines: Lines, source: str, level: str, fd: int) -> None:
        self._lines, self._source, self._level, self._fd = lines, source, level, fd
        self._begun = ""
        #: Whether a piece of the current line has been sent.
        self._is_open = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """A nominal encoding: text is sent unencoded."""
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """A nominal error handler: any text can be printed."""
        return "backslashreplace"

    @property
    def buffer(self) -> BinaryIO:
        """The descriptor as a binary file, for code that writes bytes."""
        return open(self._fd, "wb", buffering=0, closefd=False)

    def fileno(self) -> int:
        """Return the descriptor, for child processes that write to it."""
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Send the complete lines; buffer the rest."""
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
        """Send the buffered part of the current line."""
        if self._begun:
            begun, self._begun = self._begun, ""
            self._is_open = True
            self._lines.write_piece(self._level, self._source, begun, ended=False)


class LineHandler(logging.Handler):
    """Sends the records of `logging`."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record with its traceback."""
        try:
            text = self.format(record)
        except Exception as error:  # the arguments do not fit the format, or their `__str__` raises
            text = f"{record.msg!r} cannot be formatted: {type(error).__name__}: {error}"
        time_us = STORE_CLOCK.correct_us(int(record.created * 1e6))
        self._lines.write(record.levelname.lower(), record.name, text, time_us)


class TaskOutput:
    """Everything that a task writes through Python.

    Args:
        lines: Sends the entries to the worker.
        level: The lowest level of `logging` that is kept.
    """

    def __init__(self, lines: Lines, level: str) -> None:
        self.lines = lines
        self._level = level
        self._streams = [
            PrintStream(lines, name, STREAM_LEVELS[name], fd) for name, fd in (("stdout", 1), ("stderr", 2))
        ]
        self._handler = LineHandler(lines)

    def attach(self) -> None:
        """Make `print` and `logging` write here, whatever earlier code has changed."""
        stdout: Any
        stdout, sys.stderr = self._streams
        sys.stdout = stdout
        root = logging.getLogger()
        root.handlers[:] = [self._handler]
        # Each of these calls visits all loggers.
        if logging.getLevelName(root.level) != self._level:
            root.setLevel(self._level)
        if root.manager.disable != logging.NOTSET:
            logging.disable(logging.NOTSET)

    def flush(self) -> None:
        """Send everything that is buffered."""
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, *self._streams):
            # The user may have replaced or closed them.
            with contextlib.suppress(Exception):
                stream.flush()  # type: ignore[union-attr]
        _flush_c(None)


def list_standard() -> list[tuple[int, int]]:
    """Return the identities of the files at the standard descriptors; a closed one is (-1, -1)."""
    found = []
    for fd in (0, 1, 2):
        try:
            stat = os.fstat(fd)
            found.append((stat.st_dev, stat.st_ino))
        except OSError:
            found.append((-1, -1))
    return found
