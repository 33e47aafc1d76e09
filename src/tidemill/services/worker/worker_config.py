"""The configuration of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tidemill.core.tasks.worker_slots import WorkerLimits
from tidemill.services.sessions.lease import ServiceLease

_LIMITS = WorkerLimits()
_LEASE = ServiceLease()


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The configuration of a worker.

    Attributes:
        folder: The folder of DAGs.
        limits: The limits of processes and attempts.
        queues: The queues whose tasks it runs.
        max_log_bytes: The log size limit of a try.
        log_level: The lowest level of `logging` in tasks that is kept.
        reuse_processes: Patterns of the DAGs whose tasks share processes.
        reparse_seconds: The minimum time for which an import is used.
        lease: The lease of its session.
    """

    folder: Path
    limits: WorkerLimits = _LIMITS
    queues: tuple[str, ...] = ("default",)
    max_log_bytes: int = 10 * 1024 * 1024
    log_level: str = "INFO"
    reuse_processes: tuple[str, ...] = ()
    reparse_seconds: float = 60.0
    lease: ServiceLease = _LEASE

    def reuses(self, dag_id: str) -> bool:
        """Return whether the tasks of a DAG share processes."""
        return any(fnmatchcase(dag_id, pattern) for pattern in self.reuse_processes)
