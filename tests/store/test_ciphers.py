"""What is encrypted in the store, with which keys, and what is not readable in the file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from tests.store.dags import Player, dag, task

from tidemill.core.errors import ConfigError
from tidemill.store.calls import (
    ClaimTriggers,
    Deferral,
    GetConnection,
    GetVariable,
    ListConnections,
    ListVariables,
    SetConnection,
    SetVariable,
)
from tidemill.store.ciphers import Cipher, build_cipher, create_key
from tidemill.store.opening import open_store


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
        build_cipher("", tmp_path / "missing" / "dags.key")


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
