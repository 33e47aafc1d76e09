"""The section `dags`: the folder of DAG files, and how they are read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from tidemill.config.sections.section import NonEmpty, Section


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
    missing_file_seconds: PositiveFloat = Field(
        60.0,
        description="How long a queued task waits if no live worker of its queue has the file of its DAG; then its try "
        "fails. A worker that lacks a file takes no task of it until the file is in its folder.",
    )
    max_outstanding: int = Field(
        128,
        ge=1,
        le=10_000,
        description="The number of elements of a mapped task that may be unfinished at a time, deferred ones included, "
        "unless the task sets `max_outstanding` itself. A map keeps the value with which it opened.",
    )
    max_map_length: int = Field(
        1_000_000,
        ge=1,
        description="The number of elements that a mapped task may have. If its sources have more items, the task "
        "fails. A map keeps the value with which it opened.",
    )
    max_backlog: int = Field(
        10_000,
        ge=1,
        description="The number of values that a generator task may yield ahead of the elements that are created from "
        "them, or 64 MiB of values. Then it waits at its `yield`, without a slot of its pool, outside the limits on "
        "active tasks and `worker.concurrency`, until less than half is left. A map keeps the value with which it "
        "opened.",
    )
