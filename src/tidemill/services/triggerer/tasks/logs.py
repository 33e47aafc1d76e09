"""The logs of the tasks whose triggers run here: buffered briefly, then stored in compressed parts.

Invariants: a line is stored within half a second while the store is reachable; the parts of a deferral come after those
of the attempt before it and before those of the next attempt; a trigger's log has the same size limit as an attempt's;
secrets are masked.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable

import structlog

from tidemill.config.known_secrets import KnownSecrets
from tidemill.runtime.log.task_lines import TaskLine, WrittenLine
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.services.worker.logs.logs import AttemptLog
from tidemill.store.calls.task_calls import AppendLog
from tidemill.store.calls.trigger_calls import ClaimedTrigger
from tidemill.store.calls.worker_calls import LogPart
from tidemill.store.database import StoreClient
from tidemill.store.wire.remote import call_patiently

log = structlog.get_logger(__name__)

#: How long lines are buffered.
FLUSH_SECONDS = 0.4
#: Maximum number of parts per call.
_CALL_PARTS = 64


class TaskLog:
    """The log of one trigger; a `LineSink`.

    Args:
        claim: The trigger.
        logs: All logs.
    """

    __slots__ = ("_lock", "_log", "_logs")

    def __init__(self, claim: ClaimedTrigger, logs: TaskLogs) -> None:
        self._logs = logs
        self._lock = threading.Lock()  # triggers may write from threads
        self._log = AttemptLog(claim.task, claim.try_number, claim.epoch, logs.max_bytes, logs.secrets)

    def write(self, level: str, text: str) -> None:
        """Add an entry; see `LineSink`."""
        with self._lock:
            self._log.add(TaskLine(_now_us(), level, "trigger", text))
        self._logs.note_written(self)

    def write_piece(self, level: str, text: str, stream: str, *, ended: bool) -> None:
        """Add a piece of an entry; see `LineSink`."""
        with self._lock:
            self._log.add_written(WrittenLine(_now_us(), level, "trigger", text, stream, ended))
        self._logs.note_written(self)

    def take_parts(self) -> list[LogPart]:
        """Return the lines since the last call, as parts."""
        with self._lock:
            return self._log.take(_now_us())

    def finish(self) -> None:
        """Store the rest, because the trigger has ended."""
        with self._lock:
            parts = self._log.finish(_now_us())
        self._logs.add(parts)


class TaskLogs:
    """The logs of all triggers of one triggerer.

    Args:
        calls: The store.
        max_bytes: The limit of each trigger's log.
        secrets: The secrets to mask, such as passwords of connections that triggers asked for.

    Attributes:
        max_bytes: The limit of each trigger's log.
        secrets: The secrets to mask.
    """

    def __init__(self, calls: StoreClient, max_bytes: int, secrets: KnownSecrets) -> None:
        self.max_bytes, self.secrets = max_bytes, secrets
        self._calls = calls
        self._written: dict[TaskLog, None] = {}
        self._parts: list[LogPart] = []
        self._loop = asyncio.get_running_loop()
        self._flushing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def open(self, claim: ClaimedTrigger) -> TaskLog:
        return TaskLog(claim, self)

    def note_written(self, written: TaskLog) -> None:
        """Schedule a flush of a log that has new lines; callable from any thread."""
        with contextlib.suppress(RuntimeError):  # a thread of a trigger has outlived the loop
            self._loop.call_soon_threadsafe(self._note_written, written)

    def add(self, parts: Iterable[LogPart]) -> None:
        """Add parts to store."""
        self._parts += parts
        if self._parts:
            self._begin()

    async def close(self, timeout_seconds: float) -> None:
        """Store the remaining lines within this time; lines written later are stored without delay."""
        self._hurry.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.sleep(0)  # for lines that threads have just written
                while self._flushing is not None:
                    await asyncio.shield(self._flushing)
        except TimeoutError:
            log.warning("cannot store the last log lines of triggers; they are lost")
            if self._flushing is not None:
                self._flushing.cancel()

    def _note_written(self, written: TaskLog) -> None:
        self._written[written] = None
        self._begin()

    def _begin(self) -> None:
        if self._flushing is None:
            self._flushing = self._loop.create_task(self._flush(), name="logs of tasks")

    async def _flush(self) -> None:
        try:
            while self._written or self._parts:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), FLUSH_SECONDS)
                written, self._written = self._written, {}
                for one in written:
                    self._parts += one.take_parts()
                parts, self._parts = self._parts, []
                await self._store(parts)
        finally:
            self._flushing = None

    async def _store(self, parts: list[LogPart]) -> None:
        for start in range(0, len(parts), _CALL_PARTS):
            try:
                await call_patiently(self._calls, AppendLog(tuple(parts[start : start + _CALL_PARTS])))
            except Exception:  # a refused part must not prevent storing the lines of others
                log.exception("the store refuses log lines of triggers; dropping them")


def _now_us() -> int:
    return STORE_CLOCK.now_us()
