"""Live updates, computed once a second for all clients together, and only while there are clients.

Invariants: updates are never queued. A slow client gets the newest state and the number of updates it missed. A stream
ends when its client's login ends. Everything runs on the server's loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from tidemill.web.problems import RequestProblem

#: Each client occupies one of the server's connections.
MAX_CLIENTS = 32

#: Changed parts of a page: new text by the part's name.
Parts = Mapping[str, str]


@dataclass(slots=True, eq=False)
class Client:
    """A client that listens for updates.

    Attributes:
        view: The view that it follows.
        is_known: Returns whether its login is still valid.
        pending: Parts that it has not been sent yet.
        missed: How many updates a later one replaced before they were sent.
    """

    view: str
    is_known: Callable[[], bool]
    pending: dict[str, str] = field(default_factory=dict)
    missed: int = 0
    has_news: asyncio.Event = field(default_factory=asyncio.Event)


class LiveUpdates:
    """Sends updates to clients.

    Args:
        views: By the view's name, a function that computes all its parts.
    """

    def __init__(self, views: Mapping[str, Callable[[], Parts]]) -> None:
        self._views = views
        self._clients: set[Client] = set()
        self._last: dict[str, dict[str, str]] = {}
        self._is_ended = False

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self._clients)

    def has_clients(self, view: str) -> bool:
        """Return whether any client follows a view."""
        return any(client.view == view for client in self._clients)

    def close(self) -> None:
        self._is_ended = True
        for client in self._clients:
            client.has_news.set()

    def update(self) -> None:
        """Compute the changes of every followed view, and drop clients whose login has ended."""
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
        """Yield events for one client: all parts first, then the changes.

        Args:
            view: The view to follow.
            is_known: Returns whether the client's login is still valid; called with every update.

        Raises:
            Problem: Too many clients are listening.
        """
        if len(self._clients) >= MAX_CLIENTS:
            text = f"{MAX_CLIENTS} clients already follow live updates; close one of their pages and try again"
            raise RequestProblem(503, text, {"Retry-After": "5"})
        # Start from what the other clients were last sent; otherwise this client would miss a part that changes back.
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
