"""Ends sessions in order: says first that they stop, and releases what does not fit into one transaction.

The end of a session releases the first `PART` triggers. The rest must follow at once, or their tasks would wait until a
scheduler looks for what ended sessions still hold.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from tidemill.core.errors import TidemillError
from tidemill.store.calls.service_calls import PART, ReleaseLeft, StopSession
from tidemill.store.database import StoreCalls
from tidemill.store.wire.remote import call_patiently

#: How long recording a stop may delay it.
_NOTE_SECONDS = 1.0


async def release_rest(store: StoreCalls) -> int:
    """Release what ended sessions still hold, part by part, and wait out outages; return how much that was.

    Raises:
        RemoteError: The store rejects the request.
    """
    return await _release_parts(lambda: call_patiently(store, ReleaseLeft()))


async def release_while_reachable(store: StoreCalls) -> int:
    """Release what ended sessions still hold, part by part; return how much that was.

    Raises:
        RemoteError: The store cannot be reached, or rejects the request. Each part that was released stays so.
    """
    return await _release_parts(lambda: store.call(ReleaseLeft()))


async def _release_parts(release: Callable[[], Awaitable[int]]) -> int:
    count = 0
    while True:
        released = await release()
        count += released
        if released < PART:
            return count


async def note_stopping(store: StoreCalls, session: int) -> None:
    """Record that a service stops in order, if the store can be reached; if it is killed now, no loss is counted."""
    with contextlib.suppress(TidemillError, TimeoutError):
        async with asyncio.timeout(_NOTE_SECONDS):
            await store.call(StopSession(session))
