"""The logs of the tasks whose triggers run here: kept for a moment, then stored in compressed parts.

Invariants: a line is stored within half a second while the store can be reached; the parts of a deferral come after
those of the attempt before it and before those of the next one; one trigger keeps at most MAX_LOG_BYTES waiting, and
what is left out is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import zlib
from collections.abc import Iterable

import structlog

from tidemill.config.redaction import redact_text
from tidemill.core.errors import TidemillError
from tidemill.runtime.task_lines import encode_line
from tidemill.store.calls import AppendLog, ClaimedTrigger, LogPart
from tidemill.store.database import Caller
from tidemill.store.remote import call_patiently

log = structlog.get_logger(__name__)

#: How long lines wait for others.
FLUSH_SECONDS = 0.4
#: The most bytes of lines in a part.
PART_BYTES = 64 * 1024
#: The most bytes of lines of one trigger that wait to be stored.
MAX_LOG_BYTES = 1024 * 1024
#: The most parts of one call.
_CALL_PARTS = 64
#: Parts are numbered from the epoch of their attempt or deferral times this.
PART_BASE = 1 << 20


class TaskLog:
    """The log of one trigger; a `LineSink`.

    Args:
        claim: The trigger.
        logs: All logs.
    """

    __slots__ = ("_bytes", "_claim", "_first_us", "_left_out", "_lines", "_lock", "_logs", "_number")

    def __init__(self, claim: ClaimedTrigger, logs: TaskLogs) -> None:
        """Start without lines."""
        self._claim, self._logs = claim, logs
        self._number = claim.epoch * PART_BASE
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._bytes = self._first_us = self._left_out = 0

    def write(self, level: str, text: str) -> None:
        """Add an entry; see `LineSink`."""
        now_us = time.time_ns() // 1000
        line = encode_line(now_us, level, "trigger", redact_text(text))
        with self._lock:
            if self._bytes + len(line) > MAX_LOG_BYTES:
                self._left_out += 1
                return
            if not self._lines:
                self._first_us = now_us
            self._lines.append(line)
            self._bytes += len(line)
        self._logs.note_written(self)

    def take_parts(self) -> list[LogPart]:
        """Return what has been written since the last call."""
        with self._lock:
            lines, self._lines, self._bytes = self._lines, [], 0
            left_out, self._left_out = self._left_out, 0
        now_us = time.time_ns() // 1000
        if left_out:
            text = f"{left_out} lines of the trigger are left out: they came faster than they could be stored"
            lines.append(encode_line(now_us, "warning", "trigger", text))
        return [self._build_part(chunk) for chunk in _cut(lines)]

    def _build_part(self, lines: list[bytes]) -> LogPart:
        number, self._number = self._number, self._number + 1
        claim = self._claim
        data = zlib.compress(b"".join(lines), 1)
        return LogPart(claim.task, claim.try_number, number, self._first_us, data, len(lines))


class TaskLogs:
    """The logs of all triggers of one triggerer.

    Args:
        calls: The store.
    """

    def __init__(self, calls: Caller) -> None:
        """Store nothing yet."""
        self._calls = calls
        self._written: dict[TaskLog, None] = {}
        self._loop = asyncio.get_running_loop()
        self._flushing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def open(self, claim: ClaimedTrigger) -> TaskLog:
        """Return the log of a trigger."""
        return TaskLog(claim, self)

    def note_written(self, written: TaskLog) -> None:
        """Note that there are lines to store; from any thread."""
        with contextlib.suppress(RuntimeError):  # a thread of a trigger has outlived the loop
            self._loop.call_soon_threadsafe(self._note_written, written)

    def _note_written(self, written: TaskLog) -> None:
        self._written[written] = None
        if self._flushing is None:
            self._flushing = self._loop.create_task(self._flush(), name="logs of tasks")

    async def close(self, timeout_seconds: float) -> None:
        """Store what is left, within this time at most; later lines are stored at once."""
        self._hurry.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.sleep(0)  # what threads have written just now
                while self._flushing is not None:
                    await asyncio.shield(self._flushing)
        except TimeoutError:
            log.warning("the last lines of triggers could not be stored in the logs of their tasks")
            if self._flushing is not None:
                self._flushing.cancel()

    async def _flush(self) -> None:
        try:
            while self._written:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), FLUSH_SECONDS)
                written, self._written = self._written, {}
                await self._store([part for one in written for part in one.take_parts()])
        finally:
            self._flushing = None

    async def _store(self, parts: list[LogPart]) -> None:
        for start in range(0, len(parts), _CALL_PARTS):
            try:
                await call_patiently(self._calls, AppendLog(tuple(parts[start : start + _CALL_PARTS])))
            except TidemillError:
                log.exception("the store refuses lines of triggers; they are dropped")


def _cut(lines: Iterable[bytes]) -> list[list[bytes]]:
    """Return lines in chunks of at most PART_BYTES; a longer line has one of its own."""
    chunks: list[list[bytes]] = []
    size = 0
    for line in lines:
        if not chunks or size + len(line) > PART_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(line)
        size += len(line)
    return chunks
