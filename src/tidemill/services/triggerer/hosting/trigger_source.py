"""The source of a host's triggers, which also takes the reports about them: a list, or the deferred tasks."""

from __future__ import annotations

from typing import Protocol

from tidemill.store.group_commit import EventWriter


class TriggerSource(Protocol):
    """The source of a host's triggers."""

    @property
    def name(self) -> str:
        """The name under which their streams store their offsets upstream."""

    @property
    def linger_seconds(self) -> float:
        """The time that an event may wait for others before it is stored."""

    @property
    def writer(self) -> EventWriter:
        """The writer that stores their events."""

    async def wait_confirmed(self) -> None:
        """Wait until it is certain that no other process may run these triggers; only then open an upstream."""

    async def wait_leased(self) -> bool:
        """Wait until this process may acknowledge events, because the store has confirmed it within its lease.

        False: other processes run the triggers.
        """

    async def close(self, timeout_seconds: float) -> None:
        """Store the reports that are still pending, within this time."""
