"""Hosts of a list that are asked what they do: one, several, killed ones, silent ones."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.process.identity_lock import IdentityLock
from tidemill.runtime.sockets import control_socket
from tidemill.services.triggerer.lists.control import ask, control_server

SPECS = Path("spec.yaml")


@pytest.fixture
def folder(monkeypatch) -> Iterator[Path]:
    """Name a folder for sockets; a short name, as the kernel wants it."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
    yield made / "tidemill"
    shutil.rmtree(made)


async def test_all_hosts_of_a_list_answer_and_the_one_that_runs_it_comes_first(folder):
    waits = {"pid": 1, "waits_for": {"process": 2}}
    servers = [control_server(SPECS, lambda: waits), control_server(SPECS, lambda: {"pid": 2, "waits_for": None})]
    other = control_server(Path("other.yaml"), lambda: {"pid": 3})
    for server in (*servers, other):
        await server.start()
    answers = await asyncio.to_thread(ask, SPECS)
    assert ([report["pid"] for report in answers.reports], answers.silent) == ([2, 1], 0)
    for server in (*servers, other):
        await server.close()
    assert list(folder.glob("*.sock")) == []
    with pytest.raises(RemoteError, match="no trigger host runs"):
        ask(SPECS)


async def test_the_socket_of_a_killed_host_is_not_asked_and_goes_with_the_next_start(folder):
    killed = control_server(SPECS, lambda: {"pid": 1})
    await killed.start()
    [left] = folder.glob("*.sock")
    assert killed._server is not None
    killed._server.close()
    with pytest.raises(RemoteError, match="no trigger host runs"):
        ask(SPECS)
    server = control_server(SPECS, lambda: {"pid": 2})
    await server.start()
    assert not left.exists()
    answers = await asyncio.to_thread(ask, SPECS)
    assert [report["pid"] for report in answers.reports] == [2]
    await server.close()


async def test_a_host_that_does_not_answer_is_counted_and_the_others_are_heard(folder, monkeypatch):
    monkeypatch.setattr(control_socket, "ANSWER_SECONDS", 0.2)
    server = control_server(SPECS, lambda: {"pid": 2})
    await server.start()
    [path] = folder.glob("*.sock")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path.with_name(f"{path.name[:26]}00000000.sock")))
        silent.listen()
        answers = await asyncio.to_thread(ask, SPECS)
    assert ([report["pid"] for report in answers.reports], answers.silent) == ([2], 1)
    await server.close()


async def test_a_folder_that_cannot_be_used_is_named(monkeypatch, tmp_path):
    (tmp_path / "tidemill").write_text("not a folder")
    monkeypatch.setattr(control_socket, "private_directory", lambda environ=None: tmp_path / "tidemill")
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        await control_server(SPECS, dict).start()


# -- the lock of a list


def test_a_lock_has_one_holder_and_names_it(tmp_path):
    first, second = IdentityLock("triggers", "list", tmp_path), IdentityLock("triggers", "list", tmp_path)
    assert first.acquire()
    assert first.acquire()
    assert not second.acquire()
    assert (first.holder, second.identity) == ("", "")
    assert second.holder.isdecimal()
    identity = first.identity
    first.release()
    first.release()
    assert second.acquire()
    assert second.identity == identity
    second.release()


def test_locks_of_other_lists_folders_and_files_are_other_locks(tmp_path):
    locks = [
        IdentityLock("triggers", "list", tmp_path),
        IdentityLock("triggers", "other", tmp_path),
        IdentityLock("triggers", "list", tmp_path / "sub"),
    ]
    assert all(lock.acquire() for lock in locks)
    found = {lock.identity for lock in locks}
    next(tmp_path.glob("*.lock")).unlink()
    again = [IdentityLock("triggers", "list", tmp_path), IdentityLock("triggers", "other", tmp_path)]
    found |= {lock.identity for lock in again if lock.acquire()}
    assert len(found) == 4


def test_without_a_boot_id_no_lock_identifies_anything(tmp_path, monkeypatch):
    monkeypatch.setattr("tidemill.runtime.process.boot._BOOT_ID", tmp_path / "nothing")
    lock = IdentityLock("triggers", "list", tmp_path)
    assert lock.acquire()
    assert (lock.held, lock.identity) == (True, "")


def test_a_lock_s_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        IdentityLock("triggers", "list", tmp_path / "file").acquire()
