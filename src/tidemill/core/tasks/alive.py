"""Which services that a run needs are not alive, as people are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: A service beats every 5 s; one that was not heard of for this long does nothing.
SILENT_US = 30_000_000
_START = "start `tidemill dev`"


@dataclass(frozen=True, slots=True)
class SeenService:
    """A service that has not ended.

    Attributes:
        kind: `scheduler`, `worker` or `triggerer`.
        queues: The queues that a worker takes tasks from.
        quiet_us: How long ago it was last heard of.
    """

    kind: str
    queues: tuple[str, ...]
    quiet_us: int


@dataclass(frozen=True, slots=True)
class AliveServices:
    """The services that are alive."""

    services: tuple[SeenService, ...]

    def explain_missing(self, kind: str, queue: str | None = None) -> str:
        """Return why nobody does the work of a kind of services, and what to do; empty: one does it.

        Args:
            kind: The kind.
            queue: The queue of a task that waits for a worker; None: any.
        """
        alive = [service for service in self.services if service.kind == kind]
        if not alive:
            return f"no {kind} is alive; {_START}"
        if queue is None or any(queue in service.queues for service in alive):
            return ""
        return f"no worker that is alive takes tasks of queue {queue!r} (worker.queues)"

    def explain_all(self) -> str:
        """Return which of the services that every run needs are not alive, and what to do; empty: all are."""
        missing = [kind for kind in ("scheduler", "worker") if self.explain_missing(kind)]
        return f"{' and '.join(f'no {kind}' for kind in missing)} is alive; {_START}" if missing else ""


def find_alive(services: Sequence[SeenService]) -> AliveServices:
    """Return those of some services that were heard of lately."""
    return AliveServices(tuple(service for service in services if service.quiet_us < SILENT_US))
