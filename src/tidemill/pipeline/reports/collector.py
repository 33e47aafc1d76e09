"""Collects references to messages that left the pipeline, and hands them to all reports a batch at a time.

Per message it costs an entry in a list. Invariants: no message is kept for longer than `MAX_SECONDS`, and what is kept
is bounded by `MAX_MESSAGES` and, since a message keeps its value and the output of its tasks, by `MAX_BYTES`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from tidemill.pipeline.reports.report import NO_WINDOW, FinishedBatch, Report, WindowTimes
from tidemill.pipeline.tasks.task_run import TaskRun
from tidemill.runtime.log import throttle
from tidemill.runtime.messages import SourceMessage

log = structlog.get_logger(__name__)

MAX_MESSAGES = 1_000
MAX_SECONDS = 0.25
MAX_BYTES = 4 * 1024 * 1024
_LOG_SECONDS = 60.0


class FinishedMessages:
    """The messages that left the pipeline since the last batch.

    Args:
        reports: Get every batch.

    Attributes:
        size_bytes: How much they keep: who gives a message something large, such as its task's output, adds that here.
    """

    __slots__ = ("_messages", "_rejected", "_reports", "_resolved_ns", "_runs", "_timer", "_windows", "size_bytes")

    def __init__(self, reports: Sequence[Report]) -> None:
        """Start empty."""
        self._reports = reports
        self._timer: asyncio.TimerHandle | None = None
        self._start()

    def _start(self) -> None:
        self._messages: list[SourceMessage] = []
        self._runs: list[Sequence[TaskRun]] = []
        self._windows: list[WindowTimes] = []
        self._resolved_ns: list[int] = []
        self._rejected: list[str | None] = []
        self.size_bytes = 0

    def add(
        self,
        message: SourceMessage,
        size_bytes: int,
        runs: Sequence[TaskRun] = (),
        window: WindowTimes = NO_WINDOW,
        rejected: str | None = None,
    ) -> None:
        """Take a message that leaves the pipeline now.

        Args:
            message: The message.
            size_bytes: Of its key and value.
            runs: Its tasks.
            window: Its window.
            rejected: Why it was dead-lettered before it had any task, if it was.
        """
        self._messages.append(message)
        self._runs.append(runs)
        self._windows.append(window)
        self._resolved_ns.append(time.time_ns())
        self._rejected.append(rejected)
        self.size_bytes += size_bytes
        self._added()

    def add_all(
        self,
        messages: Sequence[SourceMessage],
        sizes: Sequence[int],
        runs: Sequence[Sequence[TaskRun]],
        window: WindowTimes,
    ) -> None:
        """Take messages of a window that leave the pipeline now, each with its size and its tasks; see `add`."""
        now, start = time.time_ns(), 0
        while start < len(messages):
            end = min(len(messages), start + MAX_MESSAGES - len(self._messages))
            self._messages += messages[start:end]
            self._runs += runs[start:end]
            self._windows += [window] * (end - start)
            self._resolved_ns += [now] * (end - start)
            self._rejected += [None] * (end - start)
            self.size_bytes += sum(sizes[start:end])
            start = end
            self._added()

    def _added(self) -> None:
        if len(self._messages) >= MAX_MESSAGES or self.size_bytes >= MAX_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAX_SECONDS, self.flush)

    def flush(self) -> None:
        """Hand over what was collected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._messages:
            self.size_bytes = 0
            return
        batch = FinishedBatch(self._messages, self._runs, self._windows, self._resolved_ns, self._rejected)
        self._start()
        for report in self._reports:
            try:
                report.take(batch)
            except Exception:  # what became of messages must not depend on who is told
                throttle(log, _LOG_SECONDS).error(
                    "finished messages cannot be reported", messages=len(batch), exc_info=True
                )

    async def close(self) -> None:
        """Hand over the last batch, and have each report write what it has."""
        self.flush()
        ends = await asyncio.gather(*(report.close() for report in self._reports), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
