"""Counts a web server's access log with awk: one awk process per status code in each window of lines.

Each line is validated; a line that is not in Apache's combined format goes to the dead-letter topic. Every awk result
goes to a Kafka topic; the outcome of every line and a summary of every window go to JSONL files. A result lists its
source offsets, and its task id is derived from them, so results of reprocessed lines can be recognised as duplicates.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime

from pydantic import BaseModel, Field

from tidemill import (
    CollectResult,
    ExecutorError,
    ExecutorResult,
    ExecutorTask,
    FilePayload,
    Handler,
    KafkaPayload,
    MessageGroup,
    PendingContext,
    SourceMessage,
    make_stable_task_id,
)

# client identity user [time] "request" status bytes "referrer" "agent"; a quote inside quotes is escaped.
COMBINED = re.compile(
    r'(?P<client>\S+) \S+ (?P<user>\S+) \[(?P<time>[^\]]+)\] "(?P<request>(?:[^"\\]|\\.)*)" '
    r'(?P<status>\d{3}) (?P<size>\d+|-) "(?P<referrer>(?:[^"\\]|\\.)*)" "(?P<agent>(?:[^"\\]|\\.)*)"'
)

# The first '" 200 1234 "' of a line is its status and bytes; '-' counts as 0. %.0f, because %d ends at 2^31 in some
# awks.
COUNT = """
    match($0, /" [0-9][0-9][0-9] ([0-9]+|-) "/) {
        split(substr($0, RSTART + 2), field, " ")
        lines++
        bytes += field[2]
    }
    END { printf "{\\"lines\\": %d, \\"bytes\\": %.0f}", lines, bytes }
"""


class AccessLine(BaseModel):
    """One line of the log."""

    client: str
    user: str
    time: datetime
    request: str
    status: int = Field(ge=100, le=599)
    size: int = Field(ge=0)
    referrer: str
    agent: str


class Count(BaseModel):
    """The output of awk."""

    lines: int
    bytes: int


class StatusReport(Count):
    """A record for the result topic: the lines of one status code in one window."""

    task_id: str
    status: int
    partition: int
    offsets: list[int]
    seconds: float


class AccessLog(Handler[AccessLine, StatusReport]):
    """Counts lines and bytes per status code."""

    def deserialize_message(self, message: SourceMessage) -> AccessLine:
        """Parse one line; an exception sends the message to the dead-letter topic."""
        text = (message.value or b"").decode()
        match = COMBINED.fullmatch(text)
        if match is None:
            raise ValueError(f"not in the combined log format: {text!r}")
        fields: dict[str, object] = dict(match.groupdict())
        fields["time"] = datetime.strptime(match["time"], "%d/%b/%Y:%H:%M:%S %z")
        fields["size"] = 0 if match["size"] == "-" else match["size"]
        return AccessLine.model_validate(fields)

    async def arrange(self, messages: Sequence[SourceMessage], pending: PendingContext) -> list[ExecutorTask]:
        """Create one task per status code in the window (fan-in)."""
        by_status: dict[int, list[SourceMessage]] = defaultdict(list)
        for message in messages:
            by_status[message.payload.status].append(message)
        return [self._task(status, group) for status, group in by_status.items()]

    def _task(self, status: int, group: list[SourceMessage]) -> ExecutorTask:
        first, offsets = group[0], [message.offset for message in group]
        return ExecutorTask(
            task_id=make_stable_task_id(f"status-{status}", first.topic, first.partition, *offsets),
            args=[COUNT],
            stdin=b"".join((message.value or b"") + b"\n" for message in group),
            source_offsets=offsets,
            metadata={"status": status, "partition": first.partition},
            labels={"status": str(status)},
        )

    async def on_task_complete(self, result: ExecutorResult) -> CollectResult:
        """Publish the counts of one awk process."""
        task, count = result.task, Count.model_validate_json(result.stdout_bytes)
        report = StatusReport(
            **count.model_dump(),
            **task.metadata,
            task_id=task.task_id,
            offsets=list(task.source_offsets),
            seconds=round(result.duration_seconds, 6),
        )
        return CollectResult(kafka=[KafkaPayload(key=str(report.status), data=report)])

    async def on_message_complete(self, group: MessageGroup) -> CollectResult:
        """Write the outcome of one line."""
        message: SourceMessage = group.source_message
        outcome = {
            "partition": message.partition,
            "offset": message.offset,
            "status": message.payload.status,
            "bytes": message.payload.size,
            "outcome": "done" if group.all_succeeded else "failed",
            "task_ids": [task.task_id for task in group.tasks],
        }
        return CollectResult(files=[FilePayload(path="messages.jsonl", data=outcome)])

    async def on_window_complete(
        self, results: Sequence[ExecutorResult | ExecutorError], messages: Sequence[SourceMessage]
    ) -> CollectResult:
        """Write a summary of the window."""
        summary = {
            "partition": messages[0].partition,
            "first_offset": messages[0].offset,
            "last_offset": messages[-1].offset,
            "lines": len(messages),
            "statuses": Counter(str(message.payload.status) for message in messages),
            "tasks": len(results),
            "failed": sum(isinstance(result, ExecutorError) for result in results),
            "slowest_seconds": round(max((result.duration_seconds for result in results), default=0.0), 6),
        }
        return CollectResult(files=[FilePayload(path="windows.jsonl", data=summary)])
