"""Where the triggers of a host come from, and where it reports to: a list, or the tasks that have deferred."""

from __future__ import annotations

from typing import Protocol

from tidemill.store.group_commit import EventWriter


class TriggerSource(Protocol):
    """The source of a host's triggers."""

    @property
    def name(self) -> str:
        """The name under which their streams keep their place upstream."""

    @property
    def linger_seconds(self) -> float:
        """How long an event may wait for others before it is stored."""

    @property
    def writer(self) -> EventWriter:
        """What stores their events."""

    async def wait_confirmed(self) -> None:
        """Wait until it is known that no other process may run these triggers; then an upstream may be opened."""

    async def close(self, timeout_seconds: float) -> None:
        """Store what has been reported of triggers, within this time at most."""
