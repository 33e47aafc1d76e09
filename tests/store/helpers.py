"""Helpers for several tests of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tidemill.core.triggers.event_plan import StoreOutcome
from tidemill.store.database import Database
from tidemill.store.queries.triggers.events import list_events
from tidemill.store.queries.triggers.sessions import begin_session
from tidemill.store.queries.triggers.triggers import claim_triggers, register_triggers
from tidemill.store.records import EventRecord, TriggerSpec

NOW_US = 1_700_000_000_000_000


async def new_session(database: Database, list: str = "list", **details: Any) -> int:
    """Begin a session."""
    values = {
        "kind": "triggerer",
        "name": "host",
        "host": "machine",
        "boot_id": "boot",
        "pid": 17,
        "list": list,
        "lock": "lock",
        "digest": "digest",
        "now_us": NOW_US,
    }
    return await database.write(lambda c: begin_session(c, **(values | details)))


async def registered(database: Database, *names: str, list: str = "list") -> dict[str, int]:
    """Register triggers; return their ids by name."""
    specs = [TriggerSpec(name, "package.Class") for name in names]
    records = await database.write(lambda c: register_triggers(c, specs, list, NOW_US))
    return {record.spec.name: record.id for record in records}


async def claim(database: Database, *ids: int, session: int | None = None) -> dict[int, int]:
    """Claim triggers, for a new session if none is given; return their tokens by id."""
    session_id = await new_session(database) if session is None else session
    return await database.write(lambda c: claim_triggers(c, ids, session_id, NOW_US))


async def claimed(database: Database, *names: str) -> dict[int, int]:
    """Register and claim triggers; return their tokens by id, in the order of the names."""
    ids = (await registered(database, *names)).values()
    tokens = await claim(database, *ids)
    return {number: tokens[number] for number in ids}


async def all_events(database: Database) -> list[EventRecord]:
    rows: list[EventRecord] = []
    after = None
    while True:
        page = await database.read(lambda c, after=after: list_events(c, after=after, limit=1000))
        rows += page.rows
        if page.next is None:
            return rows
        after = page.next


class Outcomes:
    """Collects the outcomes that `done` is called with."""

    def __init__(self) -> None:
        self.all: list[tuple[object, StoreOutcome]] = []

    def of(self, key: object) -> Callable[[StoreOutcome], None]:
        return lambda outcome: self.all.append((key, outcome))

    def told(self) -> Sequence[object]:
        return [key for key, _ in self.all]
