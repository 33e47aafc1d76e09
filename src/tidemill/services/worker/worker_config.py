"""What a worker is told by its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidemill.core.tasks.worker_slots import Limits

_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is told.

    Attributes:
        folder: The folder of DAGs.
        limits: Of processes and attempts.
        queues: The queues that it serves.
        max_log_bytes: How much of the log of a try is kept.
        log_level: The lowest level of `logging` in tasks that is kept.
    """

    folder: Path
    limits: Limits = _LIMITS
    queues: tuple[str, ...] = ("default",)
    max_log_bytes: int = 10 * 1024 * 1024
    log_level: str = "INFO"
