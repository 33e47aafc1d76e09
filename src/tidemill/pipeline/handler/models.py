"""The values that a handler receives and returns: tasks, results, errors, groups and decisions.

Plain data only. The handler creates tasks and their precomputed results; the engine creates everything else.
Invariant: nothing here can be changed, so that what runs is what is shown and recorded.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.pipeline.handler.task_fields import (
    NO_TEXTS,
    check_limit,
    clean_id,
    copy_args,
    copy_data,
    copy_offsets,
    copy_texts,
    make_type_error,
    name_field,
)
from tidemill.runtime.kafka.source_message import SourceMessage, set_field

_TEXT = frozenset({str, type(None)})
_DATA = frozenset({str, bytes})
_INPUT = _TEXT | _DATA
_NONE = ()


class _ReadOnly(msgspec.Struct):
    """A struct whose attributes cannot be changed; `frozen=True` would not say what to do instead."""

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse to change an attribute.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(
            f"{type(self).__name__}.{name} cannot be changed; "
            f"msgspec.structs.replace(value, {name}=...) returns a changed copy"
        )

    def __delattr__(self, name: str) -> None:
        """Refuse to remove an attribute.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(f"{type(self).__name__}.{name} cannot be removed")


class PrecomputedResult(_ReadOnly):
    """The known result of a task: no process is started, no slot is used, and there is no pid.

    Raises:
        TypeError: A field has an unusable type.
    """

    stdout: str | bytes = ""
    stderr: str = ""
    exit_code: int = 0

    def __post_init__(self) -> None:
        if type(self.stdout) not in _DATA:
            set_field(self, "stdout", copy_data("stdout of a PrecomputedResult", "a string or bytes", self.stdout))
        if type(self.stderr) is not str:
            if not isinstance(self.stderr, str):
                raise make_type_error("stderr of a PrecomputedResult", "a string", self.stderr)
            set_field(self, "stderr", str.__str__(self.stderr))
        if not isinstance(self.exit_code, int):
            raise make_type_error("exit_code of a PrecomputedResult", "a whole number", self.exit_code)


class ExecutorTask(_ReadOnly):
    """One execution of a program. Lists and mappings are copied; `msgspec.structs.replace` returns a changed task.

    Attributes:
        task_id: Unique among this partition's pending tasks; see `make_task_id` and `make_stable_task_id`.
        args: The arguments after the program's name.
        metadata: Any values for the handler's own hooks; not passed to the program.
        source_offsets: The offsets of the messages of this window that the task works for; empty: all of them.
        binary_path: The program; None: `executor.binary_path`.
        stdin: Text (sent as UTF-8) or bytes for its standard input; None: empty.
        env: Variables added to the filtered environment.
        timeout_seconds: Wall-clock limit; None: `executor.task_timeout_seconds`.
        precomputed: A result that is already known; no process is started.
        labels: Short names and values for logs and records.
        parent_task_id: The task that this one replaces; set by tidemill for replacements.

    Raises:
        TypeError: A field has an unusable type.
        ValueError: The time limit is not above 0.
    """

    task_id: str
    args: Sequence[str] = ()
    metadata: dict[str, Any] = {}
    source_offsets: Sequence[int] = ()
    binary_path: str | None = None
    stdin: str | bytes | None = None
    env: Mapping[str, str] = NO_TEXTS
    timeout_seconds: float | None = None
    precomputed: PrecomputedResult | None = None
    labels: Mapping[str, str] = NO_TEXTS
    parent_task_id: str | None = None

    def __post_init__(self) -> None:
        """Check and copy the fields; the comparisons before each call are there for speed."""
        task_id = self.task_id
        if type(task_id) is not str or not task_id.isascii():
            task_id = clean_id("task_id", task_id)
            set_field(self, "task_id", task_id)
        if self.args is not _NONE:
            set_field(self, "args", copy_args(task_id, self.args))
        if self.source_offsets is not _NONE:
            set_field(self, "source_offsets", copy_offsets(task_id, self.source_offsets))
        if type(self.binary_path) not in _TEXT:
            if not isinstance(self.binary_path, str):
                raise make_type_error(name_field(task_id, "binary_path"), "a string or None", self.binary_path)
            set_field(self, "binary_path", str.__str__(self.binary_path))
        if type(self.stdin) not in _INPUT:
            name = name_field(task_id, "stdin")
            set_field(self, "stdin", copy_data(name, "a string, bytes or None", self.stdin))
        if self.env is not NO_TEXTS:
            set_field(self, "env", copy_texts(task_id, "env", self.env, escapes=False))
        if self.timeout_seconds is not None:
            check_limit(task_id, self.timeout_seconds)
        if self.precomputed is not None and type(self.precomputed) is not PrecomputedResult:
            if not isinstance(self.precomputed, PrecomputedResult):
                name = name_field(task_id, "precomputed")
                raise make_type_error(name, "a PrecomputedResult or None", self.precomputed)
            PrecomputedResult.__post_init__(self.precomputed)  # the subclass may have replaced it
        if self.labels is not NO_TEXTS:
            set_field(self, "labels", copy_texts(task_id, "labels", self.labels, escapes=True))
        if self.parent_task_id is not None:
            set_field(self, "parent_task_id", clean_id(name_field(task_id, "parent_task_id"), self.parent_task_id))


class ExecutorResult(_ReadOnly):
    """A task that succeeded.

    Attributes:
        exit_code: 0, or the exit code of a precomputed result.
        stdout: Standard output as UTF-8 text; invalid bytes are replaced.
        stderr: Standard error as UTF-8 text; invalid bytes are replaced.
        stdout_bytes: Standard output as raw bytes.
        duration_seconds: From start to end of the process; 0 for a precomputed result.
        task: The task.
        pid: The process id; None for a precomputed result.
    """

    exit_code: int
    stdout_bytes: bytes
    stderr: str
    duration_seconds: float
    task: ExecutorTask
    pid: int | None

    @property
    def stdout(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")


class ErrorKind(enum.StrEnum):
    """Why a task failed.

    - `missing`: the program, or the interpreter of a script, does not exist.
    - `permission`: the program cannot be executed.
    - `exit`: it returned an exit code other than 0; without a pid, the task cannot be started at all.
    - `timeout`: it exceeded its time limit.
    - `output`: it wrote more than the limits allow, or a resident program broke the protocol.
    """

    MISSING = "missing"
    PERMISSION = "permission"
    EXIT = "exit"
    TIMEOUT = "timeout"
    OUTPUT = "output"


class ExecutorError(_ReadOnly):
    """A task that failed.

    Attributes:
        task: The task.
        exit_code: None if it never started, -1 after a timeout, otherwise the process's exit code (negative: signal).
        stderr: Standard error as text; 'task timed out' after a timeout.
        exception: The error, if it is something other than the program's own exit code.
        pid: The process id; None if it never started.
        kind: See `ErrorKind`.
        duration_seconds: From start to end of the process; 0 if it never started.
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
        """Whether no system can start the task (its arguments contain NUL, for example); RETRY then acts like DLQ."""
        return self.kind is ErrorKind.EXIT and self.pid is None


class ErrorAction(enum.StrEnum):
    """The action after a failed task: run it again, ignore the failure, or write a dead letter."""

    RETRY = "retry"
    SKIP = "skip"
    DLQ = "dlq"


class DeliveryAction(enum.StrEnum):
    """The action for payloads that a sink refused: write a dead letter, send them again, or drop them."""

    DLQ = "dlq"
    RETRY = "retry"
    SKIP = "skip"


class DeliveryError(_ReadOnly):
    """Payloads that a sink refused, or did not accept in time.

    Attributes:
        sink_name: The name of the sink.
        sink_type: Its type.
        error: The sink's error.
        payloads: The payloads, as the hook returned them.
        attempt: The number of the failed attempt, from 1.
    """

    sink_name: str
    sink_type: str
    error: str
    payloads: Sequence[Any]
    attempt: int


class PendingContext:
    """This partition's tasks that have not ended, including queued tasks and tasks in backoff.

    Computed on first use, so that it costs nothing in an `arrange` that does not use it.
    """

    def __init__(self, tasks: Callable[[], Iterable[ExecutorTask]] = tuple) -> None:
        self._tasks = tasks

    @functools.cached_property
    def pending_tasks(self) -> tuple[ExecutorTask, ...]:
        """The tasks, oldest first."""
        return tuple(self._tasks())

    @functools.cached_property
    def pending_task_ids(self) -> frozenset[str]:
        """The ids of these tasks."""
        return frozenset(task.task_id for task in self.pending_tasks)


class SkipMessage(Exception):
    """Raised by `transform` to skip a message; its text is for readers of the handler's code only.

    If raised for several messages, the window is split, as for any exception, until the message to skip is alone.
    """


class MessageGroup(_ReadOnly):
    """All tasks of one message, passed to `on_message_complete` when the last of them has ended.

    Attributes:
        source_message: The message.
        tasks: Every task that worked for it, including replaced ones.
        results: The results of the tasks that succeeded.
        errors: The errors of the tasks that failed for good, including SKIP and DLQ.
        started_at: When its window was arranged, in seconds since the epoch.
        finished_at: When its last task ended, in seconds since the epoch.
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
        """The number of tasks that succeeded."""
        return len(self.results)

    @property
    def failed(self) -> int:
        """The number of tasks that finally failed."""
        return len(self.errors)

    @property
    def total(self) -> int:
        """The number of tasks, including replaced ones."""
        return len(self.tasks)

    @property
    def all_succeeded(self) -> bool:
        """Whether no task failed; also true for a message without tasks."""
        return not self.errors

    @property
    def any_failed(self) -> bool:
        """Whether at least one task failed for good."""
        return bool(self.errors)


def make_task_id(prefix: str = "task") -> str:
    """Return `prefix` and a random suffix: a new id for every call.

    Example:
        >>> make_task_id("resize").startswith("resize-")
        True
    """
    return f"{prefix}-{secrets.token_hex(8)}"


def make_stable_task_id(prefix: str, *parts: object) -> str:
    """Return `prefix` and a digest of `parts`. Equal parts give equal ids, which identifies reprocessed work.

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
