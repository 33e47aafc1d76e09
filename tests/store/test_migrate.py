"""Migrations: the tables match the code, processes may start at once, and other versions are refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from tests.store.helpers import NOW_US, all_events, claim
from tests.until import LIMIT_SECONDS

from tidemill.core.errors import ConfigError
from tidemill.core.triggers.event_plan import Duplicate, EventStored, NewEvent
from tidemill.store import migrate
from tidemill.store.database import Database
from tidemill.store.engines import sqlite
from tidemill.store.engines.opening import open_reader, open_store
from tidemill.store.engines.postgres import open_postgres
from tidemill.store.migrate import MIGRATIONS, read_revision, upgrade
from tidemill.store.queries.triggers.events import list_events, store_events
from tidemill.store.queries.triggers.triggers import cancel_unlisted, list_triggers
from tidemill.store.records import EventRecord, TriggerRecord, TriggerSpec, TriggerState
from tidemill.store.tables import HEAD, VERSION_TABLE, metadata

OPENS = """
import asyncio, sys
from tidemill.store.engines.opening import open_store

async def main():
    await (await open_store(sys.argv[1])).close()

sys.stdin.read(1)
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _migrations_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the migrations themselves run, for each database."""
    monkeypatch.setattr(migrate, "_run_alembic", getattr(migrate._run_alembic, "__wrapped__", migrate._run_alembic))


def differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
    return list(compare_metadata(context, metadata))


async def test_the_migrations_create_the_tables_that_the_code_describes(database: Database) -> None:
    assert await database.read(differences) == []
    assert await database.read(read_revision) == HEAD


def test_the_newest_revision_is_the_one_that_the_code_names() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))

    assert ScriptDirectory.from_config(config).get_heads() == [HEAD]


async def test_a_store_that_is_up_to_date_is_opened_without_alembic(url: str) -> None:
    await (await open_store(url)).close()
    code = f"import sys\nsys.stdin = __import__('io').StringIO('x')\n{OPENS}\nassert 'alembic' not in sys.modules"

    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code, url], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


async def test_processes_that_open_a_new_postgresql_store_at_once_all_succeed(postgres) -> None:
    url = await postgres.new_database()
    processes = [
        subprocess.Popen([sys.executable, "-c", OPENS, url], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.flush()

    ends = await asyncio.gather(*[asyncio.to_thread(process.communicate, timeout=60) for process in processes])

    assert [process.returncode for process in processes] == [0, 0, 0], ends


async def test_tasks_that_open_a_new_postgresql_store_at_once_all_succeed(postgres) -> None:
    url = await postgres.new_database()

    opened = await asyncio.gather(*[open_postgres(url) for _ in range(8)])

    assert await opened[0].read(differences) == []
    for one in opened:
        await one.close()


async def test_a_store_that_a_newer_tidemill_upgraded_is_refused_by_name(url: str) -> None:
    database = await open_store(url)
    await database.write(lambda c: c.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")))
    await database.close()

    with pytest.raises(ConfigError, match=r"9999.*update tidemill"):
        await open_store(url)
    with pytest.raises(ConfigError, match="9999"):
        await open_reader(url)


def as_revision_1(connection: Connection) -> None:
    """Create the tables of revision 0001, and fill them."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "0001")
    columns = "name, classpath, kwargs, restart, state, reason, error, owner, made, token, next_index"
    for row in (
        "('ran', 'a.B', '{\"n\": 1}', 'always', 'running', NULL, NULL, 'box-1:/srv/a:b/list.yaml', '[\"a.B\"]', 7, 3)",
        "('gone', 'a.C', '{}', 'never', 'cancelled', 'user', 'Traceback', 'box-2:/srv/list.yaml', NULL, 2, 2)",
        "('new', 'a.D', '{}', 'never', 'registered', NULL, NULL, NULL, NULL, 0, 0)",
    ):
        connection.execute(
            text(f"INSERT INTO trigger ({columns}, created_us, changed_us) VALUES {row[:-1]}, {NOW_US}, {NOW_US + 1})")
        )
    connection.execute(
        text(
            "INSERT INTO trigger_event (trigger_id, sequence_index, identity, payload, created_us) "
            "SELECT id, 0, 'x', '0', 5 FROM trigger WHERE name <> 'new' UNION ALL "
            "SELECT id, 1, NULL, '1', 6 FROM trigger WHERE name <> 'new' UNION ALL "
            "SELECT id, 2, 'y', '2', 7 FROM trigger WHERE name = 'ran'"
        )
    )


async def test_an_old_store_is_migrated_with_its_content(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        for room in ("sqlite", "postgres"):
            patched.setattr(f"tidemill.store.engines.{room}.upgrade", as_revision_1)
        old = await open_store(url)
        columns = "e.id, trigger_id, name, sequence_index, identity, payload, e.created_us"
        listed = text(f"SELECT {columns} FROM trigger_event e JOIN trigger t ON t.id = trigger_id ORDER BY e.id")
        events = await old.read(lambda c: [tuple(row) for row in c.execute(listed)])
        assert len(events) == 5
        await old.close()

    database = await open_store(url)

    assert await database.read(differences) == []
    ran, gone, new = await database.read(lambda c: list_triggers(c).rows)
    assert ran == TriggerRecord(
        id=ran.id,
        spec=TriggerSpec("ran", "a.B", '{"n": 1}', "always"),
        state=TriggerState.RUNNING,
        reason=None,
        error=None,
        list="/srv/a:b/list.yaml",
        session=None,
        serialized='["a.B"]',
        token=7,
        next_index=3,
        created_us=NOW_US,
        changed_us=NOW_US + 1,
    )
    assert (gone.list, gone.token, gone.next_index) == ("/srv/list.yaml", 2, 2)
    assert (gone.state, gone.reason, gone.error) == (TriggerState.CANCELLED, "user", "Traceback")
    assert (new.list, new.token, new.next_index) == (None, 0, 0)
    names = EventRecord.__slots__[:-1]
    assert [tuple(getattr(row, name) for name in names) for row in await all_events(database)] == events

    # It continues where it was: numbers, identities and the list's triggers.
    assert await database.write(lambda c: cancel_unlisted(c, "/srv/a:b/list.yaml", [], NOW_US)) == ["ran"]
    assert await claim(database, ran.id) == {ran.id: 8}
    fired = [NewEvent(ran.id, 8, "3", identity, NOW_US) for identity in ("y", "z")]
    plan = await database.write(lambda c: store_events(c, fired))
    assert plan.outcomes == [Duplicate(2), EventStored(3)]
    assert (await all_events(database))[-1].id > events[-1][0]
    await database.close()


async def test_a_migration_may_take_longer_than_a_transaction(postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(connection: Connection) -> None:
        connection.exec_driver_sql("SELECT pg_sleep(2.5)")
        upgrade(connection)

    monkeypatch.setattr("tidemill.store.engines.postgres.upgrade", slow)

    database = await open_postgres(await postgres.new_database(), attempt_seconds=2.0)

    assert await database.read(read_revision) == HEAD
    await database.close()


@pytest.mark.alone
@pytest.mark.long
async def test_a_store_with_a_hundred_thousand_events_is_migrated_within_ten_seconds(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(connection: Connection) -> None:
        as_revision_1(connection)
        numbers = (
            "generate_series(10, 100009) AS n(i)"
            if connection.dialect.name == "postgresql"
            else "(WITH RECURSIVE n(i) AS (SELECT 10 UNION ALL SELECT i + 1 FROM n WHERE i < 100009) SELECT i FROM n)"
        )
        connection.execute(
            text(
                "INSERT INTO trigger_event (trigger_id, sequence_index, identity, payload, created_us) "
                f"SELECT (SELECT id FROM trigger WHERE name = 'ran'), i, 'id ' || i, '0', i FROM {numbers}"
            )
        )

    with monkeypatch.context() as patched:
        for room in ("sqlite", "postgres"):
            patched.setattr(f"tidemill.store.engines.{room}.upgrade", large)
        await (await open_store(url)).close()

    began = time.perf_counter()
    database = await open_store(url)

    assert time.perf_counter() - began < 10
    assert len((await database.read(lambda c: list_events(c, limit=200_000))).rows) == 100_005
    await database.close()


async def test_an_empty_database_is_not_a_store_for_a_reader(postgres) -> None:
    with pytest.raises(ConfigError, match="has no tables"):
        await open_reader(await postgres.new_database())


async def test_a_reader_waits_for_the_tables_that_a_writer_is_creating(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sqlite, "_CREATE_SECONDS", LIMIT_SECONDS)
    path = tmp_path / "new.db"
    path.touch()
    reading = asyncio.create_task(open_reader(f"sqlite:///{path}"))
    await asyncio.sleep(0.1)  # it finds no tables
    assert not reading.done()
    writer = await open_store(f"sqlite:///{path}")
    await (await reading).close()
    await writer.close()


async def test_the_migrations_are_part_of_the_package() -> None:
    assert (MIGRATIONS / "env.py").is_file()
    assert MIGRATIONS.is_relative_to(Path(sys.modules["tidemill.store"].__file__ or "").parent)
