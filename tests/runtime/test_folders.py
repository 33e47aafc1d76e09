"""The cache folder, where it can be written and where not; temporary folders, with and without owner."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidemill.core.errors import ConfigError
from tidemill.runtime.files import folders
from tidemill.runtime.files.folders import OwnedFolder, create_folder, user_cache_folder, writable_cache_folder
from tidemill.runtime.files.lock import lock_file

PREFIX = "tidemill-test-"
OWNER = """
import sys
from tidemill.runtime.files.folders import OwnedFolder
folder = OwnedFolder(sys.argv[1])
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    command = [sys.executable, "-c", OWNER, PREFIX]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def test_the_cache_folder_follows_the_xdg_specification(tmp_path: Path) -> None:
    assert user_cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "tidemill"
    assert user_cache_folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "tidemill"


def test_a_cache_folder_that_can_be_written_is_used(tmp_path: Path) -> None:
    assert writable_cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "tidemill"


def test_without_a_cache_folder_that_can_be_written_a_temporary_one_of_this_user_is_used(temporary: Path) -> None:
    for place in ("/proc/1", "/dev/null"):
        found = writable_cache_folder({"XDG_CACHE_HOME": place})
        assert found == temporary / f"tidemill-cache-{os.getuid()}"
        assert found.stat().st_mode & 0o777 == 0o700


def test_a_temporary_cache_folder_that_cannot_be_used_is_passed_over(temporary: Path) -> None:
    (temporary / f"tidemill-cache-{os.getuid()}").write_text("")
    found = writable_cache_folder({"XDG_CACHE_HOME": "/dev/null"})
    assert found.is_dir()
    assert found.parent == temporary


def test_a_user_without_a_home_has_a_temporary_cache_folder(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert writable_cache_folder({}) == temporary / f"tidemill-cache-{os.getuid()}"


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one() -> None:
    with owner() as (process, left):
        (left / "zip").write_text("x")
        process.kill()
        process.wait()
    folder = OwnedFolder(PREFIX)
    assert not left.exists()
    assert folder.path.exists()
    folder.cleanup()
    folder.cleanup()
    assert not folder.path.exists()


def test_the_folder_of_a_process_that_lives_is_left_alone() -> None:
    with owner() as (_, used):
        OwnedFolder(PREFIX).cleanup()
        assert used.exists()


@pytest.mark.parametrize("moment", ["locked", "removed", "unlocked"])
def test_a_folder_that_another_process_takes_for_left_over_before_it_is_locked_is_replaced(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    flock, met, held = fcntl.flock, [], []

    def lock_late(fd: int, how: int) -> None:
        if not met:
            folder = Path(os.readlink(f"/proc/self/fd/{fd}")).parent
            met.append(folder)
            if moment == "locked":
                held.append(lock_file(folder / ".owner"))
            elif moment == "removed":
                shutil.rmtree(folder)
            else:
                folders._remove_without_owner(folder)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    folder = OwnedFolder(PREFIX)
    assert folder.path.exists()
    assert folder.path != met[0]
    assert not met[0].exists()
    folder.cleanup()
    for fd in held:
        os.close(fd)


def test_a_folder_without_a_lock_is_removed_if_it_is_old_and_empty(temporary: Path) -> None:
    made = {name: temporary / f"{PREFIX}{name}" for name in ("young", "old", "full")}
    for name, folder in made.items():
        folder.mkdir()
        if name == "full":
            (folder / "file").write_text("x")
        if name != "young":
            os.utime(folder, (1.0, 1.0))
    (temporary / f"{PREFIX}link").symlink_to(made["old"])
    OwnedFolder(PREFIX).cleanup()
    assert {name for name, folder in made.items() if folder.exists()} == {"young", "full"}
    assert (temporary / f"{PREFIX}link").is_symlink()


def test_a_folder_that_cannot_be_created_is_reported_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file is a file, not a folder; choose another folder"):
        create_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"file/below cannot be created: Not a directory; choose another one"):
        create_folder(tmp_path / "file" / "below")
    create_folder(tmp_path / "new" / "below")
    create_folder(tmp_path / "new" / "below")
