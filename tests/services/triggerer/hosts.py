"""Hosts that tests start in this process, over a store, and ask."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.store.helpers import all_events

from tidemill.config.sections.triggerer_settings import TriggererSettings
from tidemill.core.triggers.lifecycle import BACKOFF
from tidemill.services.triggerer.hosting.host_book import HostBook
from tidemill.services.triggerer.lists.host import ListHost
from tidemill.services.triggerer.lists.sessions import Ownership
from tidemill.store.database import Database
from tidemill.store.queries.triggers.triggers import find_triggers
from tidemill.store.records import TriggerRecord, TriggerSpec, TriggerState


def spec(name: str, cls: type, restart: str = "never", **kwargs: Any) -> TriggerSpec:
    return TriggerSpec(
        name, f"tests.services.triggerer.hosted.{cls.__name__}", json.dumps(kwargs, sort_keys=True), restart
    )


class Hosts:
    """Hosts over one store, all of them stopped at the end."""

    #: The pauses before restarts.
    backoff = BACKOFF
    #: Where they note what happens; None: each in a book of its own.
    book: HostBook | None = None

    def __init__(self, database: Database) -> None:
        self.database = database
        self.running: list[ListHost] = []
        self.owned: dict[ListHost, Ownership] = {}

    async def make(self, list_name: str = "list", **settings: Any) -> ListHost:
        ownership = Ownership(self.database, list_name)
        await ownership.acquire()
        found = TriggererSettings(**settings)
        host = ListHost(self.database, found, ownership, backoff=self.backoff, book=self.book)
        ownership.compare_tokens(lambda: host.tokens, host.hand_over)
        self.running.append(host)
        self.owned[host] = ownership
        return host

    async def start(self, *specs: TriggerSpec, list_name: str = "list", **settings: Any) -> ListHost:
        host = await self.make(list_name, **settings)
        await host.start(specs)
        return host

    async def stop(self, host: ListHost) -> None:
        self.running.remove(host)
        await host.stop()
        await self.owned.pop(host).release()

    async def record(self, name: str) -> TriggerRecord:
        [record] = await self.database.read(lambda c: find_triggers(c, [name]))
        return record

    async def state(self, name: str, state: TriggerState) -> TriggerRecord:
        async with asyncio.timeout(30):
            while (record := await self.record(name)).state is not state:
                await asyncio.sleep(0.01)
        return record

    async def payloads(self, name: str | None = None) -> list[Any]:
        rows = await all_events(self.database)
        return [json.loads(row.payload) for row in rows if name is None or row.trigger_name == name]
