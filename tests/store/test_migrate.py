"""Migrations: the tables are those of the code, processes may start at once, and strangers are told apart."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from tidemill.core.errors import ConfigError
from tidemill.store.database import Database
from tidemill.store.migrate import MIGRATIONS, revision_of
from tidemill.store.opening import open_reader, open_store
from tidemill.store.postgres import open_postgres
from tidemill.store.tables import HEAD, VERSION_TABLE, metadata

OPENS = """
import asyncio, sys
from tidemill.store.opening import open_store

async def main():
    await (await open_store(sys.argv[1])).close()

sys.stdin.read(1)
asyncio.run(main())
"""


def differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
    return list(compare_metadata(context, metadata))


async def test_the_migrations_make_the_tables_that_the_code_describes(database: Database) -> None:
    assert await database.read(differences) == []
    assert await database.read(revision_of) == HEAD


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


async def test_an_empty_database_is_no_store_for_a_reader(postgres) -> None:
    with pytest.raises(ConfigError, match="has no tables"):
        await open_reader(await postgres.new_database())


async def test_the_migrations_are_part_of_the_package() -> None:
    assert (MIGRATIONS / "env.py").is_file()
    assert MIGRATIONS.is_relative_to(Path(sys.modules["tidemill.store"].__file__ or "").parent)
