"""Connections of browsers and programs: how many there may be, and how long one may be silent.

Invariants: there are at most 64; a further client takes the place of the one that has had no whole request for longest,
and if all are being answered, it is disconnected. Who connects or begins a request and does not send the rest, body
included, within 10 s is disconnected, too. So open connections alone keep nobody out.
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
        """Begin without a client."""
        super().__init__(*args, **kwargs)
        self._waits_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the client has to send something: there is no request, or its body is not complete."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let a client in, if there is room or somebody can give way."""
        waiting = [other for other in self.connections if isinstance(other, LimitedProtocol) and other.is_waiting]
        is_full = len(self.connections) >= MAX_CONNECTIONS
        super().connection_made(transport)
        self._wait_for_request()
        if is_full:
            # Those that were aborted are in the set until the next turn of the loop.
            open_ones = [other for other in waiting if not other.transport.is_closing()]
            oldest = min(open_ones, key=lambda other: other._waits_since, default=self)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        super().data_received(data)
        if not self.is_waiting:
            self._end_wait()
        elif self._timer is None:
            self._wait_for_request()

    def end_waiting(self) -> None:
        """Disconnect the client if it has to send something; nobody waits for it at a stop."""
        if self.is_waiting:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
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
