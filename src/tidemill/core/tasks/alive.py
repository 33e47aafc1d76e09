"""Explains which services that a run needs are not alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.core.wording import format_count

#: Services send a heartbeat every 5 s; a service that has been silent for this long counts as dead.
SILENT_US = 30_000_000
_START = "start `tidemill dev`"
#: What the services take from queues.
_WORK = {"worker": "tasks", "triggerer": "triggers"}


@dataclass(frozen=True, slots=True)
class SeenService:
    """A service that has not ended.

    Attributes:
        kind: `scheduler`, `worker` or `triggerer`.
        queues: The queues that a worker or triggerer takes work from; empty for a triggerer that takes all.
        quiet_us: The time since its last heartbeat.
        session: Its session.
        held: The number of attempts or triggers that it runs.
        capacity: The number of attempts or triggers that it runs at once.
    """

    kind: str
    queues: tuple[str, ...]
    quiet_us: int
    session: int = 0
    held: int = 0
    capacity: int = 0

    def takes(self, queue: str | None) -> bool:
        """Return whether it takes work from a queue; None: work that names no queue."""
        return queue in self.queues or (self.kind == "triggerer" and not self.queues)


@dataclass(frozen=True, slots=True)
class AliveServices:
    """The services that are alive."""

    services: tuple[SeenService, ...]

    def explain_missing(self, kind: str, queue: str | None = None, *, any_queue: bool = False) -> str:
        """Return why no service of a kind does its work, and what to do about it; empty if one does.

        Args:
            kind: The kind of service.
            queue: The queue of a task that waits for a worker, or of a trigger; None: it names none.
            any_queue: Whether the queue does not matter.
        """
        alive = [service for service in self.services if service.kind == kind]
        if not alive:
            return f"no {kind} is alive; {_START}"
        if any_queue or kind not in _WORK or any(service.takes(queue) for service in alive):
            return ""
        if queue is None:
            return f"no live {kind} takes {_WORK[kind]} without a queue; start one without {kind}.queues"
        return f"no live {kind} takes {_WORK[kind]} from queue {queue!r}; add it to {kind}.queues"

    def explain_full(self, kind: str, queue: str | None) -> str:
        """Return how full the services of a queue are if none has room; empty if one has."""
        serving = [one for one in self.services if one.kind == kind and one.takes(queue)]
        if not serving or any(one.held < one.capacity or not one.capacity for one in serving):
            return ""
        places = format_count(sum(one.capacity for one in serving), "place")
        return f"{format_count(len(serving), f'live {kind}')} with {places}, none free"

    def explain_all(self) -> str:
        """Return which services that every run needs are not alive, and what to do about it; empty if all are."""
        missing = [kind for kind in ("scheduler", "worker") if self.explain_missing(kind, any_queue=True)]
        return f"{' and '.join(f'no {kind}' for kind in missing)} is alive; {_START}" if missing else ""


def find_alive(services: Sequence[SeenService]) -> AliveServices:
    """Return the services that were heard from recently."""
    return AliveServices(tuple(service for service in services if service.quiet_us < SILENT_US))
