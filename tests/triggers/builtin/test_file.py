"""The trigger that waits for a file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.triggers.builtin.triggers_contract import fired, made_again

from tidemill.triggers.builtin.file import FileTrigger, look


async def test_a_file_that_is_there_fires_at_once(tmp_path):
    path = tmp_path / "done"
    path.write_text("tide")
    (event,) = await fired(FileTrigger(path, poll_seconds=60), seconds=30)
    assert event.payload == {"path": str(path), "size_bytes": 4, "modified_ns": path.stat().st_mtime_ns}
    found = path.stat()
    assert event.identity == f"{path}@{found.st_mtime_ns}.4.{found.st_ino}"


async def test_each_version_of_a_file_is_an_event_of_its_own(tmp_path):
    path = tmp_path / "done"
    identities = []
    for text, modified_ns in (("1", 1), ("22", 1), ("33", 2)):
        path.write_text(text)
        os.utime(path, ns=(modified_ns, modified_ns))
        for _ in range(2):
            (event,) = await fired(FileTrigger(path))
            identities.append(event.identity)
    (tmp_path / "new").write_text("44")
    os.utime(tmp_path / "new", ns=(2, 2))
    os.replace(tmp_path / "new", path)
    (event,) = await fired(FileTrigger(path))
    identities.append(event.identity)
    assert [identities.count(one) for one in dict.fromkeys(identities)] == [2, 2, 2, 1]


async def test_the_identity_of_a_file_with_a_long_path_is_one_that_a_store_takes(tmp_path):
    folder = tmp_path.joinpath(*(f"{n:02}{'ü' * 100}" for n in range(12)))
    folder.mkdir(parents=True)
    identities = set()
    for name in ("a", "b"):
        (folder / name).write_text("x")
        os.utime(folder / name, (1, 1))
        (event,) = await fired(FileTrigger(folder / name))
        assert len(event.identity.encode()) < 512
        identities.add(event.identity.partition("@")[0])
    assert len(identities) == 2


async def test_a_file_is_waited_for_in_a_folder_that_does_not_exist_either(tmp_path):
    path = tmp_path / "later" / "done"
    waiting = asyncio.ensure_future(fired(FileTrigger(path, poll_seconds=0.02)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    path.parent.mkdir()
    path.mkdir()  # no file
    await asyncio.sleep(0.1)
    assert not waiting.done()
    path.rmdir()
    (tmp_path / "new").write_text("")
    os.replace(tmp_path / "new", path)
    assert len(await waiting) == 1


async def test_a_file_that_is_being_written_is_waited_for_until_it_settles(tmp_path):
    path = tmp_path / "slow"
    path.write_text("")
    waiting = asyncio.ensure_future(fired(FileTrigger(path, poll_seconds=0.05, settle_seconds=0.5)))
    for n in range(10):
        with path.open("a") as out:
            out.write("x" * n)
        await asyncio.sleep(0.1)
        assert not waiting.done()
    (event,) = await waiting
    assert event.payload["size_bytes"] == 45


async def test_a_path_that_cannot_be_inspected_is_an_error(tmp_path):
    with pytest.raises(OSError, match="too long"):
        await fired(FileTrigger(tmp_path / ("x" * 300)))


def test_it_is_created_again_as_it_was():
    again = made_again(FileTrigger(Path("/a/b"), poll_seconds=2, settle_seconds=1.5))
    assert isinstance(again, FileTrigger)
    assert (again.path, again.poll_seconds, again.settle_seconds) == ("/a/b", 2, 1.5)


@pytest.mark.parametrize(("path", "kwargs"), [("", {}), ("x", {"poll_seconds": 0}), ("x", {"settle_seconds": -1})])
def test_arguments_that_make_no_sense_are_refused(path, kwargs):
    with pytest.raises(ValueError, match=r"path is empty|must be positive|must not be negative"):
        FileTrigger(path, **kwargs)


@pytest.mark.parametrize("pattern", ["in/*.csv", "*/a.csv", "i?/[ab].csv", "in", ".", "in/[x].csv"])
async def test_patterns_and_folders_lead_to_their_files(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / "empty").mkdir(parents=True)
    name = "[x].csv" if pattern.endswith("[x].csv") else "a.csv"
    waiting = asyncio.ensure_future(fired(FileTrigger(pattern, poll_seconds=0.02)))
    await asyncio.sleep(0.1)
    assert not waiting.done()

    (tmp_path / "in" / name).write_text("tide")

    (event,) = await waiting
    assert os.path.samefile(event.payload["path"], tmp_path / "in" / name)
    assert event.payload["size_bytes"] == 4


async def test_two_stars_match_any_number_of_folders_where_the_trigger_is_recursive(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.csv").write_text("")
    (event,) = await fired(FileTrigger(f"{tmp_path}/**/*.csv", recursive=True))
    assert event.payload["path"] == str(tmp_path / "a" / "b" / "c.csv")


async def test_of_the_files_of_a_folder_the_first_that_settles_fires(tmp_path):
    waiting = asyncio.ensure_future(fired(FileTrigger(tmp_path, poll_seconds=0.02, settle_seconds=0.3)))
    (tmp_path / "done").write_text("x")
    for n in range(100):
        with (tmp_path / "busy").open("a") as out:
            out.write("x" * n)
        await asyncio.sleep(0.02)
        if waiting.done():
            break
    (event,) = await waiting
    assert event.payload["path"] == str(tmp_path / "done")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere/a", "no folder {0}/nowhere"),
        ("file/a", "no folder {0}/file: the path leads through a file"),
        ("file/a/b", "no folder {0}/file/a: the path leads through a file"),
        ("empty", "a folder without files"),
        ("link", "a broken link"),
        ("pipe", "a device, pipe or socket instead of a regular file"),
        ("empty/*", "no match for the pattern"),
        ("p*", "a device, pipe or socket instead of a regular file at {0}/pipe"),
        ("nowhere/*/a", "no folder {0}/nowhere"),
        ("empty/a", "nothing"),
    ],
)
def test_what_is_there_instead_of_a_file_is_explained(tmp_path, path, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    assert look(f"{tmp_path}/{path}", False, every=False) == ({}, said.format(tmp_path))


@pytest.mark.parametrize("path", ["", "~", "~/a", "s3://bucket/key", "file:///a"])
def test_a_path_at_which_nothing_can_be_found_is_refused(path):
    with pytest.raises(ValueError, match="path"):
        FileTrigger(path)
