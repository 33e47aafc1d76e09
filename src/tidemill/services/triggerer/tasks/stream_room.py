"""Lets the triggers of streams wait at their `yield` while too many of their events are undelivered.

Invariant: one call counts the events of all triggers that wait. A trigger that is cancelled stops waiting.
"""

from __future__ import annotations

import asyncio

from tidemill.store.calls.trigger_calls import CountUndelivered
from tidemill.store.database import StoreClient


class StreamRoom:
    """The triggers of a session that wait until attempts have handled enough of their events.

    Args:
        calls: The store.
        max_undelivered: The number of undelivered events above which a trigger waits.
    """

    def __init__(self, calls: StoreClient, max_undelivered: int) -> None:
        self.max_undelivered = max_undelivered
        self._calls = calls
        self._waiting: dict[int, asyncio.Future[int]] = {}

    async def wait(self, trigger: int) -> int:
        """Wait until at most half of the allowed events of a trigger are undelivered; return their number."""
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[trigger] = waiting
        try:
            return await waiting
        finally:
            if self._waiting.get(trigger) is waiting:
                del self._waiting[trigger]

    async def look(self) -> None:
        """Let triggers go on that have room.

        Raises:
            RemoteError: The store cannot be reached.
        """
        waiting = dict(self._waiting)
        if not waiting:
            return
        counts = dict(await self._calls.call(CountUndelivered(tuple(waiting))))
        for trigger, future in waiting.items():
            # A trigger without a stream has been removed; storing its next event tells it so.
            undelivered = counts.get(trigger, 0)
            if undelivered <= self.max_undelivered // 2 and not future.done():
                future.set_result(undelivered)
