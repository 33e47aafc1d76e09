"""A shared store that is open on a thread of its own, for the web UI of a process without services.

Invariant: an outage of the database ends nothing, also at the start: calls fail until it is over. The tables are never
changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TypeVar

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.runtime.loop.loop_calls import await_on_loop
from tidemill.services.hosts.service import open_shared_store
from tidemill.store.calls.call import Call
from tidemill.store.calls.service_calls import CheckKey, ListSessions
from tidemill.store.database import Database, StoreAwayError
from tidemill.store.wire.remote import call_patiently

T = TypeVar("T")

#: How long the start waits for the database.
_OPEN_SECONDS = 5.0
#: How long the start waits for the thread.
_START_SECONDS = 60.0
#: How long a store may take to answer a probe, and to close.
_ANSWER_SECONDS = 5.0


class StoreThread:
    """A store on a thread; it answers calls on `loop` only.

    Args:
        settings: The section `store`.
        url: The URL of a PostgreSQL database.
    """

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings, self._url = settings, url
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="tidemill-store", daemon=True)
        self._opening: asyncio.Task[Database] | None = None

    def start(self) -> None:
        """Open the store; if the database cannot be reached, go on trying.

        Raises:
            ConfigError: The tables have another revision, or the key is not the database's.
            RemoteError: The database refuses the connection for good.
        """
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._start(), self.loop)
        # On a busy machine the imports alone may take longer than the start waits for the database.
        with contextlib.suppress(TimeoutError):
            started.result(_START_SECONDS)

    async def _start(self) -> None:
        self._opening = asyncio.create_task(self._open())
        done, _ = await asyncio.wait({self._opening}, timeout=_OPEN_SECONDS)
        if done:
            self._opening.result()

    async def _open(self) -> Database:
        store = await open_shared_store(self._settings, self._url)
        try:
            await call_patiently(store, CheckKey())
        except BaseException:
            await store.close()
            raise
        return store

    async def call(self, request: Call[T]) -> T:
        """Answer a named call; see `Database.call`.

        Raises:
            ConfigError: The tables, or the key, are not those of this program.
        """
        if self._opening is None or not self._opening.done():
            raise StoreAwayError("the store cannot be reached yet; see the log of this process")
        return await self._opening.result().call(request)

    def find_unready(self) -> list[str]:
        """Return the reasons why the store does not answer; callable from any other thread."""
        try:
            await_on_loop(self.loop, self.call(ListSessions("dev")), _ANSWER_SECONDS)
        except TimeoutError:
            return ["the store does not answer"]
        except Exception as error:
            return [str(error)]
        return []

    def close(self) -> None:
        """Close the store, and end the thread."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError, RemoteError):
            await_on_loop(self.loop, self._close(), _ANSWER_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_ANSWER_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()

    async def _close(self) -> None:
        opening = self._opening
        if opening is None:
            return
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().close()
