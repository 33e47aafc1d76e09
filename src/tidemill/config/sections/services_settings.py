"""The section `services`: the services of DAGs on one or more hosts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidemill.config.sections.section import Section


class ServicesSettings(Section):
    """The services of DAGs on one or more hosts."""

    lease_seconds: Annotated[float, Field(ge=1, le=86_400)] = Field(
        30.0,
        description="How long a service may be silent before others take over its work; the same on all hosts. A "
        "service that loses its database for longer may find its work done by others.",
    )
