"""Limits the connections of browsers and programs: their number, and how long one may stay silent.

Invariants: there are at most 64 connections. A further client replaces the one that has been without a complete request
for longest; if all 64 are being answered, the new client is disconnected. A client that connects or starts a request
but does not send all of it, body included, within 10 s is disconnected too. So idle connections cannot lock others out.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 64
REQUEST_SECONDS = 10.0


class LimitedProtocol(H11Protocol):
    """One connection; uvicorn creates it with its own arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waits_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the client must send more: there is no request yet, or its body is incomplete."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a client if there is room, or if another connection can be closed for it."""
        waiting = [other for other in self.connections if isinstance(other, LimitedProtocol) and other.is_waiting]
        is_full = len(self.connections) >= MAX_CONNECTIONS
        super().connection_made(transport)
        self._wait_for_request()
        if is_full:
            # Aborted connections stay in the set until the next iteration of the loop.
            open_ones = [other for other in waiting if not other.transport.is_closing()]
            oldest = min(open_ones, key=lambda other: other._waits_since, default=self)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_waiting:
            self._end_wait()
        elif self._timer is None:
            self._wait_for_request()

    def end_waiting(self) -> None:
        """Disconnect the client if its request is incomplete; a shutdown does not wait for the rest."""
        if self.is_waiting:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        self._waits_since = self.loop.time()
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._end_waiting)

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_waiting(self) -> None:
        self._timer = None
        self.end_waiting()
