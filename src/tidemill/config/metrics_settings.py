"""The section `metrics`: the HTTP endpoint of metrics and health that a driver or a trigger host has."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidemill.config.section import NonEmpty, Section


class MetricsSettings(Section):
    """The HTTP endpoint for Prometheus and for health probes; it needs no login."""

    enabled: bool = Field(True, description="Whether there is one.")
    host: NonEmpty = Field(
        "127.0.0.1", description="The address to listen on; 0.0.0.0 or :: for all of this machine, as probes need it."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        9090,
        description="The port. If it is in use, the next free one of 20, unless it was set: then the process does not "
        "start, unless another one with the same `debug.db_dir` has it. 0: any free one; `tidemill status` shows it.",
    )
