"""What the REST API says about recordings; the pages show the same. Times are seconds since the epoch."""

from __future__ import annotations

from pydantic import BaseModel, Field

from tidemill.core.pipeline.message_stage import Stage
from tidemill.recorder.format.events import OF_TRIGGERS
from tidemill.recorder.reading.queries import (
    show_status,
)

MILLION = 1_000_000
_BOUNDED = "Whether it is of bounded runs (backfills, DataFrames), which record failures only."


def to_seconds(at_us: int | None) -> float | None:
    """Return microseconds as seconds."""
    return None if at_us is None else at_us / MILLION


def measure(since_us: int | None, until_us: int | None) -> float | None:
    """Return how long something took, in seconds; None: it is not known."""
    return None if since_us is None or until_us is None else (until_us - since_us) / MILLION


def show_bytes(data: bytes | None) -> str | None:
    """Return bytes as text; what is not UTF-8 is escaped."""
    return None if data is None else data.decode("utf-8", "backslashreplace")


class Message(BaseModel):
    """A finished message."""

    host: str = Field("", description="The peer that has it; '' is this host.")
    recording: str = Field(description="The worker that recorded it.")
    engine: int
    topic: str
    partition: int
    offset: int
    key: str | None = Field(description="Its first 256 bytes; those without a visible character as \\xNN.")
    status: str = Field(description="How its tasks ended: done, failed or rejected.")
    dead_lettered: bool = Field(
        False, description="Whether it left a dead letter, although it is done: a sink refused its result, say."
    )
    error: str | None = Field(description="The class of its error.")
    seconds: float | None = Field(description="From consumed to resolved.")
    record_at: float | None
    consumed_at: float | None
    arranged_at: float | None
    tasks_done_at: float | None
    resolved_at: float | None
    committed_at: float | None = Field(description="null if it was not known yet when the row was taken.")
    window: int | None
    tasks: int = Field(description="How many tasks it had, those that were replaced by others included.")
    precomputed: int
    attempts: int
    payloads: int

    @property
    def shown_status(self) -> str:
        """What people read."""
        return show_status(self.status, is_dead_lettered=self.dead_lettered)


class Task(BaseModel):
    """A task that ran, or one of its attempts."""

    host: str = Field("", description="The peer that has it; '' is this host.")
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
    kind: str = Field(description="ok, or the kind of its error")
    attempt: int
    exit_code: int | None
    queued_at: float | None
    started_at: float | None
    ended_at: float | None
    seconds: float | None = Field(description="From its start to its end.")
    waited_seconds: float | None = Field(description="From queued to started.")
    input_bytes: int | None
    output_bytes: int | None
    parent: str | None = Field(description="The task that it replaced.")
    stdout: str | None
    stderr: str | None
    stdin: str | None = Field(default=None, description="What the task was given, if debug.store_stdin is on.")
    error: str | None


class Event(BaseModel):
    """Something that happened."""

    host: str = Field("", description="The peer that has it; '' is this host.")
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
        """Whether its task is a trigger."""
        return self.kind in OF_TRIGGERS


class Failure(BaseModel):
    """Failures with the same error."""

    error_class: str
    count: int = Field(description="How often something failed for good: tries that were repeated do not count.")
    kinds: dict[str, int] = Field(description="How many events, by kind.")
    first_at: float
    last_at: float
    minutes: list[tuple[int, int]] = Field(description="Minutes since the epoch, and how many events in each.")
    hosts: list[str] = Field([], description="The peers on which it happened, too.")
    example: Event | None


class Recording(BaseModel):
    """A period that a worker recorded."""

    recording: str
    period: str
    group: str
    worker: str
    started_at: float
    first_at: float | None = Field(description="The time of its first message.")
    last_at: float | None
    messages: int
    tasks: int
    events: int
    size_bytes: int
    live: bool = Field(description="Whether it is being written.")
    bounded: bool = Field(False, description=_BOUNDED)
    kept_until: float | None = Field(description="When it is removed for its age; earlier if there are too many.")
    goes_next: bool = Field(False, description="Whether it is the next one of its worker that retention removes.")
    problems: list[str]


class Run(BaseModel):
    """A worker that has recordings."""

    recording: str
    group: str
    worker: str
    started_at: float = Field(description="When its newest period was begun.")
    written_at: float = Field(description="When something was last written.")
    live: bool = Field(description="Whether it is being written.")
    periods: int
    bounded: bool = Field(False, description=_BOUNDED)


class MessagePage(BaseModel):
    """A page of messages, the newest first."""

    rows: list[Message]
    cursor: str | None = Field(description="Where the next page begins; null: there is none.")
    problems: list[str] = Field(description="What could not be read.")
    cursors: list[str] = Field([], description="With each_cursor: where a page behind each row would begin.")
    missing: dict[str, str] = Field({}, description="Peers that did not answer, and why.")


class TaskPage(BaseModel):
    """A page of tasks, those that ended last first."""

    rows: list[Task]
    cursor: str | None = Field(description="Where the next page begins; null: there is none.")
    problems: list[str] = Field(description="What could not be read.")
    cursors: list[str] = Field([], description="With each_cursor: where a page behind each row would begin.")
    missing: dict[str, str] = Field({}, description="Peers that did not answer, and why.")


class EventPage(BaseModel):
    """A page of events, the newest first."""

    rows: list[Event]
    cursor: str | None = Field(description="Where the next page begins; null: there is none.")
    problems: list[str] = Field(description="What could not be read.")


class FailureList(BaseModel):
    """Groups of failures, the most frequent first."""

    groups: list[Failure]
    more: int = Field(description="How many groups were left out.")
    problems: list[str] = Field(description="What could not be read.")
    missing: dict[str, str] = Field({}, description="Peers that did not answer, and why.")


class Told(BaseModel):
    """What happened to a message, once."""

    message: Message
    tasks: list[Task]
    events: list[Event]
    committed_at: float | None
    committed_exactly: bool = Field(description="Whether that is the commit itself, and not the first look after it.")
    bounded: bool = Field(False, description="Whether that was in a bounded run, which commits nothing.")


class OpenPlace(BaseModel):
    """Where a message is that the pipeline has not finished."""

    engine: int | None = Field(description="The slot of the engine that has it; null: no engine owns its partition.")
    stage: str = Field(description="What it waits for: " + ", ".join(stage.value for stage in Stage))
    text: str = Field(description="The same in words.")
    seconds: float | None = Field(description="For how long, where it is known.")
    task_id: str | None
    attempt: int | None = Field(description="Which of the task's attempts runs, or failed last.")
    attempts: int | None = Field(description="How many there may be.")
    pid: int | None = Field(description="The task's process.")
    next_seconds: float | None = Field(description="When the next attempt is due.")
    behind: int | None = Field(description="The offset of the message that goes first.")
    hook: str | None
    sink: str | None


class MessageStory(BaseModel):
    """What happened to a message, each time that it was processed."""

    stories: list[Told]
    tasks: list[Task] = Field(description="Tasks that belong to none of them.")
    events: list[Event] = Field(description="Events that belong to none of them.")
    kept_from: float | None = Field(description="The time of the oldest message that is kept.")
    kept_to: float | None
    now: OpenPlace | None = Field(default=None, description="Where it is, if this pipeline has not finished it.")
    problems: list[str] = Field(description="What could not be read.")
