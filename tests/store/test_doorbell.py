"""The doorbell of PostgreSQL loses its connection: it says so, connects again, and bells ring again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
import structlog
from tests.faults import FaultyProxy
from tests.pgbouncer import PgBouncer
from tests.store.server import PostgresServer
from tests.until import until

from tidemill.core.tasks.inputs import Channel
from tidemill.store.engines import postgres_doorbell
from tidemill.store.engines.postgres import KEEPALIVE
from tidemill.store.engines.postgres_doorbell import PostgresDoorbell


class Site:
    """Two doorbells of a database, of which one connects through a proxy.

    Args:
        server: The server, over which all its databases hear each other.
        address: The database.
        proxy: Leads to the server.
    """

    def __init__(self, server: PostgresServer, address: str, proxy: FaultyProxy) -> None:
        name = urlsplit(address).path.removeprefix("/")
        self.address, self.proxy = address, proxy
        self.cut = PostgresDoorbell(server.tcp_url(name, proxy.port), KEEPALIVE, probe_seconds=0.2, answer_seconds=2.0)
        self.other = PostgresDoorbell(server.tcp_url(name))

    async def begin(self) -> None:
        for one in (self.cut, self.other):
            for channel in Channel:
                await one.wait(channel)
            assert await one.wait(Channel.WORKER, 30.0), "all bells ring once when the connection is there"

    async def grow_quiet(self, bell: PostgresDoorbell) -> None:
        while await bell.wait(Channel.WORKER, 0.3):
            pass

    async def check_both_hear(self) -> None:
        for here, there in ((self.cut, self.other), (self.other, self.cut)):
            await self.grow_quiet(there)
            here.ring([Channel.WORKER])
            assert await there.wait(Channel.WORKER, 30.0)

    async def close(self) -> None:
        await self.cut.close()
        await self.other.close()


@pytest.fixture
async def site(postgres: PostgresServer) -> AsyncIterator[Site]:
    assert postgres.port is not None
    with contextlib.closing(FaultyProxy(postgres.port)) as proxy:
        site = Site(postgres, await postgres.new_database(), proxy)
        await site.begin()
        yield site
        await site.close()


Logs = list[MutableMapping[str, Any]]


@pytest.fixture
def logs() -> Iterator[Logs]:
    with structlog.testing.capture_logs() as found:
        yield found


def count_losses(logs: Logs) -> int:
    """Return how often a connection was lost, of which each is logged once, as is its return."""
    return [entry["log_level"] for entry in logs if "doorbell" in entry["event"]].count("warning")


def is_back(logs: Logs) -> bool:
    """Return whether the last line about the only connection that was cut says that it is back."""
    levels = [entry["log_level"] for entry in logs if "doorbell" in entry["event"]]
    assert levels == [("warning", "info")[number % 2] for number in range(len(levels))]
    return levels[-1] == "info"


async def test_bells_are_heard_through_each_connection(site: Site) -> None:
    await site.check_both_hear()
    assert site.cut.is_direct


@pytest.mark.parametrize("fault", [FaultyProxy.down, FaultyProxy.hang], ids=["down", "black hole"])
async def test_a_lost_connection_is_logged_once_and_replaced_and_then_all_bells_ring(
    site: Site, logs: Logs, fault: Callable[[FaultyProxy], None]
) -> None:
    fault(site.proxy)
    await until(lambda: count_losses(logs))
    await site.grow_quiet(site.cut)
    site.other.ring([Channel.WORKER])  # to nobody

    site.proxy.up()

    assert await site.cut.wait(Channel.WORKER, 30.0)
    assert is_back(logs)
    await site.check_both_hear()


async def test_the_server_that_ends_the_connection_is_logged_too(site: Site, logs: Logs) -> None:
    connection = await asyncpg.connect(site.address)
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'tidemill doorbell' AND datname = current_database()"
    )
    await connection.close()
    await until(lambda: count_losses(logs) >= 2)
    await site.check_both_hear()


async def test_a_connection_that_grows_silent_while_it_is_set_up_is_replaced(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, fetchval = asyncpg.connect, asyncpg.Connection.fetchval
    attempts, silent = [], []

    async def connect_again(*arguments: Any, **options: Any) -> asyncpg.Connection:
        attempts.append(options)
        return await connect(*arguments, **options)

    async def fetch_nothing(connection: asyncpg.Connection, query: str) -> Any:
        site.proxy.hang()
        silent.append(len(attempts))
        return await fetchval(connection, query)

    with monkeypatch.context() as patched:
        patched.setattr(postgres_doorbell, "SCAN_SECONDS", 0.05)
        patched.setattr(asyncpg, "connect", connect_again)
        patched.setattr(asyncpg.Connection, "fetchval", fetch_nothing)
        site.proxy.reset()
        site.proxy.up()
        await until(lambda: silent and len(attempts) > silent[0])

    site.proxy.up()
    await site.check_both_hear()


async def test_a_bell_that_could_not_be_carried_rings_when_the_connection_is_back(site: Site, logs: Logs) -> None:
    site.proxy.hang()
    site.cut.ring([Channel.TRIGGERER])
    await until(lambda: count_losses(logs))
    await site.other.wait(Channel.TRIGGERER, 0.0)

    site.proxy.up()

    assert await site.other.wait(Channel.TRIGGERER, 30.0)


@pytest.mark.parametrize("version", ["old", "new"])
async def test_a_doorbell_behind_a_pooler_rings_for_those_that_listen_directly(
    postgres: PostgresServer, version: str
) -> None:
    address = await postgres.new_database()
    name = urlsplit(address).path.removeprefix("/")
    with contextlib.closing(PgBouncer(postgres, "transaction", version)) as pooler:
        behind, direct = PostgresDoorbell(pooler.url(name), KEEPALIVE), PostgresDoorbell(address, KEEPALIVE)
        try:
            for bell in (behind, direct):
                await bell.wait(Channel.WORKER)
                assert await bell.wait(Channel.WORKER, 30.0)
            assert [behind.is_direct, direct.is_direct] == [False, True]
            while await direct.wait(Channel.WORKER, 0.3):
                pass
            behind.ring([Channel.WORKER])
            assert await direct.wait(Channel.WORKER, 30.0)
        finally:
            await behind.close()
            await direct.close()
