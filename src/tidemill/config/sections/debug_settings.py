"""The section `debug`: the web UI and the flight recorder, which stores recent processing details on disk."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tidemill.config.sections.section import NonEmpty, Section
from tidemill.config.sections.web_settings import (
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
    """The flight recorder, which stores the history of each message on disk for a while, and the web UI."""

    enabled: bool = Field(True, description="Turns the recorder and the web UI on.")
    host: NonEmpty = Field(
        "127.0.0.1",
        description="The address that the web UI listens on. An address that other machines can reach requires users "
        "or tokens.",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8080,
        description="The web UI's port. If the default port is in use, one of the next 20 is taken. If a configured "
        "port is in use, the process does not start, unless the port belongs to a process with the same `db_dir`. 0: "
        "any free port; `tidemill status` shows the address.",
    )
    debug_url: WebUrl = Field(
        "",
        description="The address at which browsers reach the web UI through a proxy; it may have a path. With https, "
        "the login cookie is sent only over https.",
    )
    allowed_hosts: list[NonEmpty] = Field(
        default_factory=list,
        description="Host names under which the web UI may be opened, in addition to loopback, `host` and the host of "
        "`debug_url`.",
    )
    users: dict[NonEmpty, UserSettings] = Field(
        default_factory=dict,
        description="The users who may log in, by name. Without users and tokens, the log shows an address that "
        "contains a key.",
    )
    tokens: dict[NonEmpty, TokenSettings] = Field(
        default_factory=dict, description="The programs that may send `Authorization: Bearer TOKEN`, by name."
    )
    peers: Annotated[list[PeerSettings], Field(max_length=16)] = Field(
        default_factory=list,
        description="Web UIs of other hosts, each as `{url, token}`; their recordings are shown here, too.",
    )
    max_ui_rows: PositiveInt = Field(5000, description="The maximum number of rows in one answer of the web UI.")
    custom_links: list[LinkSettings] = Field(default_factory=list, description="Additional links in the web UI.")
    prometheus_url: WebUrl = Field(
        "", description="The Prometheus server that collects the metrics; the web UI links to ready-made queries there."
    )
    prometheus_rate_interval: PrometheusInterval = Field("5m", description="The range of the rates in these queries.")
    prometheus_worker_label: PrometheusLabel = Field(
        "", description="The Prometheus label that holds the worker's name; '': queries cover all workers."
    )
    prometheus_cluster_label: PrometheusLabel = Field(
        "", description="The Prometheus label that holds `cluster_name`; '': queries do not filter by cluster."
    )
    db_dir: str = Field(
        "~/.local/state/tidemill",
        description="The folder of the recordings; '': keep the last 64 MiB in memory and write no files.",
    )
    store_events: bool = Field(True, description="Whether to record events: failures, retries, rebalances, commits.")
    store_config: bool = Field(True, description="Whether to record the configuration, with secrets masked.")
    store_state: bool = Field(True, description="Whether to record the state of engines, and counts per second.")
    state_sync_interval_seconds: PositiveFloat = Field(10.0, description="The interval at which the state is written.")
    rotation_interval_minutes: PositiveFloat = Field(
        60.0, description="How long one database is written to before a new one begins."
    )
    retention_hours: PositiveFloat = Field(24.0, description="The age at which recordings are removed.")
    retention_max_events: NonNegativeInt = Field(
        100_000, description="The maximum number of events; beyond it, the oldest are removed. 0: no limit."
    )
    retention_max_bytes: NonNegativeInt = Field(
        2 * 1024**3,
        description="The maximum disk space for the recordings of one worker; 0: no limit. The oldest segments, of "
        "about 1 MB each, are removed first; with a smaller limit, only the segment that is being written is kept.",
    )
    max_buffer: PositiveInt = Field(
        50_000,
        description="The number of events that an engine buffers while its driver does not take them; beyond it, the "
        "oldest are lost.",
    )
    max_buffer_bytes: PositiveInt = Field(
        32 * 1024**2,
        description="The number of bytes that an engine buffers while its driver does not take them; beyond it, the "
        "oldest rows are lost.",
    )
    event_min_duration_ms: NonNegativeFloat = Field(
        0.0, description="Successful tasks that took less time are not recorded individually."
    )
    store_output: bool = Field(
        True,
        description="Whether to record the output of tasks: up to 64 KiB per stream, from its beginning and its end.",
    )
    output_min_duration_ms: NonNegativeFloat = Field(
        500.0,
        description="The output of successful tasks that took less time is not recorded. The output of failed tasks "
        "is, for up to 100 tasks a second.",
    )
    store_stdin: bool = Field(
        False,
        description="Whether to record the input of tasks as well, up to 64 KiB with secrets masked, whenever their "
        "output is recorded.",
    )
    log_min_duration_ms: NonNegativeFloat = Field(
        500.0, description="Tasks that take longer are logged: one a minute per engine, with the number left out."
    )
    ws_min_duration_ms: NonNegativeFloat = Field(
        500.0,
        description="The live page shows every task that takes longer or fails. Of the others it shows a few per "
        "second and executor, each with the number of tasks it stands for.",
    )
    probe_enabled: bool = Field(
        True, description="Whether users may run a message through the handler of a running engine to see its effect."
    )
    flush_interval_seconds: NonNegativeFloat = Field(
        5.0, description="The interval at which written data is forced to disk (fsync); 0: with every batch."
    )

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        # Anyone who reaches the port could guess keys, and the key in the URL would cross the network unencrypted.
        if self.enabled and not is_loopback(self.host) and not (self.users or self.tokens):
            raise ValueError(
                f"host {self.host} may be reached from other machines, so the web UI needs debug.users or debug.tokens "
                "(tidemill config hash prints their hashes); or set host to 127.0.0.1"
            )
        return self
