"""The sections about workers of DAGs, which run the attempts of tasks, and about the logs of these."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from tidemill.config.section import NonEmpty, Section


class WorkerSettings(Section):
    """How a worker runs the tasks of DAGs."""

    concurrency: PositiveInt = Field(8, description="How many tasks run at once.")
    queues: Annotated[list[NonEmpty], Field(min_length=1)] = Field(
        default_factory=lambda: ["default"], description="The queues whose tasks it runs."
    )
    preload: list[NonEmpty] = Field(
        default_factory=list,
        description="Modules that are imported once, before task processes are forked: those that take long to import. "
        "They may not start threads, nor open connections.",
    )
    reuse_processes: list[NonEmpty] = Field(
        default_factory=list,
        description="The DAGs whose tasks share processes, which is faster: ids, or patterns such as `etl_*`. What a "
        "task leaves in its process, such as a global variable, is there for the next one. Otherwise each attempt has "
        "a process of its own.",
    )
    recycle_after_tasks: PositiveInt = Field(
        100, description="A process that tasks share is replaced after this many, since their code may leak memory."
    )
    term_grace_seconds: NonNegativeFloat = Field(
        5.0, description="How long a task that is ended may take to clean up; then its processes are killed."
    )
    drain_timeout_seconds: NonNegativeFloat = Field(
        60.0, description="How long tasks may run on when the worker is told to stop; then they are queued again."
    )


class LogsSettings(Section):
    """The logs of tasks."""

    max_bytes_per_try: Annotated[int, Field(ge=65_536)] = Field(
        10_485_760,
        description="How much of the log of one try is kept: half of it from the beginning, and half from the end. A "
        "try that is deferred has several attempts; each has what the ones before it have left, and at least 16 KiB.",
    )
