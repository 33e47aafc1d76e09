"""Reports about triggers: in chunks, patiently, and apart from each other's faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from sqlalchemy import Connection
from tests.store.helpers import claim, registered

from tidemill.core.errors import RemoteError
from tidemill.core.retry import Backoff
from tidemill.services.triggerer.hosting.state_change import StateChange
from tidemill.services.triggerer.lists.state_writer import CHUNK_COUNT, StateWriter
from tidemill.store.database import Database
from tidemill.store.queries.triggers.triggers import find_triggers
from tidemill.store.records import TriggerState

T = TypeVar("T")


class Limited:
    """A database that answers no transaction which changes more rows than a limit, as one with a time limit does."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.label = database.label
        self.limit = 10 * CHUNK_COUNT
        self.refuses = ""
        self.failures = 0
        self.sizes: list[int] = []

    async def write(self, work: Callable[[Connection], T]) -> T:
        def limited(connection: Connection) -> T:
            result = work(connection)
            self.sizes.append(len(result))  # type: ignore[arg-type]
            found = connection.exec_driver_sql(f"SELECT count(*) FROM trigger WHERE error = '{self.refuses}'").scalar()
            if self.refuses and found:
                raise RemoteError("refused", retryable=False)
            if self.sizes[-1] > self.limit or self.failures:
                self.failures = max(0, self.failures - 1)
                raise RemoteError("no answer in time")
            return result

        return await self._database.write(limited)

    async def read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.read(work)

    async def close(self) -> None:
        await self._database.close()


@pytest.fixture
async def line(database: Database) -> Limited:
    return Limited(database)


async def running(database: Database, count: int) -> dict[int, int]:
    return await claim(database, *(await registered(database, *[f"t{n}" for n in range(count)])).values())


async def states(line: Limited, count: int) -> set[TriggerState]:
    records = await line.read(lambda c: find_triggers(c, [f"t{n}" for n in range(count)]))
    return {record.state for record in records}


def quick(line: Limited) -> StateWriter:
    return StateWriter(line, Backoff(0.001, 0.002))


async def test_a_chunk_that_takes_too_long_is_halved_until_it_does_not(line: Limited, database: Database) -> None:
    tokens, line.limit = await running(database, 100), 30
    writer = quick(line)
    for number, token in tokens.items():
        writer.put(StateChange(number, token, TriggerState.FINISHED))
    await writer.settled()

    assert line.sizes[:3] == [100, 50, 25]
    assert await states(line, 100) == {TriggerState.FINISHED}


async def test_after_an_outage_chunks_grow_again(line: Limited, database: Database) -> None:
    tokens, line.failures = await running(database, 300), 20
    writer = quick(line)
    for number, token in tokens.items():
        writer.put(StateChange(number, token, TriggerState.FINISHED))
    await writer.settled()

    assert line.sizes[20:25] == [1, 2, 4, 8, 16]
    assert await states(line, 300) == {TriggerState.FINISHED}


async def test_a_report_that_is_refused_keeps_no_other_from_being_written(line: Limited, database: Database) -> None:
    tokens, line.refuses = await running(database, 20), "bad"
    [unlucky, *others] = tokens
    writer = quick(line)
    for number, token in tokens.items():
        writer.put(StateChange(number, token, TriggerState.FAILED, None, "bad" if number == unlucky else "good"))
    await writer.settled()

    records = await line.read(lambda c: find_triggers(c, [f"t{n}" for n in range(20)]))
    assert {record.id for record in records if record.error == "good"} == set(others)
    assert [record.state for record in records if record.id == unlucky] == [TriggerState.RUNNING]


async def test_the_last_report_of_a_trigger_counts(line: Limited, database: Database) -> None:
    tokens = await running(database, 3)
    writer = quick(line)
    for state in (TriggerState.FINISHED, TriggerState.FAILED, TriggerState.RUNNING, TriggerState.CANCELLED):
        for number, token in tokens.items():
            writer.put(StateChange(number, token, state))
    for number, token in tokens.items():
        writer.put(StateChange(number, token - 1, TriggerState.FINISHED))
    await writer.settled()

    assert await states(line, 3) == {TriggerState.CANCELLED}
    assert len(line.sizes) == 1
