"""What the REST API says about what executors do; the live page shows the same. Times are seconds since the epoch."""

from __future__ import annotations

from pydantic import BaseModel, Field


class LiveTask(BaseModel):
    """An attempt of a task."""

    id: int = Field(description="Of one that has ended: rises with each; 0 for others.")
    engine: int
    executor: int = Field(description="Its place in the engine; -1: it has none.")
    task_id: str
    label: str
    attempt: int
    topic: str
    partition: int
    offset: int = Field(description="Of its first message; -1: it works for no single one.")
    at: float = Field(description="When it started, is due, or was queued.")
    seconds: float = Field(description="How long it ran; 0: it has not ended.")
    outcome: str = Field(description="ok, or the kind of its error; '': it has not ended.")
    of: int = Field(description="How many tasks it stands for.")


class LiveWindow(BaseModel):
    """A window with tasks that are not over."""

    engine: int
    topic: str
    partition: int
    number: int = Field(description="Its number in the engine.")
    first: int = Field(description="The offset of its first message.")
    messages: int
    tasks: int = Field(description="How many are not over.")
    at: float = Field(description="When it was arranged.")


class LiveEngine(BaseModel):
    """How many tasks of an engine are where."""

    slot: int
    executors: int
    running: int
    queued: int
    retrying: int


class LivePicture(BaseModel):
    """What executors do."""

    number: int = Field(description="Rises with every update; one that is missing was skipped.")
    at: float
    engines: list[LiveEngine]
    running: list[LiveTask]
    ended: list[LiveTask] = Field(
        description="Since the update before, or over the last minute; fast ones are sampled."
    )
    left_out: int = Field(description="How many that ended since the page was opened are neither shown nor sampled.")
    waiting: list[LiveTask] = Field(description="Those that start next.")
    backing_off: list[LiveTask] = Field(description="Those whose next attempt is due first.")
    windows: list[LiveWindow]
