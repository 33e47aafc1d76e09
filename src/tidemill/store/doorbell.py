"""Wakes services that have work: a bell per channel, rung after the commit, and without content.

Who is woken looks for work itself. So a bell that is rung twice, or for nothing, costs a look, and one that is lost is
made up for: services look every two seconds, and whenever their connection to the store is new. They look, then wait,
then look again: a bell that rang during the look ends the next wait at once.

Invariants: ringing never fails and never waits; each channel has one waiter per doorbell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from tidemill.core.tasks.inputs import Channel

#: Services look for work this often, whether a bell has rung or not.
SCAN_SECONDS = 2.0


class Bell(Protocol):
    """Says that there may be something to do, and not what: all that a service needs of a doorbell."""

    async def wait(self, channel: Channel, timeout_seconds: float) -> bool:
        """Wait until it rings, or has rung since the last wait, or the time is over; return whether it rang."""
        ...


class Doorbell:
    """The bells of a process."""

    def __init__(self) -> None:
        """Start with all bells rung: the first look is due."""
        self._rung = {channel: asyncio.Event() for channel in Channel}
        self._listeners: list[Callable[[Channel], None]] = []
        for event in self._rung.values():
            event.set()

    def ring(self, channels: Iterable[Channel]) -> None:
        """Ring bells, in this process and in those that are connected to it; call it on the loop."""
        for channel in channels:
            self.ring_here(channel)
            for listener in self._listeners:
                listener(channel)

    def ring_here(self, channel: Channel) -> None:
        """Ring a bell in this process alone."""
        self._rung[channel].set()

    def listen(self, listener: Callable[[Channel], None]) -> None:
        """Call a function whenever a bell rings."""
        self._listeners.append(listener)

    def ignore(self, listener: Callable[[Channel], None]) -> None:
        """Stop calling a function."""
        self._listeners.remove(listener)

    async def wait(self, channel: Channel, timeout_seconds: float = SCAN_SECONDS) -> bool:
        """Wait for a bell; return False if it did not ring in time."""
        event = self._rung[channel]
        try:
            async with asyncio.timeout(timeout_seconds):
                await event.wait()
        except TimeoutError:
            return False
        event.clear()
        return True

    async def close(self) -> None:
        """Stop whatever carries bells to other processes."""


class BellBatches:
    """Passes bells on, each channel at most once in a while.

    Args:
        send: Called with the channels whose bells have rung.
        pause_seconds: The shortest time between two calls.
    """

    def __init__(self, send: Callable[[set[Channel]], None], pause_seconds: float = 0.005) -> None:
        """Start with no bell rung."""
        self._send = send
        self._pause_seconds = pause_seconds
        self._rung: set[Channel] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, channel: Channel) -> None:
        """Pass a bell on, now or soon."""
        self._rung.add(channel)
        if self._timer is None:
            self._flush()

    def close(self) -> None:
        """Pass nothing on any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._rung.clear()

    def _flush(self) -> None:
        self._timer = None
        if self._rung:
            rung, self._rung = self._rung, set()
            self._timer = asyncio.get_running_loop().call_later(self._pause_seconds, self._flush)
            self._send(rung)
