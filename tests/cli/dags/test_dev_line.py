from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

from tidemill.cli.dags.dev_line import DevLine, list_parts
from tidemill.core.errors import RemoteError
from tidemill.store.call import Listed
from tidemill.store.people_calls import CountStore, StoreCounts


class Store:
    def __init__(self, *counts: StoreCounts | RemoteError) -> None:
        self.counts = list(counts)

    async def call(self, request):
        if not isinstance(request, CountStore):
            return Listed(())
        found = self.counts.pop(0)
        if isinstance(found, RemoteError):
            raise found
        return found


async def follow(line: DevLine, store: Store) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await line.follow(SimpleNamespace(database=store))  # type: ignore[arg-type]


async def test_the_line_says_what_runs_and_that_the_store_is_away():
    line = DevLine()
    assert line.format(80) == "starting"
    await follow(line, Store(StoreCounts({"running": 3}, {"running": 1, "queued": 1}, 0)))
    assert line.format(80) == "2 runs, tasks: 3 running"
    await follow(line, Store(RemoteError("away")))
    assert line.format(80) == "the store cannot be reached"


async def test_what_does_not_fit_is_left_out_from_the_end():
    line = DevLine()
    await follow(line, Store(StoreCounts({"running": 3, "deferred": 12}, {"running": 1}, 0)))
    assert line.format(80) == "1 run, tasks: 3 running, 12 deferred"
    assert line.format(30) == "1 run, tasks: 3 running"
    assert line.format(3) == "1 r"


def test_files_that_cannot_be_parsed_come_first():
    assert (
        list_parts(StoreCounts({"queued": 1}, {"running": 1}, 1), [])[0] == "1 file with errors: tidemill dags errors"
    )
