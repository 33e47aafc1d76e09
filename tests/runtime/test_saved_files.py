"""What counts as a save of the user's code."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.until import wait_until

from tidemill.runtime.files import code_watch
from tidemill.runtime.files.code_watch import SavedFiles, find_code_folders, is_code


def files_of(root: Path, *others: Path) -> SavedFiles:
    return SavedFiles(lambda: find_code_folders(root), others)


def test_folders_with_code_are_found_and_environments_are_not(tmp_path: Path) -> None:
    for name in (
        "pkg/handler.py",
        ".venv/lib/x.py",
        "env/pyvenv.cfg",
        "env/lib/x.py",
        "node_modules/x.py",
        "data/x.txt",
        "output/x.py",
        "build/lib/x.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    assert find_code_folders(tmp_path) == {tmp_path, tmp_path / "pkg"}


def test_folders_full_of_results_are_looked_into_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_watch, "MAX_FOLDERS", 20)
    listed: list[object] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scan(path))
    for number in range(100):
        (tmp_path / "data" / "day" / f"hour={number}").mkdir(parents=True)
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    (tmp_path / "src" / "pkg" / "handler.py").touch()

    assert find_code_folders(tmp_path) == {tmp_path, tmp_path / "src" / "pkg"}
    assert len(listed) == 20


def test_the_fingerprint_follows_the_content_of_code_and_of_named_files_only(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text("a = 1")
    config = tmp_path / "tidemill.yaml"
    config.write_text("{}")
    files = files_of(tmp_path, config)
    first = files.fingerprint()

    (tmp_path / "test_handler.py").write_text("assert 0")
    (tmp_path / "results.jsonl").write_text("1")
    os.utime(tmp_path / "handler.py")
    assert files.fingerprint() == first

    config.write_text("kafka: {}")
    second = files.fingerprint()
    assert second != first
    (tmp_path / "handler.py").write_text("a = 2")
    assert files.fingerprint() not in (first, second)
    (tmp_path / "handler.py").write_text("a = 1")
    assert files.fingerprint() == second


def test_a_file_that_is_moved_counts_as_a_change(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    files = files_of(tmp_path)
    first = files.fingerprint()

    (tmp_path / "a.py").rename(tmp_path / "b.py")

    assert files.fingerprint() != first


def test_hidden_files_of_editors_are_not_code() -> None:
    assert not is_code(".#handler.py")
    assert not is_code("handler.py~")


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[queue.SimpleQueue[str]]:
    """Watch the folder; gives the fingerprint after each change."""
    files = files_of(tmp_path)
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()
    files.watch(lambda: seen.put(files.fingerprint()))
    seen.get(timeout=60)  # it says so once it watches
    yield seen
    files.close()


def until_seen(saves: queue.SimpleQueue[str], wanted: str) -> None:
    wait_until(lambda: saves.get(timeout=60) == wanted, what="the save is noticed")


def test_a_save_just_before_the_system_watches_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(*folders: Path, stop_event: threading.Event, **settings: object) -> Iterator[set[object]]:
        (tmp_path / "handler.py").write_text("a = 2")
        while not stop_event.wait(0.01):
            yield set()  # nothing has changed since then

    monkeypatch.setattr("watchfiles.watch", watch)
    (tmp_path / "handler.py").write_text("a = 1")
    files = files_of(tmp_path)
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()
    files.watch(lambda: seen.put(files.fingerprint()))
    try:
        assert seen.get(timeout=60) != seen.get(timeout=60)
    finally:
        files.close()


def test_a_save_is_noticed_however_the_editor_writes_the_file(tmp_path: Path, saves: queue.SimpleQueue[str]) -> None:
    (tmp_path / "handler.py").write_text("a = 1")
    until_seen(saves, files_of(tmp_path).fingerprint())

    (tmp_path / "handler.py.new").write_text("a = 2")
    (tmp_path / "handler.py.new").replace(tmp_path / "handler.py")
    until_seen(saves, files_of(tmp_path).fingerprint())


def test_a_new_folder_with_code_is_watched_too(tmp_path: Path, saves: queue.SimpleQueue[str]) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "rules.py").write_text("a = 1")
    (tmp_path / "handler.py").write_text("import pkg.rules")
    until_seen(saves, files_of(tmp_path).fingerprint())

    (tmp_path / "pkg" / "rules.py").write_text("a = 2")
    until_seen(saves, files_of(tmp_path).fingerprint())
