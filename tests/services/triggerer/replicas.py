"""Several processes' parts in lists of triggers, played in one process over connections of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from sqlalchemy import Connection

from tidemill.config.sections.triggerer_settings import TriggererSettings
from tidemill.core.errors import RemoteError
from tidemill.runtime.process.identity_lock import IdentityLock
from tidemill.services.triggerer.lists.host import ListHost
from tidemill.services.triggerer.lists.replica import Replica
from tidemill.services.triggerer.lists.sessions import KIND, Ownership, SessionPace
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.store.queries.triggers.sessions import list_live_sessions
from tidemill.store.records import ListHostSession, TriggerSpec

T = TypeVar("T")

#: A death is noticed after two seconds; a loop that others keep busy has that long to beat.
QUICK = SessionPace(lease_seconds=2.0, beat_seconds=0.3, look_seconds=0.1)


class Cut:
    """A store whose connection can be cut, and which then fails, or is silent."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.label = database.label
        self.exclusive = database.exclusive
        self.fails = False
        self.silent = asyncio.Event()
        self.silent.set()
        self.failed = 0

    async def write(self, work: Callable[[Connection], T]) -> T:
        await self.silent.wait()
        if self.fails:
            self.failed += 1
            raise RemoteError("cut off")
        return await self.database.write(work)

    async def read(self, work: Callable[[Connection], T]) -> T:
        return await self.database.read(work)

    async def close(self) -> None:
        await self.database.close()


class Part:
    """One process's part."""

    def __init__(self, store: Cut, ownership: Ownership, specs: list[TriggerSpec]) -> None:
        self.store = store
        self.ownership = ownership
        self.listed = specs
        self.replica = Replica(
            ownership, lambda: ListHost(store, TriggererSettings(), ownership), lambda: list(self.listed)
        )
        self.running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.running = asyncio.create_task(self.replica.run(list(self.listed)))

    async def end(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait([self.running])
        await self.replica.stop()

    async def vanish(self) -> None:
        """End as a killed process does: without a word, and without its lock."""
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait([self.running])
        await self.ownership.pause()
        if self.ownership._lock is not None:
            self.ownership._lock.release()

    @property
    def owns(self) -> bool:
        return self.replica.host is not None

    @property
    def waits(self) -> bool:
        return self.ownership.holder is not None


class Stage:
    """Parts over one store."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._stack = AsyncExitStack()
        self.parts: list[Part] = []

    async def connect(self) -> Cut:
        database = await open_store(self.url)
        self._stack.push_async_callback(database.close)
        return Cut(database)

    async def part(
        self,
        *specs: TriggerSpec,
        list_name: str = "list",
        name: str = "host",
        lock: IdentityLock | None = None,
        **options: Any,
    ) -> Part:
        store = await self.connect()
        ownership = Ownership(store, list_name, name=name, lock=lock, pace=QUICK, **options)
        made = Part(store, ownership, list(specs))
        self.parts.append(made)
        return made

    async def started(self, *specs: TriggerSpec, **options: Any) -> Part:
        part = await self.part(*specs, **options)
        part.begin()
        return part

    async def sessions(self) -> list[ListHostSession]:
        return await self.parts[0].store.database.read(lambda c: list_live_sessions(c, KIND))

    async def close(self) -> None:
        for part in self.parts:
            part.store.fails = False
            part.store.silent.set()
            await part.end()
        await self._stack.aclose()
