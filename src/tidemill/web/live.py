"""Live updates: computed once a second for all clients, and not at all without any.

Invariants: a client that reads slowly gets the newest state and is told how many updates it missed; nothing is queued
for it; a stream ends with the login of its client. Everything runs on the server's loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from tidemill.web.problems import Problem

#: Each keeps one of the server's connections.
MAX_CLIENTS = 32

#: What is new, by name: a text for each part that a page can replace.
Parts = Mapping[str, str]


@dataclass(slots=True, eq=False)
class Client:
    """One that listens.

    Attributes:
        view: What it wants to see.
        is_known: Whether its login is still valid.
        pending: What it has not been sent yet.
        missed: How many updates were overtaken by later ones.
    """

    view: str
    is_known: Callable[[], bool]
    pending: dict[str, str] = field(default_factory=dict)
    missed: int = 0
    has_news: asyncio.Event = field(default_factory=asyncio.Event)


class LiveUpdates:
    """Sends updates to clients.

    Args:
        views: By name, what computes all parts of a view.
    """

    def __init__(self, views: Mapping[str, Callable[[], Parts]]) -> None:
        """Start without clients."""
        self._views = views
        self._clients: set[Client] = set()
        self._last: dict[str, dict[str, str]] = {}
        self._is_ended = False

    @property
    def clients(self) -> int:
        """How many listen."""
        return len(self._clients)

    def has_clients(self, view: str) -> bool:
        """Tell whether somebody follows a view."""
        return any(client.view == view for client in self._clients)

    def close(self) -> None:
        """End all streams."""
        self._is_ended = True
        for client in self._clients:
            client.has_news.set()

    def update(self) -> None:
        """Compute what is new for those that listen, and let go of those whose login has ended."""
        for client in [client for client in self._clients if not client.is_known()]:
            self._clients.discard(client)
            client.has_news.set()
        for view in {client.view for client in self._clients}:
            parts, last = dict(self._views[view]()), self._last.get(view, {})
            self._last[view] = parts
            changed = {name: text for name, text in parts.items() if last.get(name) != text}
            for client in self._clients:
                if client.view == view and changed:
                    client.missed += bool(client.pending)
                    client.pending |= changed
                    client.has_news.set()

    async def listen(self, view: str, is_known: Callable[[], bool] = lambda: True) -> AsyncIterator[dict[str, str]]:
        """Yield events for one client: first everything, then what changes.

        Args:
            view: What it wants to see.
            is_known: Whether its login is still valid; asked with each update.

        Raises:
            Problem: Too many listen already.
        """
        if len(self._clients) >= MAX_CLIENTS:
            raise Problem(503, f"{MAX_CLIENTS} clients listen already; close one", {"Retry-After": "5"})
        # What the others have been sent; otherwise a part that changes back would not be sent to this one.
        if not any(client.view == view for client in self._clients):
            self._last[view] = dict(self._views[view]())
        client = Client(view, is_known, dict(self._last[view]))
        client.has_news.set()
        return self._follow(client)

    async def _follow(self, client: Client) -> AsyncIterator[dict[str, str]]:
        self._clients.add(client)
        try:
            while True:
                await client.has_news.wait()
                client.has_news.clear()
                if self._is_ended or client not in self._clients or not client.is_known():
                    return
                pending, client.pending = client.pending, {}
                missed, client.missed = client.missed, 0
                if missed:
                    yield {"event": "missed", "data": json.dumps({"updates": missed})}
                for name, text in pending.items():
                    yield {"event": name, "data": text}
        finally:
            self._clients.discard(client)
