"""The section `dags`: the folder of DAG files, and how they are read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from tidemill.config.section import NonEmpty, Section


class DagsSettings(Section):
    """The folder of DAG files, and how often they are read."""

    folder: NonEmpty = Field(
        "dags", description="The folder with DAG files, relative to the folder in which the command is started."
    )
    parse_timeout_seconds: PositiveFloat = Field(
        30.0,
        description="How long reading a DAG file may take. After that its process is killed, and the file is reported "
        "as an error. An attempt of a task fails if importing its file takes twice as long.",
    )
    reparse_seconds: PositiveFloat = Field(
        60.0,
        description="The interval at which an unchanged DAG file is read again, since its external inputs may have "
        "changed. Reading takes at most a tenth of a core; if that is not enough, the interval grows. Workers import "
        "files again at the same interval.",
    )
    parser: Literal["scheduler", "separate"] = Field(
        "scheduler",
        description="scheduler: each `tidemill scheduler` also reads the DAG files; separate: only `tidemill parser` "
        "does.",
    )
    paused_at_creation: bool = Field(
        False, description="Whether new DAGs start paused: a paused DAG does not run by schedule until it is unpaused."
    )
