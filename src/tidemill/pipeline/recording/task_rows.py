"""Rows of tasks that ran: one per attempt, with its output if that is recorded.

Invariants: a row can be encoded and is at most about 200 KB, whatever users put into it. Only the recorded part of a
program's output is held, up to `MAX_STREAM_BYTES` per stream.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from tidemill.config.redaction import redact_text
from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.recorder.failure_sample import FailureSample
from tidemill.pipeline.handler.models import ErrorKind, ExecutorError, ExecutorTask
from tidemill.pipeline.recording.slow_tasks import SlowTasks
from tidemill.pipeline.recording.task_columns import (
    OK,
    Details,
    Extras,
    PlainTasks,
    Streams,
    TaskParts,
    TaskRow,
    join_tasks,
    pack_tasks,
)
from tidemill.pipeline.recording.texts import MAX_LABELS, clean_args, describe_failure
from tidemill.pipeline.reports.report import SingleTasks
from tidemill.pipeline.tasks.process import ProcessOutcome
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.recorder.format.recordable_text import clean_error, clean_name
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

#: The limit per stream: half from the beginning and half from the end.
MAX_STREAM_BYTES = 64 * 1024
_NO_STREAMS: Streams = (None, None, None)
#: The number of rows that are packed together; as Python objects they take four times as much memory.
BLOCK_ROWS = 500
#: Smaller groups are added row by row.
MIN_TOGETHER = 8
#: The output of at most this many failed tasks per second is recorded.
MAX_OUTPUTS_PER_SECOND = 100


class TaskRows:
    """The task rows of one engine.

    Args:
        settings: The section `debug`.
        clock: A monotonic clock, in seconds.
        successes: Whether successful attempts have rows, and slow ones are logged.
        on_due: Called when the number of rows should be checked; not for every row.
        on_lost: Called with the reason why a task has no row.

    Attributes:
        held_bytes: The size of the held output.
        kept_below_seconds: Faster successful attempts may be added later, in groups; see `add_kept`.
    """

    def __init__(
        self,
        settings: DebugSettings,
        clock: Callable[[], float],
        *,
        successes: bool,
        on_due: Callable[[], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._clock = clock
        self._successes, self._on_due, self._on_lost = successes, on_due, on_lost
        self._stores_output, self._stores_stdin = settings.store_output, settings.store_stdin
        self._stores = settings.store_output or settings.store_stdin
        self._least_seconds = settings.event_min_duration_ms / 1000
        self._output_seconds = settings.output_min_duration_ms / 1000
        self._slow = SlowTasks(settings.log_min_duration_ms / 1000)
        # Successful attempts with a duration in this range have a plain row and need no further checks.
        self._ordinary_from = self._least_seconds if successes else math.inf
        self._ordinary_until = min(self._output_seconds, self._slow.least_seconds)
        # Slower attempts are logged when they end, and may have output in their row.
        self.kept_below_seconds = self._ordinary_until if successes else 0.0
        self._outputs = FailureSample(MAX_OUTPUTS_PER_SECOND)
        #: How many rows `take` has returned.
        self._taken = 0
        self._start()

    def _start(self) -> None:
        #: Blocks of rows, packed unless they contain output, which must be searched for secrets first.
        self._blocks: list[TaskParts | list[TaskRow]] = []
        self._size_of_blocks = self.held_bytes = 0
        #: The rows after the blocks.
        self._rows: list[TaskRow] = []
        self._has_output = False
        #: Rows that were added in groups.
        self._plain = PlainTasks()

    @property
    def size(self) -> int:
        """The number of current rows."""
        return self._size_of_blocks + len(self._rows) + self._plain.size

    @property
    def count(self) -> int:
        """The number of rows ever added."""
        return self._taken + self.size

    def add_kept(self, topic_partition: TopicPartition, tasks: Sequence[Sequence[TaskInFlight]] | SingleTasks) -> None:
        """Add the rows of tasks whose outcome was stored for later; the outcome is released.

        Args:
            topic_partition: The partition of their messages.
            tasks: The tasks of some messages.
        """
        try:
            if isinstance(tasks, SingleTasks):
                if len(tasks.flights) >= MIN_TOGETHER and self._add_plain(topic_partition, tasks):
                    return
                tasks = [tasks.flights]
            for flight in [flight for flights in tasks for flight in flights]:
                if flight.outcome is not None:
                    outcome, flight.outcome = flight.outcome, None
                    self.add(flight, outcome, topic_partition)
        except Exception as error:  # the messages must still leave the pipeline
            self._on_lost(error)

    def _add_plain(self, topic_partition: TopicPartition, tasks: SingleTasks) -> bool:
        """Add rows as a group; return False, and add none, if some of the tasks are not ordinary."""
        flights, is_first = tasks.flights, not self.size
        outcomes = cast("list[ProcessOutcome]", [flight.outcome for flight in flights])
        if not all(outcomes):
            return False
        seconds = [outcome.duration_seconds for outcome in outcomes]
        if min(seconds) < self._ordinary_from:
            return False
        try:
            self._plain.add(
                topic_partition,
                [flight.task.task_id for flight in flights],
                [flight.named_offsets[0] for flight in flights],
                [flight.slot for flight in flights],
                [outcome.pid for outcome in outcomes],
                tasks.ended_at,
                [flight.waited_seconds for flight in flights],
                seconds,
                tasks.attempts,
                [flight.input_bytes for flight in flights],
                [len(outcome.stdout) for outcome in outcomes],  # tasks with standard error are never stored for later
            )
        except Exception:  # an id is long or not ASCII; the caller adds the rows one by one
            return False
        for flight in flights:
            flight.outcome = None
        is_complete = self._plain.size >= BLOCK_ROWS
        if is_complete:
            self._end_plain()
        if is_complete or is_first:
            self._on_due()
        return True

    def _end_plain(self) -> None:
        """Pack the rows that were added in groups."""
        plain, self._plain = self._plain, PlainTasks()
        self._blocks.append(plain.pack())
        self._size_of_blocks += plain.size

    def add(self, flight: TaskInFlight, outcome: ProcessOutcome, topic_partition: TopicPartition | None = None) -> None:
        """Add the row of an attempt that has ended.

        Args:
            flight: The task.
            outcome: The attempt's outcome.
            topic_partition: The partition of its messages; None: the attempt has just ended, and the task still has its
                owner.
        """
        seconds, details = outcome.duration_seconds, None
        if outcome.kind is not None or not self._ordinary_from <= seconds < self._ordinary_until or flight.has_details:
            if not self._is_recorded(flight, outcome):
                return
            details = self._keep_details(flight, outcome)
        offsets, owner, rows = flight.named_offsets, flight.owner, self._rows
        # Anything that can be computed per block is deferred, which takes a third of the time.
        rows.append(
            (
                flight.task.task_id,
                topic_partition or owner.topic_partition,
                offsets if len(offsets) == 1 else owner.find_task_offsets(flight),
                flight.slot,
                outcome.pid,
                flight.ended_at,
                flight.waited_seconds,
                seconds,
                flight.attempts,
                flight.input_bytes,
                len(outcome.stdout) + len(outcome.stderr),
                details,
            )
        )
        if self._has_output or not 1 < len(rows) < BLOCK_ROWS:
            self._note_added()

    def _is_recorded(self, flight: TaskInFlight, outcome: ProcessOutcome) -> bool:
        """Return whether an unusual attempt has a row; log it if it was slow."""
        if not self._successes:
            return outcome.kind is not None
        if outcome.duration_seconds > self._slow.least_seconds:
            self._slow.note(flight, outcome)
        return outcome.kind is not None or outcome.duration_seconds >= self._least_seconds

    def _keep_details(self, flight: TaskInFlight, outcome: ProcessOutcome) -> Details:
        task = flight.task
        return clean_args(task.args), _clean_labels(task.labels), outcome.exit_code, self._keep_extras(task, outcome)

    def _keep_extras(self, task: ExecutorTask, outcome: ProcessOutcome) -> Extras | None:
        parent = _clean_parent(task.parent_task_id)
        if outcome.kind is not None:
            return self._keep_failure(task, parent, outcome, outcome.kind)
        is_long = outcome.duration_seconds >= self._output_seconds
        if not is_long and parent is None:
            return None
        streams = self._keep_streams(task, outcome) if is_long and self._stores else _NO_STREAMS
        return OK, parent, streams, None

    def _keep_failure(self, task: ExecutorTask, parent: str | None, outcome: ProcessOutcome, kind: ErrorKind) -> Extras:
        is_kept = self._stores and self._outputs.admits(self._clock(), OK, "")
        text = outcome.stderr.decode("utf-8", "replace")
        failure = ExecutorError(task, outcome.exit_code, text, outcome.exception, None, kind)
        streams = self._keep_streams(task, outcome) if is_kept else _NO_STREAMS
        return kind.value, parent, streams, clean_error(describe_failure(failure))

    def _keep_streams(self, task: ExecutorTask, outcome: ProcessOutcome) -> Streams:
        streams = (
            cut_stream(outcome.stdout) if self._stores_output else None,
            cut_stream(outcome.stderr) if self._stores_output else None,
            cut_stream(_encode_input(task)) if self._stores_stdin else None,
        )
        self.held_bytes += sum(len(stream) for stream in streams if stream is not None)
        self._has_output = True
        return streams

    def add_known(self, flight: TaskInFlight, exit_code: int, output_bytes: int) -> None:
        """Add the row of a task with a precomputed result; see `add`."""
        if exit_code == 0 and not self._successes:
            return
        task = flight.task
        extras: Extras | None = None
        if exit_code != 0 or task.parent_task_id is not None:
            extras = OK if exit_code == 0 else "exit", _clean_parent(task.parent_task_id), _NO_STREAMS, None
        at = flight.ended_at or time.time_ns() // 1000
        details = clean_args(task.args), _clean_labels(task.labels), exit_code, extras
        sizes = _measure_input(task), output_bytes
        row = task.task_id, flight.owner.topic_partition, flight.find_offsets()
        self._rows.append((*row, None, None, at, 0.0, None, flight.attempts, *sizes, details))
        self._note_added()

    def _note_added(self) -> None:
        """Pack a block if it is complete, and call `on_due` if it is time."""
        has_output, is_complete = self._has_output, len(self._rows) >= BLOCK_ROWS
        if is_complete:
            self._end_block()
        if is_complete or has_output or self.size == 1:
            self._on_due()

    def _end_block(self) -> None:
        block: TaskParts | list[TaskRow] = self._rows
        if not self._has_output:
            with contextlib.suppress(Exception):  # the error is logged and counted when rows are joined
                block = pack_tasks(self._rows)
        self._blocks.append(block)
        self._size_of_blocks += len(self._rows)
        self._rows, self._has_output = [], False

    def take(self) -> TakenTaskRows | None:
        """Remove and return all rows; None if there are none."""
        if not self.size:
            return None
        if self._plain.size:
            self._end_plain()
        blocks = [*self._blocks, self._rows] if self._rows else self._blocks
        taken = TakenTaskRows(blocks, self.size, self.held_bytes)
        self._taken += taken.size
        self._start()
        return taken


class TakenTaskRows:
    """Complete rows, at least one; any thread may join them.

    Args:
        blocks: The rows, some of them packed.
        size: The number of current rows.
        output_bytes: The size of the output in the rows.

    Attributes:
        size: The number of current rows.
        output_bytes: The size of the output, which must be searched for secrets.
    """

    def __init__(self, blocks: Sequence[TaskParts | list[TaskRow]], size: int, output_bytes: int) -> None:
        self._blocks = blocks
        self._has_output = True
        self.size = size
        self.output_bytes = output_bytes

    def drop_output(self) -> None:
        """Drop the output of the tasks."""
        self._has_output = False
        self.output_bytes = 0

    def join(self) -> pa.RecordBatch:
        """Return the rows as one batch."""
        return join_tasks([pack_tasks(each, self._mask) if isinstance(each, list) else each for each in self._blocks])

    def _mask(self, data: bytes) -> bytes | None:
        return mask_stream(data) if self._has_output else None


#: The size of the part on each side of a cut that is masked before cutting. Few secrets are longer; masking the whole
#: stream would block the engine.
_AROUND_BYTES = 1024


def cut_stream(data: bytes) -> bytes:
    """Return the recorded part of a stream: all of it, or its beginning and its end.

    It is cut at line ends, so that no part of a secret remains unmasked. A stream without lines, such as a document in
    one line, is masked around the cut first.
    """
    if len(data) <= MAX_STREAM_BYTES:
        return data
    half, around = (MAX_STREAM_BYTES - 100) // 2, _AROUND_BYTES
    head, tail = data[:half], data[-half:]
    if b"\n" in head:
        head = head[: head.rfind(b"\n") + 1]
    else:
        head = (head[:-around] + mask_stream(data[half - around : half + around])[:-around])[:half]
    if b"\n" in tail:
        tail = tail[tail.find(b"\n") + 1 :] or tail
    else:
        tail = (mask_stream(data[-half - around : -half + around])[around:] + tail[around:])[-half:]
    return head + b"\n... (%d bytes omitted) ...\n" % (len(data) - len(head) - len(tail)) + tail


def mask_stream(data: bytes) -> bytes:
    """Mask the secrets in a program's output as in logs; bytes that are not text stay as they are."""
    return redact_text(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _clean_labels(labels: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(clean_name(name), clean_error(value)) for name, value in list(labels.items())[:MAX_LABELS]]


def _clean_parent(task_id: str | None) -> str | None:
    return None if task_id is None else clean_name(task_id)


def _encode_input(task: ExecutorTask) -> bytes:
    stdin = task.stdin or b""
    return stdin if isinstance(stdin, bytes) else stdin.encode("utf-8", "surrogatepass")


def _measure_input(task: ExecutorTask) -> int:
    stdin = task.stdin
    if stdin is None:
        return 0
    return len(stdin) if isinstance(stdin, bytes) or stdin.isascii() else len(stdin.encode("utf-8", "replace"))
