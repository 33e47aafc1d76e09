"""The sections that only trigger hosts read: where events are stored, and how streams are shared."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from tidemill.config.section import Section


def _check_printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("a list's name may contain only printable characters")
    return name


ListName = Annotated[str, Field(max_length=200), AfterValidator(_check_printable)]


class StoreSettings(Section):
    """The database of triggers and their events, and of DAGs and their runs."""

    url: str = Field(
        "",
        description="sqlite:///file.db, sqlite:////absolute/file.db or postgresql://user:password@host/name; "
        "'' means tidemill.db next to the trigger list.",
    )
    encryption_key: str = Field(
        "",
        description="The Fernet key that encrypts variables, connections and what deferred tasks keep. To change it, "
        "give several, separated by commas: the first one encrypts, all of them decrypt. '' means the key file that "
        "`tidemill dev` creates next to the store.",
    )
    retention_events_days: NonNegativeFloat = Field(
        0.0, description="Events are removed from the store after this many days; 0 keeps them."
    )
    retention_runs_days: NonNegativeFloat = Field(
        90.0,
        description="`tidemill dev` removes runs of DAGs this many days after their end, with their tasks, history, "
        "XComs and logs, and versions of DAGs that no run has any more. 0 keeps them.",
    )
    retention_runs_count: PositiveInt = Field(
        100, description="The last runs of each DAG stay, however old they are: this many."
    )
    retention_identities_days: NonNegativeFloat = Field(
        0.0,
        description="Identities are removed after this many days; events that repeat later are not recognised. 0 keeps "
        "them.",
    )


class TriggererSettings(Section):
    """How a trigger host shares streams, and what it warns about."""

    shared_stream_subscriber_queue_size: PositiveInt = Field(
        1024, description="Events that may wait for one subscriber; beyond that, this subscriber fails."
    )
    shared_stream_ack_timeout: PositiveFloat = Field(
        300.0, description="Seconds a subscriber may take to handle an event, until what it derived is stored."
    )
    shared_stream_cohort_grace_period: NonNegativeFloat = Field(
        0.0, description="Seconds a new stream waits for more subscribers before it is polled."
    )
    shared_stream_max_outstanding: PositiveInt = Field(
        1000,
        description="Unresolved events of a stream beyond which it is not polled; below the queue size, so that a "
        "backlog waits instead of overflowing slow subscribers.",
    )
    list_name: ListName = Field(
        "",
        description="The name of the trigger list in the store; hosts with the same name are replicas, one of which "
        "runs the list. '' means the absolute path of its file.",
    )
    seat_seconds: PositiveFloat = Field(
        60.0, description="Seconds a shared stream keeps events for a trigger that is about to be restarted."
    )
    block_threshold_seconds: PositiveFloat = Field(
        0.2, description="A trigger that blocks the event loop for longer is named, with its stack."
    )
    block_limit_seconds: PositiveFloat = Field(
        120.0,
        description="One that blocks the event loop of `tidemill dev` for this long fails its task; the triggerer is "
        "started again, and runs the others.",
    )
    capacity: PositiveInt = Field(
        10_000, description="Triggers of deferred tasks that a triggerer runs at once; the others wait for a place."
    )
