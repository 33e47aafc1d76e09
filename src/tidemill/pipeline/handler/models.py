"""The values a handler sees and returns: tasks, results, errors, groups and decisions.

Plain data only. Who creates what: the handler creates tasks and collects; the engine creates everything else.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.runtime.messages import SourceMessage


class PrecomputedResult(msgspec.Struct):
    """The result of a task that needs no process: it takes no slot and has no pid."""

    stdout: str | bytes = ""
    stderr: str = ""
    exit_code: int = 0


class ExecutorTask(msgspec.Struct):
    """One run of a program.

    Attributes:
        task_id: Unique among this partition's pending tasks; see `make_task_id` and `make_stable_task_id`.
        args: The arguments after the program's name.
        metadata: Anything the handler wants back in its hooks; not handed to the program.
        source_offsets: The offsets of the messages of this window that the task works for; empty: all of them.
        binary_path: The program; None: `executor.binary_path`.
        stdin: Text (sent as UTF-8) or bytes for its standard input; None: empty.
        env: Added to the filtered environment.
        timeout_seconds: Wall-clock limit; None: `executor.task_timeout_seconds`.
        precomputed: A result that is already known; no process is started.
        labels: Short names for logs and records.
        parent_task_id: The task that this one replaces; set by tidemill for replacements.
    """

    task_id: str
    args: Sequence[str] = ()
    metadata: dict[str, Any] = {}
    source_offsets: Sequence[int] = ()
    binary_path: str | None = None
    stdin: str | bytes | None = None
    env: Mapping[str, str] = {}
    timeout_seconds: float | None = None
    precomputed: PrecomputedResult | None = None
    labels: Mapping[str, str] = {}
    parent_task_id: str | None = None


class ExecutorResult(msgspec.Struct):
    """A task that succeeded.

    Attributes:
        exit_code: 0, or what a precomputed result says.
        stdout: UTF-8 text; what is not UTF-8 is replaced.
        stderr: UTF-8 text; what is not UTF-8 is replaced.
        stdout_bytes: The raw bytes.
        duration_seconds: From start to end of the process; 0 for a precomputed one.
        task: The task.
        pid: None for a precomputed one.
    """

    exit_code: int
    stdout_bytes: bytes
    stderr: str
    duration_seconds: float
    task: ExecutorTask
    pid: int | None

    @property
    def stdout(self) -> str:
        """Standard output as text; what is not UTF-8 is replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")


class ErrorKind(enum.StrEnum):
    """Why a task failed."""

    MISSING = "missing"
    PERMISSION = "permission"
    EXIT = "exit"
    TIMEOUT = "timeout"
    OUTPUT = "output"


class ExecutorError(msgspec.Struct):
    """A task that failed.

    Attributes:
        task: The task.
        exit_code: None if it never started, -1 after a timeout, else what the process returned (negative: signal).
        stderr: Text; 'task timed out' after a timeout.
        exception: What went wrong if it was not the program's own exit code.
        pid: None if it never started.
        kind: See `ErrorKind`.
    """

    task: ExecutorTask
    exit_code: int | None
    stderr: str
    exception: str | None
    pid: int | None
    kind: ErrorKind
    duration_seconds: float = 0.0

    @property
    def never_starts(self) -> bool:
        """Whether no system can start a task like this (a NUL in its arguments, say), so that RETRY means DLQ."""
        return self.kind is ErrorKind.EXIT and self.pid is None


class ErrorAction(enum.StrEnum):
    """What to do with a failed task."""

    RETRY = "retry"
    SKIP = "skip"
    DLQ = "dlq"


class DeliveryAction(enum.StrEnum):
    """What to do with payloads that a sink refused."""

    DLQ = "dlq"
    RETRY = "retry"
    SKIP = "skip"


class DeliveryError(msgspec.Struct):
    """Payloads that a sink refused, or did not accept in time.

    Attributes:
        sink_name: The instance.
        sink_type: Its type.
        error: What the sink said.
        payloads: The payloads concerned, as the hook returned them.
        attempt: How often they were tried, from 1.
    """

    sink_name: str
    sink_type: str
    error: str
    payloads: Sequence[Any]
    attempt: int


class PendingContext:
    """This partition's tasks without a terminal outcome, queued and backing off included.

    Looked up on first use, so that an `arrange` that does not use them pays nothing.
    """

    def __init__(self, tasks: Callable[[], Iterable[ExecutorTask]] = tuple) -> None:
        """Keep where the tasks can be read."""
        self._tasks = tasks

    @functools.cached_property
    def pending_tasks(self) -> tuple[ExecutorTask, ...]:
        """The tasks, oldest first."""
        return tuple(self._tasks())

    @functools.cached_property
    def pending_task_ids(self) -> frozenset[str]:
        """Their ids."""
        return frozenset(task.task_id for task in self.pending_tasks)


class SkipMessage(Exception):
    """Raised by `transform` for a message that is to be skipped; its text is for the handler's own readers.

    Raised for several messages, it splits them, as any exception does, until the one that is meant stands alone.
    """


class MessageGroup(msgspec.Struct):
    """All tasks of one message, given to `on_message_complete` when the last of them is terminal.

    Attributes:
        source_message: The message.
        tasks: Every task that worked for it, replaced ones included.
        results: Those that ended well.
        errors: Every terminal failure, SKIP and DLQ included.
        started_at: Seconds since the epoch when its window was arranged.
        finished_at: Seconds since the epoch when its last task ended.
        replaced: How many of its tasks were replaced by others.
    """

    source_message: SourceMessage
    tasks: list[ExecutorTask] = []
    results: list[ExecutorResult] = []
    errors: list[ExecutorError] = []
    started_at: float = 0.0
    finished_at: float = 0.0
    replaced: int = 0

    @property
    def succeeded(self) -> int:
        """How many tasks succeeded."""
        return len(self.results)

    @property
    def failed(self) -> int:
        """How many tasks failed for good."""
        return len(self.errors)

    @property
    def total(self) -> int:
        """How many tasks there were."""
        return len(self.tasks)

    @property
    def all_succeeded(self) -> bool:
        """Whether nothing failed (also true for a message without tasks)."""
        return not self.errors

    @property
    def any_failed(self) -> bool:
        """Whether at least one task failed for good."""
        return bool(self.errors)


def make_task_id(prefix: str = "task") -> str:
    """Return `prefix` and a random suffix: a new id for every run.

    Example:
        >>> make_task_id("resize").startswith("resize-")
        True
    """
    return f"{prefix}-{secrets.token_hex(8)}"


def make_stable_task_id(prefix: str, *parts: object) -> str:
    """Return `prefix` and a digest of `parts`: equal parts give equal ids, so that reprocessed work is recognized.

    Example:
        >>> make_stable_task_id("t", "topic", 0, 42) == make_stable_task_id("t", "topic", 0, 42)
        True
    """
    digest = hashlib.blake2b(digest_size=10)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return f"{prefix}-{digest.hexdigest()}"
