"""What is encrypted in the store, with which keys, and what is not readable in the file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from tests.store.dags import Player, dag, task

from tidemill.core.errors import ConfigError
from tidemill.core.tasks.endings import Deferral
from tidemill.store.calls.setting_calls import ListConnections, ListVariables, SetConnection
from tidemill.store.calls.task_calls import GetConnection, GetVariable, SetVariable
from tidemill.store.calls.trigger_calls import ClaimTriggers
from tidemill.store.ciphers import Cipher, build_cipher, create_key
from tidemill.store.engines.lock import StoreInUseError
from tidemill.store.engines.opening import open_store


def test_an_older_key_still_decrypts_and_the_first_one_encrypts() -> None:
    old, new = create_key(), create_key()
    stored = Cipher([old]).encrypt("secret")
    assert "secret" not in stored

    both = Cipher([new, old])
    assert both.decrypt(stored) == "secret"
    assert Cipher([new]).decrypt(both.encrypt("secret")) == "secret"
    assert both.decrypt(Cipher().encrypt("fernet:plain")) == "fernet:plain"
    with pytest.raises(ConfigError, match="add the key that it was encrypted with"):
        Cipher([new]).decrypt(stored)
    with pytest.raises(ConfigError, match="encryption_key is not set"):
        Cipher().decrypt(stored)
    with pytest.raises(ConfigError, match="is not a key"):
        Cipher(["short"])


def test_a_key_file_is_created_once_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "dags.key"
    stored = build_cipher("", path).encrypt("secret")

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert build_cipher("", path).decrypt(stored) == "secret"
    key = create_key()
    assert build_cipher(f"{key}, {path.read_text().strip()}", path).decrypt(stored) == "secret"
    with pytest.raises(ConfigError, match="cannot be used"):
        build_cipher("", tmp_path / "missing" / "dags.key").encrypt("secret")


async def test_a_missing_key_file_is_not_created_anew_over_what_only_its_key_decrypts(tmp_path: Path) -> None:
    url, key = f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "store.db.key"
    store = await open_store(url, build_cipher("", key))
    for number in range(7):
        await store.call(SetVariable(f"v{number}", "x", ""))
    await store.call(SetConnection("db", "postgres", "host", password="x"))
    player = await Player(store).begin()
    await player.create(dag(task("a")))
    await player.report(await player.claim_one(), Deferral("a.B", "{}", "go", "{}"))
    await store.close()
    kept = key.read_text()

    key.unlink()
    with pytest.raises(ConfigError) as caught:
        await open_store(url, build_cipher("", key))
    lost = "7 variables (v0, v1, v2, v3, v4, ...); 1 connection (db); 1 deferred task"
    assert lost in str(caught.value)
    assert not key.exists()
    key.write_text("")  # the disk was full, say
    with pytest.raises(ConfigError, match="does not hold a key"):
        await open_store(url, build_cipher("", key))
    # As the message says: with a new key, what was encrypted can be set again.
    again = await open_store(url, build_cipher(create_key(), key))
    await again.call(SetVariable("v0", "new", ""))
    assert await again.call(GetVariable("v0")) == "new"
    await again.close()
    key.write_text(kept)
    found = await open_store(url, build_cipher("", key))
    assert await found.call(GetVariable("v1")) == "x"
    await found.close()


async def test_a_missing_key_file_is_created_where_nothing_is_encrypted_and_only_by_who_writes(tmp_path: Path) -> None:
    url, key = f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "store.db.key"
    store = await open_store(url, build_cipher("", key))
    key.unlink()
    # A command beside `dev` must not create a key that differs from the one that `dev` encrypts with.
    with pytest.raises(StoreInUseError):
        await open_store(url, build_cipher("", key))
    assert not key.exists()
    await store.close()
    await (await open_store(url, build_cipher("", key))).close()
    assert key.exists()


async def test_no_secret_is_readable_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await open_store(f"sqlite:///{path}", Cipher([create_key()]))
    await store.call(SetVariable("name", "hunter-variable", "shown"))
    await store.call(SetConnection("db", "postgres", "host", password="hunter-password", extra='{"x":"hunter-extra"}'))
    player = await Player(store).begin()
    await player.create(dag(task("a")))
    deferral = Deferral("a.B", '{"x":"hunter-kwargs"}', "go", '{"y":"hunter-method"}')
    await player.report(await player.claim_one(), deferral)
    triggerer = await player.begin_service("triggerer")

    (claimed,) = await store.call(ClaimTriggers(triggerer, 1, 1))
    assert claimed.kwargs == '{"x":"hunter-kwargs"}'
    assert await store.call(GetVariable("name")) == "hunter-variable"
    found = await store.call(GetConnection("db"))
    assert found is not None
    assert (found.password, found.extra) == ("hunter-password", '{"x":"hunter-extra"}')
    (variable,) = (await store.call(ListVariables())).rows
    assert (variable.value, variable.description) == (None, "shown")
    (row,) = (await store.call(ListConnections())).rows
    assert "hunter" not in repr(row)
    await store.close()

    for file in tmp_path.iterdir():
        assert b"hunter" not in file.read_bytes(), file
