"""A store that cannot be reached for twice the ack timeout, for real: nothing is advanced, failed or lost."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID, Upstream
from tests.services.triggerer.hosts import Hosts, spec
from tests.store.server import PostgresServer
from tests.until import until

from tidemill.core.errors import RemoteError
from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.services.triggerer.hosting import host as host_module
from tidemill.store.engines.opening import open_store

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.timeout(120)]


@pytest.fixture
def ack_timeout(long_run: bool) -> float:
    return 5.0 if long_run else 1.0


async def outage(hosts: Hosts, upstream: Upstream, ack_timeout: float, down: Callable, up: Callable) -> None:
    host = await hosts.start(
        spec("quick", hosted.Sharing, upstream=upstream.name),
        spec("every-third", hosted.Sharing, upstream=upstream.name, modulo=3),
        spec("alone", hosted.Trickling),
        shared_stream_ack_timeout=ack_timeout,
    )
    upstream.items.put_nowait(0)
    await until(lambda: len(upstream.advanced) == 1)
    down()
    for n in range(1, 50):
        upstream.items.put_nowait(n)
    await until(lambda: host.events.standing is ProducerStanding.DOWN)
    pulled, fired = len(upstream.pulled), len(DID["alone"])
    began = host.now()
    await asyncio.sleep(2 * ack_timeout)  # the outage itself is what is tested
    assert len(upstream.advanced) == 1
    assert len(upstream.pulled) <= pulled + 1
    assert len(DID["alone"]) <= fired + 1
    assert host.now() == began
    up()
    await until(lambda: len(upstream.advanced) == 50)
    assert all(outcome == (2, 0, 0) for _, outcome in upstream.advanced)
    assert await hosts.payloads("quick") == list(range(50))
    assert await hosts.payloads("every-third") == list(range(0, 50, 3))
    assert host.running == 3
    await until(lambda: len(DID["alone"]) > fired + 5)
    await hosts.stop(host)
    assert await hosts.payloads("alone") == [int(n) for n in DID["alone"]]


async def test_a_sqlite_file_that_another_program_has_locked(tmp_path, upstream, ack_timeout):
    database = await open_store(f"sqlite:///{tmp_path}/tidemill.db")
    other = sqlite3.connect(tmp_path / "tidemill.db", isolation_level=None)
    await outage(
        Hosts(database),
        upstream,
        ack_timeout,
        lambda: other.execute("BEGIN IMMEDIATE"),
        lambda: other.execute("COMMIT"),
    )
    other.close()
    await database.close()


@pytest.mark.parametrize("how", ["stopped", "frozen"])
async def test_a_postgresql_that_is(how, own_postgres: PostgresServer, upstream, ack_timeout):
    database = await open_store(await own_postgres.new_database())
    frozen: list[int] = []

    def down() -> None:
        if how == "stopped":
            own_postgres.stop("immediate")
        else:
            frozen.extend(own_postgres.freeze())

    def up() -> None:
        if how == "stopped":
            own_postgres.start()
        else:
            own_postgres.thaw(frozen)

    await outage(Hosts(database), upstream, ack_timeout, down, up)
    await database.close()


async def test_a_host_that_stops_while_its_store_is_away_leaves_nothing_running(tmp_path, monkeypatch):
    async def away(work: Callable) -> None:
        raise RemoteError("the store is away")

    monkeypatch.setattr(host_module, "STORE_SECONDS", 0.2)
    database = await open_store(f"sqlite:///{tmp_path}/tidemill.db")
    before = asyncio.all_tasks()
    hosts = Hosts(database)
    host = await hosts.start(spec("waits", hosted.Counting, count=0, then="wait"))
    with monkeypatch.context() as patch:
        patch.setattr(database, "write", away)
        await hosts.stop(host)

    assert asyncio.all_tasks() == before
    await database.close()
