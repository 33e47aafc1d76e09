"""Models of the REST API for a trigger host, built from facts of `services`; the pages show the same."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Facts(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class TriggerHostView(_Facts):
    state: str = Field(description="starting, standing by or running.")
    problems: list[str] = Field(description="Reasons why the host is not ready.")
    store: str = Field(description="open, full (events wait) or down; '': not known yet.")
    triggers: dict[str, int] = Field(description="The number of triggers, by state.")
    streams: int
    subscribers: int = Field(description="Triggers that subscribe to shared streams.")
    outstanding: int = Field(description="Events not yet acknowledged to their producers.")
    advanced: int = Field(description="Events acknowledged to their producers.")
    redelivered: int = Field(description="Events that were redelivered.")
    dead_lettered: int = Field(description="Events with a confirmed dead letter.")
    holder: str = Field(description="The process that runs the list, if it is another one.")
    at: float


class ListTriggerView(_Facts):
    """A trigger of the list."""

    name: str
    classpath: str
    restart: str = Field(description="always, on-failure or never.")
    state: str = Field(description="running, restarting, finished, failed, cancelled or elsewhere (on another host).")
    since: float = Field(description="When the trigger entered its state.")
    runs: int = Field(description="How many times this process has started it.")
    events: int = Field(description="How many events it has fired in this process.")
    error: str = Field(description="The last error, with secrets masked.")
    failed_at: float | None
    next_at: float | None = Field(description="The next start; null: it is running, or will not run again.")


class Lane(_Facts):
    """A lane with outstanding events."""

    lane: str = Field(description="The name of the lane; may be ''.")
    outstanding: int
    head: int = Field(description="The oldest event's number in the stream.")
    age_seconds: float = Field(
        description="How long the oldest event has waited; the time pauses while the store is down."
    )
    since: float
    holders: list[str] = Field(description="The first triggers that hold it; empty: it waits to be acknowledged.")
    more_holders: int


class StreamView(_Facts):
    """A shared stream."""

    id: str = Field(description="The id of the stream, valid while this process runs.")
    name: str = Field(description="The key of the stream, with secrets masked.")
    acknowledged: bool = Field(description="Whether resolved events are acknowledged upstream.")
    subscribers: int
    failing: int = Field(description="Subscribers that have failed but are still subscribed.")
    outstanding: int
    full_seconds: float | None = Field(
        description="How long reading has been paused because too many events are outstanding."
    )
    lanes: int = Field(description="Lanes with outstanding events.")
    oldest: Lane | None
    advanced: int
    failed: int = Field(description="Events that a subscriber failed.")
    rejected: int = Field(description="Events that a subscriber rejected.")
    forced: int = Field(description="How often a subscriber was dropped for being too late or too slow.")
    ended: int = Field(description="How often the stream has failed.")


class TriggerPage(BaseModel):
    """A page of triggers, by name."""

    rows: list[ListTriggerView]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")


class StreamPage(BaseModel):
    """A page of streams, by name."""

    rows: list[StreamView]
    cursor: str | None = Field(description="The cursor of the next page; null: there is none.")


class StreamDetails(BaseModel):
    """A stream with its lanes; lanes with the oldest events come first."""

    stream: StreamView
    subscribers: list[str] = Field(description="The first subscribers by name.")
    lanes: list[Lane]
    cursor: str | None = Field(description="The cursor of the next lanes; null: there are none.")
