"""Real databases: a SQLite file per test, and a database per test of one PostgreSQL server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.servers import shared_postgres
from tests.store.server import PostgresServer

from tidemill.store.database import Database
from tidemill.store.opening import open_store


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Run the server that all tests share; no test may stop it."""
    with shared_postgres() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """Run a server that the test may stop, kill and freeze."""
    server = PostgresServer()
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tidemill.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return await server.new_database()


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    """Open it, with its tables."""
    opened = await open_store(url)
    yield opened
    await opened.close()
