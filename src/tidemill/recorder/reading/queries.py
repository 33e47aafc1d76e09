"""What a reader is asked, and what it answers. Times are UTC microseconds since the epoch, durations are seconds."""

from __future__ import annotations

import msgspec

from tidemill.core.recorder.cursor import Key, encode_cursor
from tidemill.recorder.format.counts import Counts
from tidemill.recorder.format.events import EventKind, RecordedEvent

#: How a try of a task may have ended: well, or why it failed.
TASK_KINDS = ("ok", "missing", "permission", "exit", "timeout", "output")


class MessageQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which finished messages; what is not given matches all.

    Attributes:
        offset: One offset; with `partition` and `topic`, one message.
        key: The key's first 256 bytes.
        task_id: One of its tasks.
        label: A label of one of its tasks, NAME=VALUE.
        statuses: done, failed, rejected.
        min_seconds: From consumed to resolved, at least.
        max_seconds: At most.
        since_us: Resolved at or after this time.
        until_us: Resolved before this time.
        error: A text in one of its errors.
        recording: The name of the worker's folder.
        group: The consumer group.
        worker: The worker's name.
    """

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    key: bytes | None = None
    task_id: str | None = None
    label: str | None = None
    statuses: tuple[str, ...] = ()
    min_seconds: float | None = None
    max_seconds: float | None = None
    since_us: int | None = None
    until_us: int | None = None
    error: str = ""
    recording: str | None = None
    group: str | None = None
    worker: str | None = None


class TaskQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which tasks; times are those of their ends, `kinds` are "ok" or kinds of errors. See `MessageQuery`."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    task_id: str | None = None
    label: str | None = None
    kinds: tuple[str, ...] = ()
    min_seconds: float | None = None
    max_seconds: float | None = None
    since_us: int | None = None
    until_us: int | None = None
    recording: str | None = None
    group: str | None = None
    worker: str | None = None


class EventQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which events; `text` is searched for in their texts, `task_ids` are several. See `MessageQuery`."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    task_id: str | None = None
    task_ids: tuple[str, ...] = ()
    sink: str | None = None
    kinds: tuple[str, ...] = ()
    error_class: str | None = None
    text: str = ""
    since_us: int | None = None
    until_us: int | None = None
    recording: str | None = None
    group: str | None = None
    worker: str | None = None


class RecordedMessageRow(msgspec.Struct, frozen=True):
    """A finished message; see `schema.messages_schema`.

    Attributes:
        recording: The name of the worker's folder.
        engine: The slot of its engine.
    """

    recording: str
    engine: int
    engine_id: str
    topic: str
    partition: int
    offset: int
    key: bytes | None
    record_at: int | None
    consumed_at: int | None
    arranged_at: int | None
    tasks_done_at: int | None
    resolved_at: int | None
    committed_at: int | None
    window: int | None
    status: str
    tasks: int
    precomputed: int
    attempts: int
    payloads: int
    error: str | None


class RecordedTaskRow(msgspec.Struct, frozen=True):
    """A task that ran; see `schema.tasks_schema`."""

    recording: str
    engine: int
    engine_id: str
    task_id: str
    topic: str
    partition: int
    offsets: list[int]
    args: list[str]
    labels: dict[str, str]
    slot: int | None
    pid: int | None
    queued_at: int | None
    started_at: int | None
    ended_at: int | None
    exit_code: int | None
    kind: str
    attempt: int
    input_bytes: int | None
    output_bytes: int | None
    parent: str | None
    stdout: bytes | None
    stderr: bytes | None
    error: str | None
    stdin: bytes | None = None


class RecordedEventRow(msgspec.Struct, frozen=True):
    """An event, and whose it is."""

    recording: str
    event: RecordedEvent


class MessagePage(msgspec.Struct, frozen=True):
    """Messages, the newest first.

    Attributes:
        rows: They.
        cursor: Where the next page begins; None: there is none.
        problems: What could not be read.
        keys: What a cursor behind each row has; see `list_cursors`.
        name: What the query is called in cursors.
    """

    rows: list[RecordedMessageRow]
    cursor: str | None = None
    problems: list[str] = []
    keys: list[Key] = []
    name: str = ""


class TaskPage(msgspec.Struct, frozen=True):
    """Tasks, those that ended last first; see `MessagePage`."""

    rows: list[RecordedTaskRow]
    cursor: str | None = None
    problems: list[str] = []
    keys: list[Key] = []
    name: str = ""


def list_cursors(page: MessagePage | TaskPage) -> list[str]:
    """Return where a page behind each row would begin."""
    return [encode_cursor(page.name, key) for key in page.keys]


class EventPage(msgspec.Struct, frozen=True):
    """Events, the newest first; see `MessagePage`."""

    rows: list[RecordedEventRow]
    cursor: str | None = None
    problems: list[str] = []


class FailureGroup(msgspec.Struct, frozen=True):
    """Failures with the same error class.

    Attributes:
        error_class: What they have in common.
        kinds: How many events, by kind.
        count: How often something failed for good; see `core.recorder.failure_count`.
        first_us: When the first one happened.
        last_us: When the last one did.
        minutes: How many events per minute: pairs of minutes since the epoch and counts, in order.
        example: The last one that was stored.
    """

    error_class: str
    kinds: dict[str, int]
    count: int
    first_us: int
    last_us: int
    minutes: list[tuple[int, int]]
    example: RecordedEventRow | None = None


class FailureList(msgspec.Struct, frozen=True):
    """Groups of failures, the most frequent first; `more` of them were left out."""

    groups: list[FailureGroup]
    more: int = 0
    problems: list[str] = []


class CountSeries(msgspec.Struct, frozen=True):
    """Counts in order of time, one for each step in which something was counted; their `at` is the step's start."""

    points: list[Counts]
    step_seconds: int
    problems: list[str] = []


class RecordingInfo(msgspec.Struct, frozen=True):
    """A period of a worker.

    Attributes:
        recording: The name of the worker's folder.
        period: The name of the period; '' in memory.
        path: Its database; '' in memory.
        group: The consumer group.
        worker: The worker's name.
        started_us: When it was begun.
        first_us: The time of its first message; None: it has none.
        last_us: That of the last one.
        messages: Rows of messages.
        tasks: Rows of tasks.
        events: Events.
        size_bytes: All of its files.
        live: Whether it is being written.
        bounded: Whether it is of a bounded run, which records failures only.
        kept_until_us: When it is too old by its own configuration; None: it is being written, or not known.
        problems: What could not be read.
    """

    recording: str
    period: str
    path: str
    group: str = ""
    worker: str = ""
    started_us: int = 0
    first_us: int | None = None
    last_us: int | None = None
    messages: int = 0
    tasks: int = 0
    events: int = 0
    size_bytes: int = 0
    live: bool = False
    bounded: bool = False
    kept_until_us: int | None = None
    problems: list[str] = []


class Story(msgspec.Struct, frozen=True):
    """What happened to a message, once: a message that was reprocessed has a story for each time.

    Attributes:
        message: Its row.
        tasks: Its tasks and their tries, in order of their starts.
        events: Its events, in order: failures, retries, deliveries that were refused, letters.
        committed_us: When its offset was seen to be committed; None: it was not, or not recorded.
        committed_exactly: Whether that is the commit itself, and not the first look after it.
        bounded: Whether that was in a bounded run, which commits nothing.
    """

    message: RecordedMessageRow
    tasks: list[RecordedTaskRow] = []
    events: list[RecordedEventRow] = []
    committed_us: int | None = None
    committed_exactly: bool = False
    bounded: bool = False

    @property
    def is_dead_lettered(self) -> bool:
        """Whether a dead letter was written while it was processed."""
        return any(row.event.kind is EventKind.DEAD_LETTERED for row in self.events)


def show_status(status: str, *, is_dead_lettered: bool) -> str:
    """Return what people read of a message: one whose tasks ended well may have left a dead letter all the same.

    Example:
        >>> show_status("done", is_dead_lettered=True), show_status("failed", is_dead_lettered=True)
        ('dead-lettered', 'failed')
    """
    return "dead-lettered" if status == "done" and is_dead_lettered else status


class Trace(msgspec.Struct, frozen=True):
    """The stories of a message, the oldest first.

    Attributes:
        stories: They; events of a message that has no row (it is not finished, or its row was lost) are in `events`.
        events: Events that belong to none of the stories.
        tasks: Tasks that belong to none of the stories.
        kept_from_us: The time of the oldest row that is kept; None: there is none.
        kept_to_us: That of the newest.
        problems: What could not be read.
    """

    stories: list[Story]
    events: list[RecordedEventRow] = []
    tasks: list[RecordedTaskRow] = []
    kept_from_us: int | None = None
    kept_to_us: int | None = None
    problems: list[str] = []
