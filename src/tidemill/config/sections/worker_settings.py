"""The sections `worker` and `logs`: how a worker runs the tasks of DAGs, and the logs of tasks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from tidemill.config.sections.section import NonEmpty, QueueNames, Section


class WorkerSettings(Section):
    """The tasks that a worker runs: concurrency, queues and processes."""

    concurrency: Annotated[PositiveInt, Field(le=100_000)] = Field(
        8, description="The number of tasks that run at once."
    )
    queues: QueueNames = Field(
        default_factory=lambda: ["default"], description="The queues from which the worker takes tasks."
    )
    preload: list[NonEmpty] = Field(
        default_factory=list,
        description="Modules to import once, before task processes are forked; choose modules that are slow to import. "
        "They must not start threads or open connections.",
    )
    reuse_processes: list[NonEmpty] = Field(
        default_factory=list,
        description="The DAGs whose tasks share processes, which is faster: ids, or patterns such as `etl_*`. State "
        "that a task leaves in its process, such as a global variable, is visible to the next task. Every attempt of "
        "other DAGs has a process of its own.",
    )
    recycle_after_tasks: PositiveInt = Field(
        100,
        description="The number of tasks after which a shared process is replaced, since user code may leak memory.",
    )
    term_grace_seconds: NonNegativeFloat = Field(
        5.0, description="How long a task may take to clean up when it is ended; then its processes are killed."
    )
    drain_timeout_seconds: NonNegativeFloat = Field(
        60.0,
        description="How long running tasks may take to finish when the worker is asked to stop; then they are queued "
        "again.",
    )


class LogsSettings(Section):
    """The logs of tasks."""

    max_bytes_per_try: Annotated[int, Field(ge=65_536)] = Field(
        10_485_760,
        description="The maximum log size of one try: half from its beginning, half from its end. The attempts of a "
        "deferred try share it, but each gets at least 16 KiB.",
    )
