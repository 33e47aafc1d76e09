"""Real databases: a SQLite file per test, and a database per test of one PostgreSQL server."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.servers import shared_postgres
from tests.store.server import PostgresServer

from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store


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


#: What a database is copied from that has the tables and nothing in them, by "sqlite" or the folder of a server: that
#: takes less than half of what the migrations take.
_TEMPLATES: dict[str, str] = {}


async def _new_file(folder: Path, *, is_migrated: bool, templates: pytest.TempPathFactory) -> str:
    path = folder / "tidemill.db"
    if is_migrated:
        if "sqlite" not in _TEMPLATES:
            _TEMPLATES["sqlite"] = str(templates.mktemp("template") / "tidemill.db")
            await (await open_store(f"sqlite:///{_TEMPLATES['sqlite']}")).close()
        shutil.copyfile(_TEMPLATES["sqlite"], path)
    return f"sqlite:///{path}"


async def _new_on_server(server: PostgresServer, *, is_migrated: bool) -> str:
    if not is_migrated:
        return await server.new_database()
    if (place := str(server.folder)) not in _TEMPLATES:
        url = await server.new_database()
        await (await open_store(url)).close()
        _TEMPLATES[place] = urlsplit(url).path.removeprefix("/")
    return await server.new_database(_TEMPLATES[place])


@pytest.fixture
async def postgres_url(postgres: PostgresServer) -> str:
    """Return the URL of a new database of the shared server, with its tables."""
    return await _new_on_server(postgres, is_migrated=True)


async def _make_url(request: pytest.FixtureRequest, tmp_path: Path, templates: pytest.TempPathFactory) -> str:
    is_migrated = "database" in request.fixturenames
    if request.param == "sqlite":
        return await _new_file(tmp_path, is_migrated=is_migrated, templates=templates)
    return await _new_on_server(request.getfixturevalue("postgres"), is_migrated=is_migrated)


@pytest.fixture(params=["sqlite", "postgresql"])
async def url(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a new database of each kind: with its tables if the test has it opened, else empty."""
    return await _make_url(request, tmp_path, tmp_path_factory)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
async def sqlite_url(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what `url` does; only at full length of each kind, for tests of what stands above the store."""
    return await _make_url(request, tmp_path, tmp_path_factory)


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    """Open it, with its tables."""
    opened = await open_store(url)
    yield opened
    await opened.close()
