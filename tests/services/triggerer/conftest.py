"""Stores, hosts over them, and upstreams in memory."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.services.triggerer.hosted import DID, UPSTREAMS, Upstream
from tests.services.triggerer.hosts import Hosts
from tests.store.conftest import database, own_postgres, postgres, url

from tidemill.core.retry import Backoff
from tidemill.services.triggerer.hosting import host as host_module
from tidemill.store.database import Database

__all__ = ["database", "own_postgres", "postgres", "url"]


@pytest.fixture
def fresh(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(host_module, "DRAIN_SECONDS", 0.5)
    DID.clear()
    UPSTREAMS.clear()
    yield
    DID.clear()


@pytest.fixture
def quick_restarts(monkeypatch) -> None:
    """Let triggers restart without a pause to speak of."""
    monkeypatch.setattr(Hosts, "backoff", Backoff(0.01, 0.02))


@pytest.fixture
async def hosts(database: Database, fresh: None) -> AsyncIterator[Hosts]:
    made = Hosts(database)
    yield made
    for host in list(made.running):
        await made.stop(host)


@pytest.fixture
def upstream(fresh: None) -> Upstream:
    name = uuid.uuid4().hex
    UPSTREAMS[name] = Upstream(name)
    return UPSTREAMS[name]
