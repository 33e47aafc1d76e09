"""Explains which services that a run needs are not alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Services send a heartbeat every 5 s; a service that has been silent for this long counts as dead.
SILENT_US = 30_000_000
_START = "start `tidemill dev`"


@dataclass(frozen=True, slots=True)
class SeenService:
    """A service that has not ended.

    Attributes:
        kind: `scheduler`, `worker` or `triggerer`.
        queues: The queues that a worker takes tasks from.
        quiet_us: The time since its last heartbeat.
    """

    kind: str
    queues: tuple[str, ...]
    quiet_us: int


@dataclass(frozen=True, slots=True)
class AliveServices:
    """The services that are alive."""

    services: tuple[SeenService, ...]

    def explain_missing(self, kind: str, queue: str | None = None) -> str:
        """Return why no service of a kind does its work, and what to do about it; empty if one does.

        Args:
            kind: The kind of service.
            queue: The queue of a task that waits for a worker; None: any.
        """
        alive = [service for service in self.services if service.kind == kind]
        if not alive:
            return f"no {kind} is alive; {_START}"
        if queue is None or any(queue in service.queues for service in alive):
            return ""
        return f"no live worker takes tasks from queue {queue!r}; add it to worker.queues"

    def explain_all(self) -> str:
        """Return which services that every run needs are not alive, and what to do about it; empty if all are."""
        missing = [kind for kind in ("scheduler", "worker") if self.explain_missing(kind)]
        return f"{' and '.join(f'no {kind}' for kind in missing)} is alive; {_START}" if missing else ""


def find_alive(services: Sequence[SeenService]) -> AliveServices:
    """Return the services that were heard from recently."""
    return AliveServices(tuple(service for service in services if service.quiet_us < SILENT_US))
