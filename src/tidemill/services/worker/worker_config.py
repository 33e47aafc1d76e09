"""What a worker is told by its settings."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tidemill.core.tasks.worker_slots import WorkerLimits

_LIMITS = WorkerLimits()


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is told.

    Attributes:
        folder: The folder of DAGs.
        limits: Of processes and attempts.
        queues: The queues that it serves.
        max_log_bytes: How much of the log of a try is kept.
        log_level: The lowest level of `logging` in tasks that is kept.
        reuse_processes: The DAGs whose tasks share processes, as patterns.
        reparse_seconds: How long what was imported is used, at least.
    """

    folder: Path
    limits: WorkerLimits = _LIMITS
    queues: tuple[str, ...] = ("default",)
    max_log_bytes: int = 10 * 1024 * 1024
    log_level: str = "INFO"
    reuse_processes: tuple[str, ...] = ()
    reparse_seconds: float = 60.0

    def reuses(self, dag_id: str) -> bool:
        """Tell whether tasks of a DAG share processes."""
        return any(fnmatchcase(dag_id, pattern) for pattern in self.reuse_processes)
