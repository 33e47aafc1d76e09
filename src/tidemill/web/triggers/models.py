"""What the REST API says about a trigger host; the pages show the same. They are made from `services` facts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Facts(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class Host(_Facts):
    """The trigger host."""

    state: str = Field(description="starting, standing by or running")
    problems: list[str] = Field(description="Why it is not ready.")
    store: str = Field(description="open, full (events wait) or down; empty: not known yet.")
    triggers: dict[str, int] = Field(description="How many triggers are in each state.")
    streams: int
    subscribers: int = Field(description="Triggers that take part in shared streams.")
    outstanding: int = Field(description="Events that are not advanced.")
    advanced: int = Field(description="Events that producers were told about.")
    redelivered: int = Field(description="Events that were delivered once more.")
    dead_lettered: int = Field(description="Events with a confirmed dead letter.")
    holder: str = Field(description="The process that runs the list, if another one does.")
    at: float


class Trigger(_Facts):
    """A trigger of the list."""

    name: str
    classpath: str
    restart: str = Field(description="always, on-failure or never")
    state: str = Field(description="running, restarting, finished, failed, cancelled or elsewhere (another host's)")
    since: float = Field(description="Since when it has been in this state.")
    runs: int = Field(description="How often it was started by this process.")
    events: int = Field(description="How many events it fired in this process.")
    error: str = Field(description="Why it failed last, secrets masked.")
    failed_at: float | None
    next_at: float | None = Field(description="When it runs again; null: it runs, or never will.")


class Lane(_Facts):
    """A lane with events that are not advanced."""

    lane: str = Field(description="Its name; empty if it has none.")
    outstanding: int
    head: int = Field(description="The number of the oldest event, as the stream counts them.")
    age_seconds: float = Field(description="For how long that has waited; not while the store is down.")
    since: float
    holders: list[str] = Field(description="The first triggers that hold it; none: it waits to be advanced.")
    more_holders: int


class Stream(_Facts):
    """A shared stream."""

    id: str = Field(description="Its id while this process runs.")
    name: str = Field(description="Its key, secrets masked.")
    acknowledged: bool = Field(description="Whether the upstream is told what was dealt with.")
    subscribers: int
    failing: int = Field(description="Subscribers that failed and have not left yet.")
    outstanding: int
    full_seconds: float | None = Field(description="For how long it is not read: too much is outstanding.")
    lanes: int = Field(description="Lanes with events that are not advanced.")
    oldest: Lane | None
    advanced: int
    failed: int = Field(description="Events that a subscriber failed.")
    rejected: int = Field(description="Events that a subscriber rejected.")
    forced: int = Field(description="How often a subscriber was too late or too slow.")
    ended: int = Field(description="How often the stream failed.")


class TriggerPage(BaseModel):
    """Triggers by name."""

    rows: list[Trigger]
    cursor: str | None = Field(description="For the next page; null: there is none.")


class StreamPage(BaseModel):
    """Streams by name."""

    rows: list[Stream]
    cursor: str | None = Field(description="For the next page; null: there is none.")


class StreamDetails(BaseModel):
    """A stream with its lanes, those with the oldest events first."""

    stream: Stream
    subscribers: list[str] = Field(description="The first subscribers by name.")
    lanes: list[Lane]
    cursor: str | None = Field(description="For the next lanes; null: there are none.")
