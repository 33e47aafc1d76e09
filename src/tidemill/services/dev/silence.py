"""Notices that a service hangs: its process lives, but the service has not begun, or no longer beats."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from tidemill.store.calls.all_calls import ListSessions, ServiceSession
from tidemill.store.database import StoreClient
from tidemill.store.wire.remote import call_patiently

#: As services beat.
LOOK_SECONDS = 5.0


async def wait_until_silent(
    store: StoreClient,
    is_meant: Callable[[ServiceSession], bool],
    seconds: float,
    look_seconds: float | None = None,
    *,
    find_process: Callable[[], int | None] = lambda: None,
    start_seconds: float = math.inf,
) -> None:
    """Return when a service has not beaten for some seconds, by the clock of this process.

    Time in which this process itself did not run does not count.

    Args:
        store: The store.
        is_meant: Which service.
        seconds: How long it may be silent.
        look_seconds: How often to look; None: as services beat.
        find_process: Returns its process, which may not have begun the service yet; None: there is no process, and
            nothing is silent.
        start_seconds: How long a process may take to begin its service.
    """
    loop, look_seconds = asyncio.get_running_loop(), look_seconds or LOOK_SECONDS
    last, silent = None, 0.0
    while True:
        before = loop.time()
        await asyncio.sleep(look_seconds)
        passed = min(loop.time() - before, 2 * look_seconds)
        found = [(one.id, one.beat) for one in await call_patiently(store, ListSessions()) if is_meant(one)]
        pid = find_process()
        is_there = bool(found) or pid is not None
        silent = silent + passed if is_there and (pid, found) == last else 0.0
        last = pid, found
        if silent >= (seconds if found else start_seconds):
            return
