"""The section `metrics`: the HTTP endpoint for metrics and health of a driver or a trigger host."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidemill.config.sections.section import NonEmpty, Section


class MetricsSettings(Section):
    """The HTTP endpoint for Prometheus and for health probes; it needs no login."""

    enabled: bool = Field(True, description="Turns the endpoint on.")
    host: NonEmpty = Field(
        "127.0.0.1",
        description="The address to listen on. Probes from other machines need 0.0.0.0 or ::, which means all "
        "addresses of this machine.",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        9090,
        description="The port. If the default port is in use, one of the next 20 is taken. If a configured port is in "
        "use, the process does not start, unless the port belongs to a process with the same `debug.db_dir`. 0: any "
        "free port; `tidemill status` shows it.",
    )
