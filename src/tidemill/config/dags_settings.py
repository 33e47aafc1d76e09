"""The section about DAGs: where their files are, and how they are read."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from tidemill.config.section import NonEmpty, Section


class DagsSettings(Section):
    """Where the files of DAGs are, and how they are read."""

    folder: NonEmpty = Field(
        "dags", description="The folder of DAG files, relative to the folder where the command is started."
    )
    parse_timeout_seconds: PositiveFloat = Field(
        30.0,
        description="How long reading a DAG file may take; then its process is killed, and the file is an error. An "
        "attempt of a task fails if importing its file takes twice as long.",
    )
    reparse_seconds: PositiveFloat = Field(
        60.0,
        description="How often a DAG file is read again though it has not changed: what it reads elsewhere may have. "
        "Reading takes at most a tenth of a core; where that is not enough, it happens less often. Workers import "
        "files again as often.",
    )
    paused_at_creation: bool = Field(
        False, description="Whether a new DAG is paused: then it does not run by itself until it is unpaused."
    )
