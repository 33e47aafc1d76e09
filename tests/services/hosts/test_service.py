"""What services that run by themselves refuse, and how they begin another session."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text
from tests.store.server import PostgresServer

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError
from tidemill.services.hosts.service import check_shared
from tidemill.services.supervision.supervisor import ServiceFolder
from tidemill.store.calls.service_calls import CheckKey
from tidemill.store.ciphers import Cipher, create_key
from tidemill.store.database import SchemaChange
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
