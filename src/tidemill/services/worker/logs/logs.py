"""The log of one attempt, as its worker collects it: entries from Python, and standard output.

Invariants: the entries of a part are in the order in which they were written. Secrets are masked before text is cut,
and before anything leaves this module. Beyond the limit the beginning and the end are kept, and the log tells how much
is missing. The parts of a try are numbered from the epoch of the attempt, so that the parts of later attempts of the
try follow.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from itertools import groupby, islice
from typing import NamedTuple

import msgspec

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.redaction import MASK
from tidemill.core.wording import format_count
from tidemill.runtime.log.task_lines import STREAM_LEVELS, TaskLine, WrittenLine, encode_line
from tidemill.services.worker.logs.open_entry import OpenEntry
from tidemill.store.calls.worker_calls import PART_BASE, LogPart

#: Maximum size of the lines in a part.
PART_BYTES = 64 * 1024
#: Longer entries are cut.
_MAX_CHARS = 16_384
#: The overhead counted for each entry, in addition to its text.
_ENTRY_BYTES = 40
#: Maximum number of streams with an incomplete line; each child process that prints has a stream of its own.
_MAX_STREAMS = 64


class _Chunk(NamedTuple):
    """An unparsed piece of an entry, or of a stream's bytes; otherwise like `WrittenLine`."""

    time_us: int
    level: str
    source: str
    data: str | bytes
    stream: str
    ended: bool = False


class AttemptLog:
    """The log of one attempt.

    Args:
        task: The task.
        try_number: The number of the try.
        epoch: The epoch of the attempt.
        max_bytes: The size limit: half of it for the beginning, half for the end.
        secrets: The secrets to mask, such as passwords of connections that tasks of its file asked for.
    """

    def __init__(self, task: int, try_number: int, epoch: int, max_bytes: int, secrets: KnownSecrets) -> None:
        self._task, self._try_number = task, try_number
        self._number = epoch * PART_BASE
        self._half = max_bytes // 2
        self._secrets = secrets
        self._head_bytes = 0
        self._lines: list[TaskLine] = []
        self._streams: dict[str, OpenEntry] = {}
        #: The entries after the first half.
        self._tail: deque[TaskLine | _Chunk] = deque()
        self._tail_bytes = 0
        self._left_out = 0
        #: The end of each stream's omitted text, because a secret may begin there.
        self._gaps: dict[str, str | bytes] = {}
        self._is_full = False
        self._said: list[tuple[str, str]] = []

    @property
    def name(self) -> tuple[int, int]:
        """The task and the number of the try."""
        return self._task, self._try_number

    @property
    def kept_bytes(self) -> int:
        """The number of bytes kept so far."""
        return self._head_bytes + self._tail_bytes

    @property
    def has_lines(self) -> bool:
        """Whether there are lines to store."""
        return bool(self._lines) or any(stream.is_fresh for stream in self._streams.values())

    def add(self, line: TaskLine) -> None:
        size = len(line.text) + _ENTRY_BYTES
        if self._fits(size, line.time_us):
            self._lines.append(line)
        else:
            self._add_tail(line, size)

    def say(self, level: str, text: str) -> None:
        """Add an entry of tidemill itself, regardless of the limit."""
        self._said.append((level, text))

    def add_output(self, source: str, chunk: bytes, now_us: int) -> None:
        """Add bytes that were written directly to `stdout` or `stderr`."""
        self._add_chunk(_Chunk(now_us, STREAM_LEVELS[source], source, chunk, source))

    def add_written(self, line: WrittenLine) -> None:
        """Add an entry, or a piece of one."""
        if line.stream:
            self._add_chunk(_Chunk(*line))
        else:
            self.add(TaskLine(*line[:4]))

    def take(self, now_us: int) -> list[LogPart]:
        """Return the lines since the last call, as parts."""
        for stream in self._streams.values():
            if stream.is_fresh:
                self._lines += stream.take()
        lines, self._lines = self._lines, []
        return self._build(lines)

    def finish(self, now_us: int) -> list[LogPart]:
        """Return the rest; the last part is marked as the last."""
        if self._is_full:
            self._finish_tail(now_us)
        for stream in self._streams.values():
            self._lines += stream.finish()
        parts = self.take(now_us)
        if self._said:
            parts += self._build([TaskLine(now_us, level, "tidemill", text) for level, text in self._said])
        return [*parts[:-1], _as_last(parts[-1])] if parts else []

    # -- streams ---------------------------------------------------------------------------------------------------

    def _add_chunk(self, chunk: _Chunk) -> None:
        data = chunk.data
        entries = 1 if isinstance(data, str) else 1 + data.count(b"\n")
        if self._fits(len(data) + _ENTRY_BYTES * entries, chunk.time_us):
            self._feed(chunk)
        else:
            self._add_tail(chunk, len(data))

    def _feed(self, chunk: _Chunk) -> None:
        stream = self._find_stream(chunk)
        if isinstance(chunk.data, bytes):
            self._lines += stream.add_lines(stream.decode(chunk.data), chunk.time_us)
            return
        stream.add(chunk.data, chunk.time_us)
        if chunk.ended:
            self._lines += stream.finish()
            del self._streams[chunk.stream]

    def _find_stream(self, chunk: _Chunk) -> OpenEntry:
        if (stream := self._streams.get(chunk.stream)) is None:
            if len(self._streams) >= _MAX_STREAMS:
                self._lines += self._streams.pop(next(iter(self._streams))).finish()
            stream = self._streams[chunk.stream] = OpenEntry(chunk.level, chunk.source, self._secrets)
        return stream

    # -- the size limit --------------------------------------------------------------------------------------------

    def _fits(self, size: int, now_us: int) -> bool:
        """Reserve space in the first half. Add a notice when the half becomes full."""
        if self._is_full:
            return False
        if self._head_bytes + size <= self._half:
            self._head_bytes += size
            return True
        self._is_full = True
        text = (
            f"this attempt has written {format_count(self._head_bytes, 'byte')}; of the rest, the last "
            f"{format_count(self._half, 'byte')} are shown after its end (logs.max_bytes_per_try)"
        )
        self._lines.append(TaskLine(now_us, "warning", "tidemill", text))
        return False

    def _add_tail(self, entry: TaskLine | _Chunk, size: int) -> None:
        self._tail.append(entry)
        self._tail_bytes += size
        while self._tail_bytes > self._half and self._tail:
            gone = self._tail.popleft()
            lost = len(gone.text) + _ENTRY_BYTES if isinstance(gone, TaskLine) else len(gone.data)
            self._tail_bytes -= lost
            self._left_out += lost
            if isinstance(gone, _Chunk):
                self._leave_out(gone)

    def _leave_out(self, gone: _Chunk) -> None:
        """Store the end of omitted text. It may be the first half of a secret, whose other half must not be shown."""
        if not (chars := self._secrets.max_chars):
            return
        stream = self._streams.get(gone.stream)
        if stream is not None and stream.holds_secret and gone.stream not in self._gaps:
            self._feed(gone)  # the first half ends in a secret, or in text that looks like the beginning of one
            if gone.ended or stream.holds_secret:
                return
        if gone.ended:
            self._gaps.pop(gone.stream, None)
            return
        size, end = 4 * chars, gone.data
        if len(end) < size:
            end = self._gaps.get(gone.stream, end[:0]) + end  # type: ignore[operator]
        self._gaps[gone.stream] = end[-size:]

    def _finish_tail(self, now_us: int) -> None:
        first_us = self._tail[0].time_us if self._tail else now_us
        if self._left_out:
            text = f"{format_count(self._left_out, 'byte')} are omitted here (logs.max_bytes_per_try)"
            self._lines.append(TaskLine(first_us, "warning", "tidemill", text))
        for entry in self._tail:
            if isinstance(entry, TaskLine):
                self._lines.append(entry)
            else:
                self._feed(self._follow_gap(entry))
        self._tail.clear()

    def _follow_gap(self, chunk: _Chunk) -> _Chunk:
        """Return a stream's first piece after omitted text, with the second half of a secret masked."""
        if (gap := self._gaps.pop(chunk.stream, None)) is None:
            return chunk
        stream = self._find_stream(chunk)
        self._lines += stream.finish()
        if isinstance(gap, bytes):
            text = stream.decode(bytes(chunk.data))  # type: ignore[arg-type]
            return chunk._replace(data=self._hide_rest(gap.decode("utf-8", "replace"), text).encode())
        return chunk._replace(data=self._hide_rest(gap, str(chunk.data)))

    def _hide_rest(self, before: str, text: str) -> str:
        """Return a text with the second half of a secret masked that begins in `before`."""
        whole = before + text
        end = self._secrets.find_end(whole, len(before))
        return text if end == len(before) else MASK + whole[end:]

    # -- parts -----------------------------------------------------------------------------------------------------

    def _build(self, lines: list[TaskLine]) -> list[LogPart]:
        # Python's entries carry the time at which they were written; the others, the time at which they were read.
        lines = sorted(lines, key=lambda line: line.time_us)
        parts: list[LogPart] = []
        begun: list[bytes] = []
        size = first_us = 0
        for line in _cut(self._mask(lines)):
            data = encode_line(*line)
            if begun and size + len(data) > PART_BYTES:
                parts.append(self._make_part(begun, first_us))
                begun, size = [], 0
            if not begun:
                first_us = line.time_us
            begun.append(data)
            size += len(data)
        if begun:
            parts.append(self._make_part(begun, first_us))
        return parts

    def _mask(self, lines: list[TaskLine]) -> list[TaskLine]:
        """Mask secrets, including those written line by line, such as private keys."""
        masked: list[TaskLine] = []
        for _, group in groupby(lines, key=lambda line: line.source):
            same = list(group)
            joined = "\n".join(line.text for line in same)
            text = self._secrets.mask(joined)
            if text == joined:
                masked += same
            elif text.count("\n") == joined.count("\n"):
                rest = iter(text.split("\n"))
                for line in same:
                    own = islice(rest, line.text.count("\n") + 1)
                    masked.append(line._replace(text="\n".join(own)))
            else:
                masked.append(same[0]._replace(text=text))
        return masked

    def _make_part(self, lines: list[bytes], first_us: int) -> LogPart:
        number, self._number = self._number, self._number + 1
        data = zlib.compress(b"".join(lines), 1)
        return LogPart(self._task, self._try_number, number, first_us, data, len(lines))


def _cut(lines: list[TaskLine]) -> Iterator[TaskLine]:
    """Split long entries into pieces; entries of several lines are split between lines where possible."""
    for line in lines:
        text = line.text
        while len(text) > _MAX_CHARS:
            cut = text.rfind("\n", _MAX_CHARS // 2, _MAX_CHARS)
            yield line._replace(text=text[: cut if cut > 0 else _MAX_CHARS])
            text = text[cut + 1 if cut > 0 else _MAX_CHARS :]
        yield line._replace(text=text) if text is not line.text else line


def _as_last(part: LogPart) -> LogPart:
    return msgspec.structs.replace(part, last=True)
