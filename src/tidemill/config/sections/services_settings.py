"""The section `services`: the services of DAGs on one or more hosts."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from tidemill.config.sections.section import Section


class ServicesSettings(Section):
    """The services of DAGs on one or more hosts."""

    lease_seconds: PositiveFloat = Field(
        30.0,
        description="How long a service may be silent before others take over its work; the same on all hosts. A "
        "service that loses its database for longer may find its work done by others.",
    )
