"""The queries and answers of a reader. Times are UTC microseconds since the epoch, durations are in seconds."""

from __future__ import annotations

import msgspec

from tidemill.core.recorder.cursor import Key, encode_cursor
from tidemill.recorder.format.counts import Counts
from tidemill.recorder.format.events import EventKind, RecordedEvent

#: The outcomes of an attempt of a task: "ok", or the kind of its error.
TASK_KINDS = ("ok", "missing", "permission", "exit", "timeout", "output")


class MessageQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Selects finished messages; fields that are not given match all.

    Attributes:
        offset: An offset; with `partition` and `topic`, it selects one message.
        key: The first 256 bytes of the key.
        task_id: The id of one of the message's tasks.
        label: A label of one of its tasks, as NAME=VALUE.
        statuses: Any of done, failed and rejected.
        min_seconds: The minimum time from consumption to resolution.
        max_seconds: The maximum of that time.
        since_us: Resolved at or after this time.
        until_us: Resolved before this time.
        error: A text that one of its errors contains.
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
    """Selects tasks by the time of their end; `kinds` are "ok" or kinds of errors. See `MessageQuery`."""

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
    """Selects events. `text` matches a part of their texts, `task_ids` any of several tasks. See `MessageQuery`."""

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
    """An attempt of a task; see `schema.tasks_schema`."""

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
    """An event and its recording."""

    recording: str
    event: RecordedEvent


class MessagePage(msgspec.Struct, frozen=True):
    """A page of messages, newest first.

    Attributes:
        rows: The messages.
        cursor: The cursor of the next page; None if this is the last page.
        problems: Descriptions of data that could not be read.
        keys: For each row, the contents of a cursor that continues after it; see `list_cursors`.
        name: The query as written in cursors.
    """

    rows: list[RecordedMessageRow]
    cursor: str | None = None
    problems: list[str] = []
    keys: list[Key] = []
    name: str = ""


class TaskPage(msgspec.Struct, frozen=True):
    """A page of tasks, those that ended last first; see `MessagePage`."""

    rows: list[RecordedTaskRow]
    cursor: str | None = None
    problems: list[str] = []
    keys: list[Key] = []
    name: str = ""


def list_cursors(page: MessagePage | TaskPage) -> list[str]:
    """Return for each row the cursor of a page that begins after it."""
    return [encode_cursor(page.name, key) for key in page.keys]


class EventPage(msgspec.Struct, frozen=True):
    """A page of events, newest first; see `MessagePage`."""

    rows: list[RecordedEventRow]
    cursor: str | None = None
    problems: list[str] = []


class FailureGroup(msgspec.Struct, frozen=True):
    """Failures with the same error class.

    Attributes:
        error_class: The error class.
        kinds: The number of events by kind.
        count: The number of final failures; see `core.recorder.failure_count`.
        first_us: The time of the first failure.
        last_us: The time of the last failure.
        minutes: Pairs of a minute since the epoch and its number of events, in order.
        example: The last stored event of the group.
    """

    error_class: str
    kinds: dict[str, int]
    count: int
    first_us: int
    last_us: int
    minutes: list[tuple[int, int]]
    example: RecordedEventRow | None = None


class FailureList(msgspec.Struct, frozen=True):
    """Groups of failures, the most frequent first; `more` is the number of groups left out."""

    groups: list[FailureGroup]
    more: int = 0
    problems: list[str] = []


class CountSeries(msgspec.Struct, frozen=True):
    """Counts in order of time, one for each step with any counts; `at` is the start of a step."""

    points: list[Counts]
    step_seconds: int
    problems: list[str] = []


class RecordingInfo(msgspec.Struct, frozen=True):
    """A period of a worker.

    Attributes:
        recording: The name of the worker's folder.
        period: The name of the period; '' in memory.
        path: The path of its database; '' in memory.
        group: The consumer group.
        worker: The worker's name.
        started_us: The start of the period.
        first_us: The time of the first message; None if there is none.
        last_us: The time of the last message.
        messages: The number of message rows.
        tasks: The number of task rows.
        events: The number of events.
        size_bytes: The size of all its files.
        live: Whether a process writes to it.
        bounded: Whether a bounded run wrote it, which records failures only.
        kept_until_us: When its own retention expires; None while it is written, or if the retention is unknown.
        problems: Descriptions of data that could not be read.
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
    """One processing of a message; a message that was reprocessed has a story for each time.

    Attributes:
        message: The row of the message.
        tasks: The attempts of its tasks, in order of their starts.
        events: Its events in order: failures, retries, refused deliveries and letters.
        committed_us: The time of the commit; None if there was none or it was not recorded.
        committed_exactly: Whether that is the exact time, not the first sample after the commit.
        bounded: Whether this happened in a bounded run, which commits nothing.
    """

    message: RecordedMessageRow
    tasks: list[RecordedTaskRow] = []
    events: list[RecordedEventRow] = []
    committed_us: int | None = None
    committed_exactly: bool = False
    bounded: bool = False

    @property
    def is_dead_lettered(self) -> bool:
        """Whether a dead letter was written during this processing."""
        return any(row.event.kind is EventKind.DEAD_LETTERED for row in self.events)


def show_status(status: str, *, is_dead_lettered: bool) -> str:
    """Return the status shown to users; a message whose tasks succeeded may still have left a dead letter.

    Example:
        >>> show_status("done", is_dead_lettered=True), show_status("failed", is_dead_lettered=True)
        ('dead-lettered', 'failed')
    """
    return "dead-lettered" if status == "done" and is_dead_lettered else status


class Trace(msgspec.Struct, frozen=True):
    """The stories of a message, oldest first.

    Attributes:
        stories: The stories.
        events: Events that belong to none of the stories, because the message is unfinished or its row was lost.
        tasks: Tasks that belong to none of the stories.
        kept_from_us: The time of the oldest recorded row; None if there is none.
        kept_to_us: The time of the newest recorded row.
        problems: Descriptions of data that could not be read.
    """

    stories: list[Story]
    events: list[RecordedEventRow] = []
    tasks: list[RecordedTaskRow] = []
    kept_from_us: int | None = None
    kept_to_us: int | None = None
    problems: list[str] = []
