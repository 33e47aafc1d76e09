"""The stored form of a task's log lines: one JSON array each, of time, level, source and text.

Invariant: a line break in a text does not end a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

#: The levels of printed output. Programs also write progress and notes to standard error, not only failures.
STREAM_LEVELS: Final[Mapping[str, str]] = MappingProxyType({"stdout": "info", "stderr": "warning"})

_encode = msgspec.json.Encoder().encode


class TaskLine(NamedTuple):
    """An entry of a task's log.

    Attributes:
        time_us: When it was written, in UTC microseconds since the epoch.
        level: `debug`, `info`, `warning`, `error` or `critical`.
        source: Where it came from: `stdout`, `stderr`, `logging`, `trigger` ...
        text: The text, without the line break at its end.
    """

    time_us: int
    level: str
    source: str
    text: str


class WrittenLine(NamedTuple):
    """An entry, or a piece of one, as a task process sends it.

    Attributes:
        time_us: As in `TaskLine`.
        level: As in `TaskLine`.
        source: As in `TaskLine`.
        text: As in `TaskLine`.
        stream: Identifies the pieces of one entry; empty if this is the whole entry.
        ended: Whether the entry ends with this piece.
    """

    time_us: int
    level: str
    source: str
    text: str
    stream: str = ""
    ended: bool = False


_decode = msgspec.json.Decoder(TaskLine).decode


def encode_line(time_us: int, level: str, source: str, text: str) -> bytes:
    r"""Return an entry with a line break at its end.

    Example:
        >>> encode_line(0, "info", "stdout", "a\nb")
        b'[0,"info","stdout","a\\nb"]\n'
    """
    try:
        return _encode((time_us, level, source, text)) + b"\n"
    except UnicodeEncodeError:
        return _encode((time_us, level, source, text.encode("utf-8", "replace").decode())) + b"\n"


def decode_lines(data: bytes) -> Iterator[TaskLine]:
    """Return the entries of lines from `encode_line`, in order."""
    return (_decode(line) for line in data.splitlines())


def overwrite_lines(text: str) -> str:
    r"""Return a text as a terminal shows it: text after a carriage return replaces the line so far.

    Example:
        >>> overwrite_lines("\r 10%\r 20%\r\nnext")
        ' 20%\nnext'
    """
    if "\r" not in text:
        return text
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
