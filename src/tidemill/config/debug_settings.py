"""The section `debug`: the flight recorder, which keeps what happened to each message for a while."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from tidemill.config.section import Section


class DebugSettings(Section):
    """The flight recorder: what happened to each message, kept on disk for a while."""

    enabled: bool = Field(True, description="Whether anything is recorded.")
    db_dir: str = Field(
        "~/.local/state/tidemill",
        description="The folder of the recordings; '' keeps the last 64 MiB in memory and writes no file.",
    )
    store_events: bool = Field(True, description="Whether events are kept: failures, retries, rebalances, commits.")
    store_config: bool = Field(True, description="Whether the configuration is kept, with secrets masked.")
    store_state: bool = Field(True, description="Whether the state of engines is kept, and counts per second.")
    state_sync_interval_seconds: PositiveFloat = Field(10.0, description="How often the state is written.")
    rotation_interval_minutes: PositiveFloat = Field(60.0, description="How long one database is written to.")
    retention_hours: PositiveFloat = Field(24.0, description="Recordings older than this are removed.")
    retention_max_events: NonNegativeInt = Field(
        100_000, description="The most events that are kept; the oldest are removed. 0: no limit."
    )
    retention_max_bytes: NonNegativeInt = Field(
        2 * 1024**3, description="The most that recordings of one worker may take on disk; 0: no limit."
    )
    flush_interval_seconds: NonNegativeFloat = Field(
        5.0, description="How often what was written is forced to the disk (fsync); 0: with every batch."
    )
