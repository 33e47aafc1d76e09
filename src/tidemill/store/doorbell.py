"""Wakes services that have work: one bell per channel, rung after the commit, without content.

A woken service looks for work itself. A redundant ring only costs one query, and a lost ring is harmless: services also
poll every two seconds and after each reconnect. They poll, wait, then poll again; a bell that rang during the poll ends
the next wait at once.

Invariants: ringing never fails and never blocks. Each channel of a doorbell has one waiter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from tidemill.core.tasks.inputs import Channel

#: The interval at which services poll for work, whether or not a bell has rung.
SCAN_SECONDS = 2.0


class StoreBell(Protocol):
    """The interface through which a service waits for work."""

    async def wait(self, channel: Channel, timeout_seconds: float) -> bool:
        """Wait until the bell rings or the timeout passes; return whether it rang, now or since the last wait."""
        ...


class Doorbell:
    """The bells of one process."""

    def __init__(self) -> None:
        """Start with all bells rung, because the first poll is due."""
        self._rung = {channel: asyncio.Event() for channel in Channel}
        self._listeners: list[Callable[[Channel], None]] = []
        for event in self._rung.values():
            event.set()

    def ring(self, channels: Iterable[Channel]) -> None:
        """Ring bells in this process and in connected processes; must be called on the loop."""
        for channel in channels:
            self.ring_here(channel)

    def ring_here(self, channel: Channel) -> None:
        """Ring a bell in this process and for the listeners."""
        self._rung[channel].set()
        for listener in self._listeners:
            listener(channel)

    def listen(self, listener: Callable[[Channel], None]) -> None:
        """Call `listener` whenever a bell rings, also if another process has rung it."""
        self._listeners.append(listener)

    def ignore(self, listener: Callable[[Channel], None]) -> None:
        """Stop calling `listener`."""
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
        """Stop relaying bells to other processes."""


class BellBatches:
    """Relays bells, each channel at most once per interval.

    Args:
        send: Called with the channels whose bells have rung.
        pause_seconds: The minimum interval between two calls.
    """

    def __init__(self, send: Callable[[set[Channel]], None], pause_seconds: float = 0.005) -> None:
        self._send = send
        self._pause_seconds = pause_seconds
        self._rung: set[Channel] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, channel: Channel) -> None:
        """Relay a bell: at once, or after the current pause."""
        self._rung.add(channel)
        if self._timer is None:
            self._flush()

    def close(self) -> None:
        """Stop relaying; drop pending bells."""
        if self._timer is not None:
            self._timer.cancel()
        self._rung.clear()

    def _flush(self) -> None:
        self._timer = None
        if self._rung:
            rung, self._rung = self._rung, set()
            self._timer = asyncio.get_running_loop().call_later(self._pause_seconds, self._flush)
            self._send(rung)
