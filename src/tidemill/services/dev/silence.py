"""Notices that a service hangs: it has its process and its connection, but does not beat any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidemill.store.calls import ListServices, ServiceRecord
from tidemill.store.database import Caller
from tidemill.store.remote import call_patiently

#: As services beat.
LOOK_SECONDS = 5.0


async def wait_until_silent(
    store: Caller, is_meant: Callable[[ServiceRecord], bool], seconds: float, look_seconds: float | None = None
) -> None:
    """Return when a service has not beaten for some seconds, by the clock of this process.

    Time in which this process itself did not run does not count.

    Args:
        store: The store.
        is_meant: Which service; while there is none, none is silent.
        seconds: How long.
        look_seconds: How often to look; None: as services beat.
    """
    loop, look_seconds = asyncio.get_running_loop(), look_seconds or LOOK_SECONDS
    last, silent = None, 0.0
    while silent < seconds:
        before = loop.time()
        await asyncio.sleep(look_seconds)
        passed = min(loop.time() - before, 2 * look_seconds)
        found = [(one.id, one.beat) for one in await call_patiently(store, ListServices()) if is_meant(one)]
        silent = silent + passed if found and found == last else 0.0
        last = found
