"""Rows of tasks that ran: one for each try, with what it wrote if that is kept.

Invariants: a row can be encoded and is at most about 200 KB, whatever users put into it; of what a program wrote, only
what the settings keep, up to `MAX_STREAM_BYTES` of each stream, is held.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tidemill.config.debug_settings import DebugSettings
from tidemill.config.redaction import redact_text
from tidemill.core.recorder.failure_sample import FailureSample
from tidemill.pipeline.handler.models import ExecutorError, ExecutorTask
from tidemill.pipeline.recording.texts import MAX_LABELS, clean_args, describe_failure
from tidemill.pipeline.reports.columns import encode_words
from tidemill.pipeline.tasks.process import ProcessOutcome
from tidemill.pipeline.tasks.task_run import TaskRun
from tidemill.recorder.schema import tasks_schema
from tidemill.recorder.texts import clean_error, clean_name

if TYPE_CHECKING:
    import pyarrow as pa

#: Of each stream, half of it from the beginning and half from the end.
MAX_STREAM_BYTES = 64 * 1024
#: A task has up to this many offsets in its row.
MAX_OFFSETS = 1_000
#: What a task that ended well has as its kind.
OK = "ok"
#: The arguments or labels of a task without any.
_NOTHING: list[Any] = []
#: Output of failed tasks is kept of this many a second.
MAX_OUTPUTS_PER_SECOND = 100


class TaskRows:
    """The rows of one engine.

    Args:
        settings: What is kept.
    """

    def __init__(self, settings: DebugSettings) -> None:
        """Start without rows."""
        self._stores_output, self._stores_stdin = settings.store_output, settings.store_stdin
        self._stores = settings.store_output or settings.store_stdin
        self._least_seconds = settings.event_min_duration_ms / 1000
        self._output_seconds = settings.output_min_duration_ms / 1000
        self._outputs = FailureSample(MAX_OUTPUTS_PER_SECOND)
        self._rows: list[tuple[Any, ...]] = []
        self._held_bytes = 0

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    @property
    def held_bytes(self) -> int:
        """How much output they hold."""
        return self._held_bytes

    def add(self, run: TaskRun, outcome: ProcessOutcome, now: float) -> None:
        """Add the row of a try that has just ended, of a task that is not terminal.

        Args:
            run: The task.
            outcome: How it ended.
            now: A clock that never goes back, in seconds.
        """
        error, kind = None, OK
        if outcome.kind is None:
            if outcome.duration_seconds < self._least_seconds:
                return
            keeps = self._stores and outcome.duration_seconds >= self._output_seconds
        else:
            keeps = self._stores and self._outputs.admits(now, OK, "")
            kind = outcome.kind.value
            text = outcome.stderr.decode("utf-8", "replace")
            failure = ExecutorError(run.task, outcome.exit_code, text, outcome.exception, None, outcome.kind)
            error = clean_error(describe_failure(failure))
        self._add(
            run,
            outcome.pid,
            run.slot,
            (
                run.ended_at - int((time.monotonic() - run.queued_at) * 1_000_000),
                None if outcome.pid is None else run.ended_at - int(outcome.duration_seconds * 1_000_000),
                run.ended_at,
            ),
            _fit(outcome.exit_code),
            kind,
            len(outcome.stdout) + len(outcome.stderr),
            cut_stream(outcome.stdout) if keeps and self._stores_output else None,
            cut_stream(outcome.stderr) if keeps and self._stores_output else None,
            error,
            cut_stream(_encode_input(run.task)) if keeps and self._stores_stdin else None,
        )

    def add_known(self, run: TaskRun, exit_code: int, output_bytes: int) -> None:
        """Add the row of a task whose result was known."""
        kind = OK if exit_code == 0 else "exit"
        at = run.ended_at or time.time_ns() // 1000
        self._add(run, None, None, (at, at, at), _fit(exit_code), kind, output_bytes, None, None, None)

    def _add(
        self,
        run: TaskRun,
        pid: int | None,
        slot: int | None,
        times: tuple[int, int | None, int],
        exit_code: int | None,
        kind: str,
        output_bytes: int,
        stdout: bytes | None,
        stderr: bytes | None,
        error: str | None,
        stdin: bytes | None = None,
    ) -> None:
        task, (place, offsets) = run.task, run.owner.find_task_offsets(run)
        if stdout is not None or stderr is not None or stdin is not None:
            self._held_bytes += len(stdout or b"") + len(stderr or b"") + len(stdin or b"")
        self._rows.append(  # in the order of the schema
            (
                clean_name(task.task_id),
                place[0],
                int(place[1]),
                [int(offset) for offset in offsets[:MAX_OFFSETS]],
                clean_args(task.args) if task.args else _NOTHING,
                _clean_labels(task) if task.labels else _NOTHING,
                slot,
                pid,
                *times,
                exit_code,
                kind,
                run.attempts,
                _measure_input(task),
                output_bytes,
                None if task.parent_task_id is None else clean_name(task.parent_task_id),
                stdout,
                stderr,
                error,
                stdin,
            )
        )

    def take(self) -> TakenTaskRows | None:
        """Remove all rows; return them, or None if there are none."""
        rows, output_bytes, self._rows, self._held_bytes = self._rows, self._held_bytes, [], 0
        return TakenTaskRows(rows, output_bytes) if rows else None


class TakenTaskRows:
    """Rows that are complete; any thread may join them.

    Args:
        rows: At least one row.
        output_bytes: How much output they hold.

    Attributes:
        size: How many rows there are.
        output_bytes: How much output they hold, in which secrets are looked for.
    """

    def __init__(self, rows: list[tuple[Any, ...]], output_bytes: int) -> None:
        """Keep the rows."""
        self._rows = rows
        self._has_output = True
        self.size = len(rows)
        self.output_bytes = output_bytes

    def drop_output(self) -> None:
        """Leave out what the tasks wrote."""
        self._has_output = False
        self.output_bytes = 0

    def join(self) -> pa.RecordBatch:
        """Return the rows as one batch."""
        import pyarrow as pa

        schema = tasks_schema()
        columns: dict[str, Any] = dict(zip(schema.names, zip(*self._rows, strict=True), strict=True))
        for stream in ("stdout", "stderr", "stdin"):
            if columns[stream].count(None) < self.size:
                columns[stream] = [
                    mask_stream(data) if data is not None and self._has_output else None for data in columns[stream]
                ]
        names = {topic: clean_name(topic) for topic in set(columns["topic"])}
        columns["topic"] = [names[topic] for topic in columns["topic"]]
        arrays = {name: encode_words(columns.pop(name)) for name in ("topic", "kind")}
        for name, column in columns.items():
            kind = schema.field(name).type
            is_empty = column[0] is None and column.count(None) == self.size
            arrays[name] = pa.nulls(self.size, kind) if is_empty else pa.array(column, kind)
        return pa.record_batch([arrays[name] for name in schema.names], schema=schema)


def cut_stream(data: bytes) -> bytes:
    """Return what is kept of a stream: all of it, or its beginning and its end.

    Between them it is cut at the end of a line if it has lines, so that no half of a secret is left unmasked.
    """
    if len(data) <= MAX_STREAM_BYTES:
        return data
    half = (MAX_STREAM_BYTES - 100) // 2
    head, tail = data[:half], data[-half:]
    head = head[: head.rfind(b"\n") + 1] or head
    tail = tail[tail.find(b"\n") + 1 :] or tail
    return head + b"\n... (%d bytes left out) ...\n" % (len(data) - len(head) - len(tail)) + tail


def mask_stream(data: bytes) -> bytes:
    """Return what a program wrote with its secrets masked, as logs mask them; bytes that are not text stay."""
    return redact_text(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _clean_labels(task: ExecutorTask) -> list[tuple[str, str]]:
    return [(clean_name(name), clean_error(str(value))) for name, value in list(task.labels.items())[:MAX_LABELS]]


def _encode_input(task: ExecutorTask) -> bytes:
    stdin = task.stdin or b""
    return stdin if isinstance(stdin, bytes) else stdin.encode("utf-8", "surrogatepass")


def _measure_input(task: ExecutorTask) -> int:
    stdin = task.stdin
    if stdin is None:
        return 0
    return len(stdin) if isinstance(stdin, bytes) or stdin.isascii() else len(stdin.encode("utf-8", "replace"))


def _fit(exit_code: int | None) -> int | None:
    """Return an exit code that fits its column; a known result may say anything."""
    return exit_code if exit_code is None or -(2**31) <= exit_code < 2**31 else None
