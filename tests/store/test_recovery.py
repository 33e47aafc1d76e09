"""A store whose file goes away while it is open: noticed, and saved elsewhere."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.store.calls.task_calls import GetVariable, SetVariable
from tidemill.store.ciphers import build_cipher
from tidemill.store.engines import recovery
from tidemill.store.engines.opening import open_store
from tidemill.store.engines.recovery import StoreLostError


def remove(store: Path) -> None:
    for file in store.parent.glob("store.db*"):  # as `git clean` does: key and lock, too
        file.unlink()


def remove_lock(store: Path) -> None:
    Path(f"{store}.lock").unlink()


def move(store: Path) -> None:
    store.rename(store.with_name("moved.db"))


def move_folder(store: Path) -> None:
    store.parent.rename(store.parent.with_name("moved"))


def replace(store: Path) -> None:
    shutil.copy(store, store.with_name("other.db"))
    store.with_name("other.db").rename(store)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (remove, "store.db was removed"),
        (remove_lock, "store.db.lock was removed"),
        (move, "moved.db"),
        (move_folder, "moved/store.db"),
        (replace, "store.db was removed"),
    ],
)
async def test_a_store_that_loses_its_file_is_saved_beside_it_with_its_key(
    tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    path = tmp_path / "folder" / "store.db"
    path.parent.mkdir()
    store = await open_store(f"sqlite:///{path}", build_cipher("", Path(f"{path}.key")))
    await store.call(SetVariable("before", "x", ""))
    assert store.find_loss() is None

    harm(path)
    loss = store.find_loss()
    assert loss is not None
    assert said in loss
    await store.call(SetVariable("after", "y", ""))
    replaced = path.read_bytes() if harm is replace else b""
    saved = await store.recover()
    await store.close()

    assert saved.parent == (path.parent if path.parent.exists() else tmp_path / "moved")
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    found = await open_store(f"sqlite:///{saved}", build_cipher("", Path(f"{saved}.key")))
    assert [await found.call(GetVariable(name)) for name in ("before", "after")] == ["x", "y"]
    await found.close()
    assert harm is not replace or path.read_bytes() == replaced


async def test_a_copy_that_can_be_written_nowhere_says_where_it_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/store.db")
    monkeypatch.setattr(recovery.FileWatch, "list_folders", lambda watch: iter([Path("/proc/nowhere"), Path("/sys")]))
    with pytest.raises(StoreLostError, match=r"/proc/nowhere/store\.db.*/sys/store\.db"):
        await store.recover()
    await store.close()
