"""Connections of browsers and programs: how many there may be, and how long one may be silent.

Invariants: there are at most 64; a further client takes the place of the one that has asked for nothing for longest,
and if all are being answered, it is disconnected. Who connects or begins a request and does not send the rest within
10 s is disconnected, too. So open connections alone keep nobody out.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 64
HEAD_SECONDS = 10.0


class LimitedProtocol(H11Protocol):
    """One connection; uvicorn creates it with its own arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Begin without a client."""
        super().__init__(*args, **kwargs)
        self._silent_since = 0.0
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def is_silent(self) -> bool:
        """Whether nothing is asked at the moment."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let a client in, if there is room or somebody can give way."""
        silent = [other for other in self.connections if isinstance(other, LimitedProtocol) and other.is_silent]
        is_full = len(self.connections) >= MAX_CONNECTIONS
        super().connection_made(transport)
        self._wait_for_head()
        if is_full:
            # Those that were aborted are in the set until the next turn of the loop.
            open_ones = [other for other in silent if not other.transport.is_closing()]
            oldest = min(open_ones, key=lambda other: other._silent_since, default=self)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        super().data_received(data)
        if not self.is_silent:
            self._end_wait()
        elif self._head_timer is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._end_wait()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._silent_since = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._end_silent)

    def _end_wait(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_silent(self) -> None:
        self._head_timer = None
        if self.is_silent:
            self.transport.abort()
