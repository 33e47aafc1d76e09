"""What a host keeps for each trigger that only waits."""

from __future__ import annotations

import asyncio
import gc
import linecache
import tracemalloc
from pathlib import Path

from tests.services.triggerer import hosted
from tests.services.triggerer.hosts import Hosts, spec

from tidemill.store.engines.opening import open_store

COUNT = 500
#: Of these, about 900 are the trigger's own: the object, its generator, and what that waits for.
MOST_BYTES = 2_700


async def test_an_idle_trigger_takes_little_memory(fresh: None, tmp_path: Path) -> None:
    database = await open_store(f"sqlite:///{tmp_path}/idle.db")
    hosts = Hosts(database)
    first = spec("first", hosted.Idle)
    host = await hosts.start(first)
    await asyncio.sleep(0)
    gc.collect()
    tracemalloc.start(1)
    try:
        await host.reload([first, *(spec(f"idle-{number}", hosted.Idle) for number in range(COUNT))])
        for _ in range(10):
            await asyncio.sleep(0)
        gc.collect()
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    # On a busy machine the warning of a blocked loop may come, which reads the source lines that it shows.
    kept = snapshot.filter_traces([tracemalloc.Filter(False, linecache.__file__)])
    taken = sum(trace.size for trace in kept.traces)
    running = host.running
    await hosts.stop(host)
    await database.close()
    assert running == COUNT + 1
    assert taken / COUNT < MOST_BYTES
