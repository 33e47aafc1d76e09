"""Models of the REST API for recordings; the pages show the same. Times are seconds since the epoch."""

from __future__ import annotations

from pydantic import BaseModel, Field

from tidemill.core.pipeline.message_stage import OpenStage
from tidemill.recorder.format.events import OF_TRIGGERS
from tidemill.recorder.reading.queries import (
    show_status,
)

MILLION = 1_000_000
_BOUNDED = "Whether it belongs to bounded runs (backfills, DataFrames), which record failures only."


def to_seconds(at_us: int | None) -> float | None:
    return None if at_us is None else at_us / MILLION


def measure(since_us: int | None, until_us: int | None) -> float | None:
    """Return a duration in seconds; None if a time is unknown."""
    return None if since_us is None or until_us is None else (until_us - since_us) / MILLION


def show_bytes(data: bytes | None) -> str | None:
    """Return bytes as text; bytes that are not UTF-8 are escaped."""
    return None if data is None else data.decode("utf-8", "backslashreplace")


class RecordedMessageView(BaseModel):
    """A finished message."""

    host: str = Field("", description="The peer that stores the message; '': this host.")
    recording: str = Field(description="The worker that recorded the message.")
    engine: int
    topic: str
    partition: int
    offset: int
    key: str | None = Field(description="The first 256 bytes of the key; unprintable bytes as \\xNN.")
    status: str = Field(description="The outcome of its tasks: done, failed or rejected.")
    dead_lettered: bool = Field(
        False, description="Whether it left a dead letter although it is done; for example, a sink rejected its result."
    )
    error: str | None = Field(description="The class of the error.")
    seconds: float | None = Field(description="From consumed to resolved.")
    record_at: float | None
    consumed_at: float | None
    arranged_at: float | None
    tasks_done_at: float | None
    resolved_at: float | None
    committed_at: float | None = Field(description="null if the message was not committed when the row was written.")
    window: int | None
    tasks: int = Field(description="How many tasks it had, including replaced ones.")
    precomputed: int
    attempts: int
    payloads: int

    @property
    def shown_status(self) -> str:
        """The status as pages show it."""
        return show_status(self.status, is_dead_lettered=self.dead_lettered)


class RecordedTaskView(BaseModel):
    """A task that ran, or one of its attempts."""

    host: str = Field("", description="The peer that stores the task; '': this host.")
    recording: str
    engine: int
    task_id: str
    topic: str
    partition: int
    offsets: list[int]
    args: list[str]
    labels: dict[str, str]
    slot: int | None
    pid: int | None
    kind: str = Field(description="ok, or the kind of the error.")
    attempt: int
    exit_code: int | None
    queued_at: float | None
    started_at: float | None
    ended_at: float | None
    seconds: float | None = Field(description="From start to end.")
    waited_seconds: float | None = Field(description="From queued to started.")
    input_bytes: int | None
    output_bytes: int | None
    parent: str | None = Field(description="The task that this one replaced.")
    stdout: str | None
    stderr: str | None
    stdin: str | None = Field(default=None, description="The task's input, if debug.store_stdin is on.")
    error: str | None


class RecordedEventView(BaseModel):
    """A recorded event."""

    host: str = Field("", description="The peer that stores the event; '': this host.")
    recording: str
    at: float
    kind: str
    topic: str | None
    partition: int | None
    offset: int | None
    task_id: str | None
    sink: str | None
    text: str
    error_class: str
    data: dict[str, str | int | float]

    @property
    def is_about_trigger(self) -> bool:
        """Whether `task_id` names a trigger."""
        return self.kind in OF_TRIGGERS


class FailureGroupView(BaseModel):
    """Failures with the same error."""

    error_class: str
    count: int = Field(description="How many final failures; attempts that were retried do not count.")
    kinds: dict[str, int] = Field(description="The number of events, by kind.")
    first_at: float
    last_at: float
    minutes: list[tuple[int, int]] = Field(description="Minutes since the epoch, each with its number of events.")
    hosts: list[str] = Field([], description="Peers that recorded such failures.")
    example: RecordedEventView | None


class RecordingView(BaseModel):
    """A period that a worker recorded."""

    recording: str
    period: str
    group: str
    worker: str
    started_at: float
    first_at: float | None = Field(description="The time of the first message.")
    last_at: float | None
    messages: int
    tasks: int
    events: int
    size_bytes: int
    live: bool = Field(description="Whether it is being written.")
    bounded: bool = Field(False, description=_BOUNDED)
    kept_until: float | None = Field(
        description="When retention removes it for its age; it is removed earlier if there are too many."
    )
    goes_next: bool = Field(False, description="Whether retention removes it next, among those of its worker.")
    problems: list[str]


class StoredRunView(BaseModel):
    """A worker that has recordings."""

    recording: str
    group: str
    worker: str
    started_at: float = Field(description="The start of the newest period.")
    written_at: float = Field(description="The time of the last write.")
    live: bool = Field(description="Whether it is being written.")
    periods: int
    bounded: bool = Field(False, description=_BOUNDED)


class MessagePageView(BaseModel):
    """A page of messages, newest first."""

    rows: list[RecordedMessageView]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")
    problems: list[str] = Field(description="Parts that could not be read.")
    cursors: list[str] = Field(
        [], description="With each_cursor: for each row, the cursor of a page that begins after it."
    )
    missing: dict[str, str] = Field({}, description="Peers that did not answer, with the reasons.")


class TaskPageView(BaseModel):
    """A page of tasks, latest end first."""

    rows: list[RecordedTaskView]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")
    problems: list[str] = Field(description="Parts that could not be read.")
    cursors: list[str] = Field(
        [], description="With each_cursor: for each row, the cursor of a page that begins after it."
    )
    missing: dict[str, str] = Field({}, description="Peers that did not answer, with the reasons.")


class EventPageView(BaseModel):
    """A page of events, newest first."""

    rows: list[RecordedEventView]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")
    problems: list[str] = Field(description="Parts that could not be read.")


class FailureListView(BaseModel):
    """Groups of failures, most frequent first."""

    groups: list[FailureGroupView]
    more: int = Field(description="How many groups are not shown.")
    problems: list[str] = Field(description="Parts that could not be read.")
    missing: dict[str, str] = Field({}, description="Peers that did not answer, with the reasons.")


class MessageHistory(BaseModel):
    """One processing of a message, from consumption to commit."""

    message: RecordedMessageView
    tasks: list[RecordedTaskView]
    events: list[RecordedEventView]
    committed_at: float | None
    committed_exactly: bool = Field(
        description="Whether this is the time of the commit, not of the first check after it."
    )
    bounded: bool = Field(False, description="Whether this was in a bounded run, which commits nothing.")


class OpenPosition(BaseModel):
    """The current stage of a message that the pipeline has not finished."""

    engine: int | None = Field(
        description="The slot of the engine that processes it; null: no engine owns its partition."
    )
    stage: str = Field(description="The message waits for: " + ", ".join(stage.value for stage in OpenStage))
    text: str = Field(description="The stage in words.")
    seconds: float | None = Field(description="How long it has been in this stage, if known.")
    task_id: str | None
    attempt: int | None = Field(description="The number of the running or last failed attempt.")
    attempts: int | None = Field(description="The maximum number of attempts.")
    pid: int | None = Field(description="The process id of the task.")
    next_seconds: float | None = Field(description="Seconds until the next attempt.")
    behind: int | None = Field(description="The offset of the message that must finish first.")
    hook: str | None
    sink: str | None


class MessageStory(BaseModel):
    """The history of a message, for each time that it was processed."""

    stories: list[MessageHistory]
    tasks: list[RecordedTaskView] = Field(description="Tasks that belong to none of the stories.")
    events: list[RecordedEventView] = Field(description="Events that belong to none of the stories.")
    kept_from: float | None = Field(description="The time of the oldest recorded message.")
    kept_to: float | None
    now: OpenPosition | None = Field(
        default=None, description="The current stage, if this pipeline has not finished the message."
    )
    problems: list[str] = Field(description="Parts that could not be read.")
