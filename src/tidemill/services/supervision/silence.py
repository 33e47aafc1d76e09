"""Detects hanging services: the process is alive, but has not begun its session, or sends no heartbeat."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from tidemill.store.calls.service_calls import ListSessions, ServiceSession
from tidemill.store.database import StoreClient
from tidemill.store.wire.remote import call_patiently

#: Same as the heartbeat interval of services.
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
    """Wait until a service has sent no heartbeat for some seconds.

    Time in which this process itself was suspended does not count.

    Args:
        store: The store.
        is_meant: Selects the service's session.
        seconds: The maximum time between heartbeats.
        look_seconds: The interval of the checks; None: the heartbeat interval.
        find_process: Returns the pid of the process, which may not have begun its session yet; None if there is no
            process, which is not silence.
        start_seconds: How long a process may take to begin its session.
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
