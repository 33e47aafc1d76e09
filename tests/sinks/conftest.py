"""Real targets: servers that all tests of a run share, and proxies in front of them that fail on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from tests.faults import FaultyProxy
from tests.servers import shared_postgres
from tests.sinks.servers import HttpDouble, MongoServer, ValkeyServer
from tests.store.server import PostgresServer


@pytest.fixture
def proxy() -> Iterator[Callable[[int], FaultyProxy]]:
    """Return a function that puts a proxy in front of a port; all end with the test."""
    proxies: list[FaultyProxy] = []

    def start(port: int) -> FaultyProxy:
        proxies.append(FaultyProxy(port))
        return proxies[-1]

    yield start
    for each in proxies:
        each.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Run the server that all tests share; nobody stops it."""
    with shared_postgres() as server:
        yield server


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    """Make an empty database; return its name."""
    return asyncio.run(postgres.new_database()).split("?")[0].rpartition("/")[2]


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """Run the server that all tests share; nobody stops it."""
    server = ValkeyServer()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def mongo() -> Iterator[MongoServer]:
    """Run the server that all tests share; nobody stops it."""
    server = MongoServer()
    yield server
    server.close()


@pytest.fixture
def http_double() -> Iterator[HttpDouble]:
    """Run a server of this test's own."""
    server = HttpDouble()
    yield server
    server.close()
