"""The sections `store` and `triggerer`: where events are stored, and how streams are shared."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from tidemill.config.sections.section import QueueNames, Section


def _check_printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("a list's name may contain only printable characters")
    return name


ListName = Annotated[str, Field(max_length=200), AfterValidator(_check_printable)]


class StoreSettings(Section):
    """The database of triggers and their events, and of DAGs and their runs."""

    url: str = Field(
        "",
        description="sqlite:///file.db, sqlite:////absolute/file.db or postgresql://user:password@host/name; '' means "
        "tidemill.db next to the trigger list.",
    )
    listen_url: str = Field(
        "",
        description="The URL of the same PostgreSQL server without the pooler, if store.url leads to one in "
        "transaction mode: notifications do not get through such a pooler. '' means store.url.",
    )
    encryption_key: str = Field(
        "",
        description="The Fernet key that encrypts variables, connections and the state of deferred tasks. To change "
        "it, give several keys, separated by commas: the first one encrypts, all of them decrypt. '' means the key "
        "file that `tidemill dev` creates next to the store.",
    )
    retention_events_days: NonNegativeFloat = Field(
        0.0, description="The number of days after which events are removed from the store; 0: never."
    )
    retention_runs_days: NonNegativeFloat = Field(
        90.0,
        description="The number of days after which the scheduler removes finished runs of DAGs, with their tasks, "
        "history, XComs and logs, and DAG versions without runs. 0: never.",
    )
    retention_runs_count: PositiveInt = Field(
        100, description="The number of latest runs of each DAG that are kept, however old they are."
    )
    retention_identities_days: NonNegativeFloat = Field(
        0.0,
        description="The number of days after which identities are removed; events that repeat later are no longer "
        "recognised as duplicates. 0: never.",
    )


class TriggererSettings(Section):
    """The limits of a triggerer: shared streams, blocked event loops, and capacity."""

    shared_stream_subscriber_queue_size: PositiveInt = Field(
        1024, description="The number of events that may wait for one subscriber; beyond that, the subscriber fails."
    )
    shared_stream_ack_timeout: PositiveFloat = Field(
        300.0,
        description="How many seconds a subscriber may take to handle an event, including the storage of the events it "
        "derives.",
    )
    shared_stream_cohort_grace_period: NonNegativeFloat = Field(
        0.0, description="How many seconds a new stream waits for more subscribers before it is polled."
    )
    shared_stream_max_outstanding: PositiveInt = Field(
        1000,
        description="The number of unresolved events at which a stream is no longer polled. Keep it below the queue "
        "size, so that a backlog waits instead of overflowing slow subscribers.",
    )
    max_undelivered_events: PositiveInt = Field(
        1000,
        description="The number of events of a stream that its task has not handled: with more of them, the trigger of "
        "the task waits at its `yield` until half of them are handled.",
    )
    list_name: ListName = Field(
        "",
        description="The name of the trigger list in the store. Hosts with the same name are replicas, one of which "
        "runs the list. '' means the absolute path of the list's file.",
    )
    seat_seconds: PositiveFloat = Field(
        60.0, description="How many seconds a shared stream keeps events for a trigger that is about to be restarted."
    )
    block_threshold_seconds: PositiveFloat = Field(
        0.2, description="A trigger that blocks the event loop for longer is reported in the log, with its stack."
    )
    block_limit_seconds: PositiveFloat = Field(
        120.0,
        description="A trigger that blocks the event loop of a triggerer for this long fails its task; the "
        "triggerer restarts and continues with the other triggers.",
    )
    queues: QueueNames = Field(
        default_factory=lambda: ["default"], description="The queues whose triggers a triggerer runs."
    )
    capacity: Annotated[PositiveInt, Field(le=1_000_000)] = Field(
        10_000,
        description="The number of triggers of deferred tasks that a triggerer runs at once; others wait for a free "
        "slot.",
    )
