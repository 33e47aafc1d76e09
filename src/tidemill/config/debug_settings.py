"""The section `debug`: the flight recorder, which keeps what happened to each message for a while, and the web UI."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tidemill.config.section import NonEmpty, Section
from tidemill.config.web_settings import (
    LinkSettings,
    PeerSettings,
    PrometheusInterval,
    PrometheusLabel,
    TokenSettings,
    UserSettings,
    WebUrl,
    is_loopback,
)


class DebugSettings(Section):
    """The flight recorder, which keeps what happened to each message on disk for a while, and the web UI."""

    enabled: bool = Field(True, description="Whether anything is recorded, and there is a web UI.")
    host: NonEmpty = Field(
        "127.0.0.1",
        description="The address that the web UI listens on; one that other machines reach needs users or tokens.",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8080,
        description="The web UI's port. If it is in use, the next free one of 20, unless it was set: then the process "
        "does not start, unless another one with the same `db_dir` has it. 0: any free one; `tidemill status` shows "
        "the address.",
    )
    debug_url: WebUrl = Field(
        "",
        description="The address under which browsers reach the web UI through a proxy; may have a path. With https, "
        "the login's cookie is sent over https only.",
    )
    allowed_hosts: list[NonEmpty] = Field(
        default_factory=list,
        description="Host names by which the web UI may be opened, besides loopback, `host` and that of `debug_url`.",
    )
    users: dict[NonEmpty, UserSettings] = Field(
        default_factory=dict,
        description="Who may log in. Without users and tokens, the address that the log shows has a key.",
    )
    tokens: dict[NonEmpty, TokenSettings] = Field(
        default_factory=dict, description="Programs that may send `Authorization: Bearer TOKEN`."
    )
    peers: Annotated[list[PeerSettings], Field(max_length=16)] = Field(
        default_factory=list,
        description="Web UIs of other hosts, `{url, token}` each: what they have recorded is shown here, too.",
    )
    max_ui_rows: PositiveInt = Field(5000, description="The most rows that one answer of the web UI has.")
    custom_links: list[LinkSettings] = Field(default_factory=list, description="Links that the web UI shows.")
    prometheus_url: WebUrl = Field(
        "", description="The Prometheus that collects the metrics; the web UI links to ready queries there."
    )
    prometheus_rate_interval: PrometheusInterval = Field("5m", description="The time of rates in these queries.")
    prometheus_worker_label: PrometheusLabel = Field(
        "", description="The label that has the worker's name in Prometheus; '': queries are about all workers."
    )
    prometheus_cluster_label: PrometheusLabel = Field(
        "", description="The label that has `cluster_name` in Prometheus; '': queries do not ask for it."
    )
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
        2 * 1024**3,
        description="The most that recordings of one worker may take on disk; 0: no limit. The oldest segments, of "
        "about 1 MB each, are removed: with less than that, only the segment that is still being written is kept.",
    )
    max_buffer: PositiveInt = Field(
        50_000, description="How many events an engine keeps for a driver that does not take them; older ones are lost."
    )
    max_buffer_bytes: PositiveInt = Field(
        32 * 1024**2, description="How much an engine keeps for a driver that does not take it; older rows are lost."
    )
    event_min_duration_ms: NonNegativeFloat = Field(
        0.0, description="Tasks that ended well in less time leave no row of their own."
    )
    store_output: bool = Field(
        True, description="Whether what tasks write is kept, up to 64 KiB of each stream: its beginning and its end."
    )
    output_min_duration_ms: NonNegativeFloat = Field(
        500.0, description="Tasks that ended well in less time keep no output; failed ones do, up to 100 a second."
    )
    store_stdin: bool = Field(
        False,
        description="Whether the input of tasks is kept too, up to 64 KiB with secrets masked, of those whose output "
        "would be.",
    )
    log_min_duration_ms: NonNegativeFloat = Field(
        500.0, description="Tasks that take longer are logged: one a minute per engine, with how many were left out."
    )
    ws_min_duration_ms: NonNegativeFloat = Field(
        500.0,
        description="The live page shows each task that takes longer or fails; of the others one per executor, a few "
        "times a second, with how many it stands for.",
    )
    probe_enabled: bool = Field(
        True, description="Whether a message may be run through the handler of a running engine, to see what it does."
    )
    flush_interval_seconds: NonNegativeFloat = Field(
        5.0, description="How often what was written is forced to the disk (fsync); 0: with every batch."
    )

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        # Whoever reaches the port could try keys; and the key of the address would cross the network in the clear.
        if self.enabled and not is_loopback(self.host) and not (self.users or self.tokens):
            raise ValueError(
                f"host {self.host} may be reached from other machines, so the web UI needs debug.users or debug.tokens "
                "(tidemill config hash prints their hashes); or set host to 127.0.0.1"
            )
        return self
