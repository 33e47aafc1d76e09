"""The log of one attempt, as its worker collects it: entries of Python, and what is written to standard output.

Invariants: the entries of a part are in the order in which they were written; secrets are masked before anything
leaves this module; beyond the limit the beginning and the end stay, and the log says what is missing. The parts of a
try are numbered from the epoch of the attempt, so that those of a later attempt of the try follow.
"""

from __future__ import annotations

import zlib
from collections import deque
from itertools import groupby, islice

import msgspec

from tidemill.config.redaction import mask_secrets
from tidemill.core.wording import format_count
from tidemill.runtime.task_lines import STREAM_LEVELS, TaskLine, encode_line
from tidemill.store.worker_calls import LogPart

#: The most bytes of lines in a part.
PART_BYTES = 64 * 1024
#: Parts are numbered from the epoch of the attempt times this.
PART_BASE = 1 << 20
#: A longer line of standard output is cut.
_MAX_LINE_BYTES = 16_384
#: What an entry costs beside its text.
_ENTRY_BYTES = 40


class AttemptLog:
    """The log of one attempt.

    Args:
        task: The task.
        try_number: Which try.
        epoch: The epoch of the attempt.
        max_bytes: How much is kept: half of it from the beginning, half from the end.
    """

    def __init__(self, task: int, try_number: int, epoch: int, max_bytes: int) -> None:
        """Start without entries."""
        self._task, self._try_number = task, try_number
        self._number = epoch * PART_BASE
        self._half = max_bytes // 2
        self._head_bytes = 0
        self._lines: list[TaskLine] = []
        self._begun = dict.fromkeys(STREAM_LEVELS, b"")
        #: What came after the first half: entries, and chunks of standard output that nobody has looked into.
        self._tail: deque[TaskLine | tuple[int, str, bytes]] = deque()
        self._tail_bytes = 0
        self._left_out = 0
        self._is_full = False
        self._said: list[tuple[str, str]] = []
        #: Values that must not appear, such as the passwords of connections that the attempt asked for.
        self.secrets: set[str] = set()

    @property
    def name(self) -> tuple[int, int]:
        """The task and the try."""
        return self._task, self._try_number

    @property
    def kept_bytes(self) -> int:
        """How much has been kept so far."""
        return self._head_bytes + self._tail_bytes

    @property
    def has_lines(self) -> bool:
        """Whether there is something to store."""
        return bool(self._lines) or any(self._begun.values())

    def add(self, line: TaskLine) -> None:
        """Add an entry."""
        size = len(line.text) + _ENTRY_BYTES
        if self._fits(size, line.time_us):
            self._lines.append(line)
        else:
            self._add_tail(line, size)

    def say(self, level: str, text: str) -> None:
        """Add an entry of tidemill's own, whatever the limit."""
        self._said.append((level, text))

    def add_output(self, source: str, chunk: bytes, now_us: int) -> None:
        """Add what was written to `stdout` or `stderr` itself."""
        if not self._fits(len(chunk) + _ENTRY_BYTES * (1 + chunk.count(b"\n")), now_us):
            self._add_tail((now_us, source, chunk), len(chunk))
            return
        *whole, begun = (self._begun[source] + chunk).split(b"\n")
        if len(begun) >= _MAX_LINE_BYTES:
            whole.append(begun)
            begun = b""
        self._begun[source] = begun
        for line in whole:
            self._add_bytes(source, line, now_us)

    def take(self, now_us: int) -> list[LogPart]:
        """Return what has come since the last call as parts."""
        for source, begun in self._begun.items():
            if begun:
                self._begun[source] = b""
                self._add_bytes(source, begun, now_us)
        lines, self._lines = self._lines, []
        return self._build(lines)

    def finish(self, now_us: int) -> list[LogPart]:
        """Return the rest; the last part says that it is the last."""
        parts = self.take(now_us)
        if self._is_full:
            first_us = self._tail[0][0] if self._tail else now_us
            if self._left_out:
                text = f"{format_count(self._left_out, 'byte')} are left out here (logs.max_bytes_per_try)"
                self._lines.append(TaskLine(first_us, "warning", "tidemill", text))
            for entry in self._tail:
                if isinstance(entry, TaskLine):
                    self._lines.append(entry)
                else:
                    time_us, source, chunk = entry
                    *whole, self._begun[source] = (self._begun[source] + chunk).split(b"\n")
                    for line in whole:
                        self._add_bytes(source, line, time_us)
            self._tail.clear()
            parts += self.take(now_us)
        if self._said:
            parts += self._build([TaskLine(now_us, level, "tidemill", text) for level, text in self._said])
        return [*parts[:-1], _as_last(parts[-1])] if parts else []

    # -- the limit -------------------------------------------------------------------------------------------------

    def _fits(self, size: int, now_us: int) -> bool:
        """Take room in the first half, and say so when there is none any more."""
        if self._is_full:
            return False
        if self._head_bytes + size <= self._half:
            self._head_bytes += size
            return True
        self._is_full = True
        text = (
            f"this attempt has written {format_count(self._head_bytes, 'byte')}; of what follows the last "
            f"{format_count(self._half, 'byte')} are shown when it has ended (logs.max_bytes_per_try)"
        )
        self._lines.append(TaskLine(now_us, "warning", "tidemill", text))
        return False

    def _add_tail(self, entry: TaskLine | tuple[int, str, bytes], size: int) -> None:
        self._tail.append(entry)
        self._tail_bytes += size
        while self._tail_bytes > self._half and self._tail:
            gone = self._tail.popleft()
            lost = len(gone.text) + _ENTRY_BYTES if isinstance(gone, TaskLine) else len(gone[2])
            self._tail_bytes -= lost
            self._left_out += lost

    # -- parts -----------------------------------------------------------------------------------------------------

    def _add_bytes(self, source: str, line: bytes, time_us: int) -> None:
        for start in range(0, max(1, len(line)), _MAX_LINE_BYTES):
            text = line[start : start + _MAX_LINE_BYTES].decode("utf-8", "backslashreplace").removesuffix("\r")
            self._lines.append(TaskLine(time_us, STREAM_LEVELS[source], source, text))

    def _build(self, lines: list[TaskLine]) -> list[LogPart]:
        # Python's entries have the time at which they were written, others that at which they were read.
        lines = sorted(lines, key=lambda line: line.time_us)
        parts: list[LogPart] = []
        begun: list[bytes] = []
        size = first_us = 0
        for line in self._mask(lines):
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
        """Mask secrets, also those that are written line by line, like keys."""
        masked: list[TaskLine] = []
        for _, group in groupby(lines, key=lambda line: line.source):
            same = list(group)
            joined = "\n".join(line.text for line in same)
            text = mask_secrets(joined, self.secrets)
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


def _as_last(part: LogPart) -> LogPart:
    return msgspec.structs.replace(part, last=True)
