"""What services that run by themselves refuse, and how they begin another session."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import structlog
from sqlalchemy import text
from tests.store.server import PostgresServer
from tests.until import wait_until

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError
from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.loop.loop_calls import await_on_loop
from tidemill.services.hosts import store_thread
from tidemill.services.hosts.service import check_shared
from tidemill.services.hosts.store_thread import StoreThread
from tidemill.services.scheduler.scheduler import Scheduler
from tidemill.services.sessions.beats import send_beats
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.sessions.observer import SessionObserver
from tidemill.services.supervision.supervisor import ServiceFolder
from tidemill.store.calls.service_calls import BeginSession, CheckKey, ListSessions
from tidemill.store.ciphers import Cipher, create_key
from tidemill.store.database import SchemaChange, StoreAwayError
from tidemill.store.engines import postgres as engine
from tidemill.store.engines.opening import open_store


@pytest.mark.parametrize("url", ["", "sqlite:///dags.db"])
def test_a_sqlite_file_is_refused_with_the_name_of_the_command_that_takes_it(url: str) -> None:
    about = ServiceFolder(Settings.model_validate({"store": {"url": url}}), Path("dags"))
    with pytest.raises(ConfigError, match=r"tidemill worker.*PostgreSQL.*tidemill dev"):
        check_shared("worker", about)


@pytest.mark.parametrize("revision", [None, "0001", "9999"])
async def test_a_service_changes_no_tables(postgres: PostgresServer, revision: str | None) -> None:
    url = await postgres.new_database()
    if revision is not None:
        store = await open_store(url)
        await store.write(
            lambda connection: connection.execute(text(f"UPDATE tidemill_version SET version_num='{revision}'"))
        )
        await store.close()

    with pytest.raises(ConfigError, match="update tidemill" if revision == "9999" else "tidemill db migrate"):
        await open_store(url, schema=SchemaChange.NONE)


async def test_a_service_whose_keys_do_not_decrypt_the_check_value_is_refused(postgres: PostgresServer) -> None:
    url = await postgres.new_database()
    old, new, other = [create_key() for _ in range(3)]

    async def check(*keys: str) -> None:
        store = await open_store(url, Cipher(keys))
        try:
            await store.call(CheckKey())
        finally:
            await store.close()

    await check()
    await check(old)
    for keys in ((), (other,)):
        with pytest.raises(ConfigError, match=r"store\.encryption_key"):
            await check(*keys)
    # Rotated: the first keys differ for a while.
    await check(old, new)
    await check(new, old)
    await check(old, new)
    await check(new, old)
    await check(new)
    with pytest.raises(ConfigError, match=r"store\.encryption_key"):
        await check(old)


async def test_a_running_service_stops_when_its_tables_are_migrated_and_names_the_command(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CHECK_SECONDS", 0.0)
    store = await open_store(await postgres.new_database())
    session = await store.call(BeginSession("scheduler", "s", "here", "boot", 1))
    lease = ServiceLease(0.6)
    parts = [
        asyncio.create_task(work)
        for work in (
            send_beats(store, session, lease),
            Scheduler(store, store.doorbell, session).run(),
            SessionObserver(store, session, lease).run(),
        )
    ]
    with structlog.testing.capture_logs() as logs:
        done, _ = await asyncio.wait(parts, timeout=0.3)
        assert not done
        await store.write(lambda connection: connection.execute(text("UPDATE tidemill_version SET version_num='9999'")))
        done, _ = await asyncio.wait(parts, timeout=30)
    assert len(done) == 3
    for part in parts:
        assert isinstance(part.exception(), ConfigError)
        assert "tidemill db migrate" in str(part.exception())
    assert [entry for entry in logs if entry["log_level"] == "error"] == []
    await store.close()


async def test_a_service_has_at_most_four_connections_however_much_it_asks(postgres: PostgresServer) -> None:
    store = await open_store(await postgres.new_database())
    waiting = asyncio.create_task(store.doorbell.wait(Channel.WORKER, 30))
    await asyncio.gather(*[store.call(ListSessions()) for _ in range(40)])
    counted = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
    async with asyncio.timeout(30):
        while (found := await store.read(lambda connection: connection.execute(counted).scalar_one())) < 4:
            await asyncio.gather(*[store.call(ListSessions()) for _ in range(40)])
    assert found == 4
    waiting.cancel()
    await store.close()


def test_the_store_of_the_web_ui_answers_on_its_own_thread_and_says_when_it_does_not(postgres: PostgresServer) -> None:
    url = asyncio.run(prepare(postgres))
    settings = Settings.model_validate({"store": {"url": url}})
    thread = StoreThread(settings, url)
    thread.start()
    try:
        assert await_on_loop(thread.loop, thread.call(ListSessions()), 30) == ()
        assert thread.find_unready() == []
    finally:
        thread.close()
    assert thread.find_unready() == ["the store does not answer"]


def test_the_store_of_the_web_ui_is_checked_again_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        """A store that is away at its first call."""

        calls = 0

        async def call(self, request: object) -> tuple[()]:
            self.calls += 1
            if self.calls == 1:
                raise StoreAwayError("the store is away")
            return ()

        async def close(self) -> None: ...

    async def open_it(settings: Settings, url: str) -> Store:
        return Store()

    monkeypatch.setattr(store_thread, "open_shared_store", open_it)
    thread = StoreThread(Settings.model_validate({}), "postgresql://host/name")
    thread.start()
    try:
        assert await_on_loop(thread.loop, thread.call(ListSessions()), 30) == ()
    finally:
        thread.close()


def test_the_store_of_the_web_ui_may_take_longer_to_start_than_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        async def call(self, request: object) -> tuple[()]:
            return ()

        async def close(self) -> None: ...

    async def open_it(settings: Settings, url: str) -> Store:
        time.sleep(0.3)
        return Store()

    monkeypatch.setattr(store_thread, "open_shared_store", open_it)
    monkeypatch.setattr(store_thread, "_START_SECONDS", 0.05)
    thread = StoreThread(Settings.model_validate({}), "postgresql://host/name")
    thread.start()
    try:
        wait_until(lambda: thread.find_unready() == [])
    finally:
        thread.close()


def test_the_store_of_the_web_ui_is_refused_if_its_tables_are_of_another_version(postgres: PostgresServer) -> None:
    url = asyncio.run(prepare(postgres, "0001"))
    thread = StoreThread(Settings.model_validate({"store": {"url": url}}), url)
    with pytest.raises(ConfigError, match="tidemill db migrate"):
        thread.start()
    thread.close()


async def prepare(postgres: PostgresServer, revision: str | None = None) -> str:
    """Return the URL of a database with the tables, of a revision."""
    url = await postgres.new_database()
    store = await open_store(url)
    if revision is not None:
        change = text(f"UPDATE tidemill_version SET version_num='{revision}'")
        await store.write(lambda connection: connection.execute(change))
    await store.close()
    return url
