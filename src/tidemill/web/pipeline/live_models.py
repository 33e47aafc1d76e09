"""Models of the REST API for executors; the live page shows the same. Times are seconds since the epoch."""

from __future__ import annotations

from pydantic import BaseModel, Field


class LiveTaskView(BaseModel):
    """An attempt of a task."""

    id: int = Field(description="A rising number of ended attempts; 0 for others.")
    engine: int
    executor: int = Field(description="The number of the executor in its engine; -1: none.")
    task_id: str
    label: str
    attempt: int
    topic: str
    partition: int
    offset: int = Field(
        description="The offset of the task's first message; -1: the task belongs to no single message."
    )
    at: float = Field(description="When the attempt started, is due, or was queued.")
    seconds: float = Field(description="How long the attempt took; 0: it has not ended.")
    outcome: str = Field(description="ok, or the kind of the error; '': the attempt has not ended.")
    of: int = Field(description="How many tasks this sample represents.")


class LiveWindowView(BaseModel):
    """A window with unfinished tasks."""

    engine: int
    topic: str
    partition: int
    number: int = Field(description="The number of the window in its engine.")
    first: int = Field(description="The offset of the window's first message.")
    messages: int
    tasks: int = Field(description="How many tasks are unfinished.")
    at: float = Field(description="When the window was arranged.")


class LiveEngineView(BaseModel):
    """The task counts of an engine."""

    slot: int
    executors: int
    running: int
    queued: int
    retrying: int


class LivePicture(BaseModel):
    """The state of the executors."""

    number: int = Field(description="The number of the update; a gap means that updates were skipped.")
    at: float
    engines: list[LiveEngineView]
    running: list[LiveTaskView]
    ended: list[LiveTaskView] = Field(
        description="Attempts that ended since the previous update, or in the last minute; fast ones are sampled."
    )
    left_out: int = Field(description="How many ended attempts are neither shown nor sampled.")
    waiting: list[LiveTaskView] = Field(description="The tasks that start next.")
    backing_off: list[LiveTaskView] = Field(description="The tasks in backoff whose next attempt is due first.")
    windows: list[LiveWindowView]
