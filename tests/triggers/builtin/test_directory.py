"""The trigger for files of a folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.triggers.builtin.triggers_contract import first, made_again
from tests.until import LIMIT_SECONDS, until

from tidemill.core.errors import ConfigError
from tidemill.core.triggers.stable_files import Version
from tidemill.triggers.base import TriggerEvent
from tidemill.triggers.builtin.directory import DirectoryTrigger
from tidemill.triggers.producers import directory as module
from tidemill.triggers.producers.directory import DirectorySettings, FoundFile, Looked, look_twice
from tidemill.triggers.shared_stream import SharedStreamManager, route


class Watching:
    """A trigger of a manager, and what it fired."""

    def __init__(self, manager: SharedStreamManager, trigger_id: int, trigger: DirectoryTrigger) -> None:
        self.events: list[TriggerEvent] = []
        self._manager = manager
        self._id = trigger_id
        self._key = trigger.shared_stream_key()
        self.task = asyncio.ensure_future(self._run(route(manager, trigger_id, trigger).events))

    async def _run(self, events: AsyncIterator[TriggerEvent]) -> None:
        async for event in events:
            self.events.append(event)

    @property
    def names(self) -> list[str]:
        return [event.payload["name"] for event in self.events]

    async def until(self, condition: Callable[[], Any], seconds: float = LIMIT_SECONDS) -> None:
        def met() -> Any:
            if self.task.done():
                self.task.result()
            return condition()

        await until(met, seconds)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        await self._manager.unsubscribe(self._id, self._key)


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Callable[..., Watching]]:
    manager = SharedStreamManager()
    made: list[Watching] = []

    def start(folder: Path | None = None, **kwargs: Any) -> Watching:
        trigger = DirectoryTrigger(folder or tmp_path, **{"settle_seconds": 0.2, **kwargs})
        made.append(Watching(manager, len(made), trigger))
        return made[-1]

    yield start
    for watching in made:
        await watching.close()
    await manager.stop_all()


async def test_existing_files_come_first_and_then_new_ones_each_once(tmp_path, watch):
    for n in range(5):
        (tmp_path / f"old-{n}").write_text(str(n))
    watching = watch()
    await watching.until(lambda: len(watching.events) == 5)
    for n in range(5):
        (tmp_path / f"new-{n}").write_text(str(n))
    await watching.until(lambda: len(watching.events) == 10)
    (tmp_path / "last").write_text("x")
    await watching.until(lambda: "last" in watching.names)
    assert len(watching.events) == 11
    assert {name[:3] for name in watching.names[:5]} == {"old"}
    event = watching.events[-1]
    found = (tmp_path / "last").stat()
    assert event.payload == {
        "path": str(tmp_path / "last"),
        "name": "last",
        "size_bytes": 1,
        "modified_ns": found.st_mtime_ns,
    }


async def test_nothing_is_lost_or_doubled_while_files_arrive_before_during_and_after_the_start(tmp_path, watch):
    stop, written = asyncio.Event(), []

    async def write() -> None:
        while not stop.is_set():
            name = f"f-{len(written):04}"
            (tmp_path / f".{name}").write_text(name)
            os.replace(tmp_path / f".{name}", tmp_path / name)
            written.append(name)
            await asyncio.sleep(0.003)

    writing = asyncio.ensure_future(write())
    await asyncio.sleep(0.1)
    watchings = [watch(settle_seconds=0.0)]
    for _ in range(3):
        await asyncio.sleep(0.15)
        watchings.append(watch(settle_seconds=0.0))  # they share the first one's watch
    await asyncio.sleep(0.3)
    stop.set()
    await writing
    for watching in watchings:
        await watching.until(lambda watching=watching: len(watching.events) >= len(written))
        assert sorted(watching.names) == written


async def test_a_file_that_is_being_written_comes_once_and_complete(tmp_path, watch):
    watching = watch(settle_seconds=0.4)
    await asyncio.sleep(0.3)
    with (tmp_path / "slow").open("w") as out:
        for _ in range(10):
            out.write("x" * 100)
            out.flush()
            await asyncio.sleep(0.1)
            assert watching.events == []
    await watching.until(lambda: watching.events)
    assert [event.payload["size_bytes"] for event in watching.events] == [1000]


async def test_a_file_that_was_moved_there_or_changes_comes_in_its_new_form(tmp_path, watch):
    folder = tmp_path / "in"
    folder.mkdir()
    watching = watch(folder)
    (tmp_path / "x").write_text("1")
    os.utime(tmp_path / "x", (1, 1))  # as old as the hills
    os.replace(tmp_path / "x", folder / "x")
    await watching.until(lambda: len(watching.events) == 1)
    (folder / "x").write_text("22")
    await watching.until(lambda: len(watching.events) == 2)
    os.replace(folder / "x", folder / "y")
    await watching.until(lambda: len(watching.events) == 3)
    assert [(event.payload["name"], event.payload["size_bytes"]) for event in watching.events] == [
        ("x", 1),
        ("x", 2),
        ("y", 2),
    ]
    assert len({event.identity for event in watching.events}) == 3


async def test_each_trigger_selects_by_name_and_hidden_files_only_if_it_says_so(tmp_path, watch):
    everything, csv, hidden = (
        watch(recursive=True),
        watch(pattern="*.csv", recursive=True),
        watch(pattern=".*", recursive=True),
    )
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for name in ("a.csv", "b.txt", "sub/c.csv", "sub/deep/d.txt", ".e.csv"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "f.csv").write_text("f")
    await everything.until(lambda: len(everything.events) >= 4)
    await csv.until(lambda: len(csv.events) >= 2)
    await hidden.until(lambda: len(hidden.events) >= 2)
    assert sorted(everything.names) == ["a.csv", "b.txt", "sub/c.csv", "sub/deep/d.txt"]
    assert sorted(csv.names) == ["a.csv", "sub/c.csv"]
    assert sorted(hidden.names) == [".e.csv", ".git/f.csv"]


async def test_folders_within_it_do_not_belong_to_it_unless_it_says_so(tmp_path, watch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_text("a")
    watching = watch()
    await asyncio.sleep(0.3)
    (tmp_path / "sub" / "b").write_text("b")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "nothing")
    (tmp_path / "c").write_text("c")
    await watching.until(lambda: watching.events)
    assert watching.names == ["c"]


async def test_a_folder_that_does_not_exist_is_an_error_that_says_what_to_do(tmp_path, watch):
    watching = watch(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"the folder '.*/none' does not exist; create it, or set missing: wait"):
        await watching.until(lambda: False, seconds=10)


async def test_a_file_instead_of_a_folder_is_an_error(tmp_path, watch):
    (tmp_path / "file").write_text("x")
    watching = watch(tmp_path / "file")
    with pytest.raises(ConfigError, match="does not exist; create it"):
        await watching.until(lambda: False, seconds=10)


async def test_a_folder_can_be_waited_for_and_may_be_replaced(tmp_path, watch, monkeypatch):
    monkeypatch.setattr(module, "_MISSING_SECONDS", 0.02)
    folder = tmp_path / "later"
    watching = watch(folder, missing="wait", rescan_seconds=0.2)
    await asyncio.sleep(0.4)
    folder.mkdir()
    (folder / "a").write_text("a")
    await watching.until(lambda: watching.names == ["a"])
    (folder / "a").unlink()
    folder.rmdir()
    await asyncio.sleep(0.4)
    folder.mkdir()
    (folder / "b").write_text("b")
    await watching.until(lambda: watching.names == ["a", "b"])
    (folder / "c").write_text("c")
    await watching.until(lambda: watching.names == ["a", "b", "c"])


async def test_where_the_system_does_not_notify_the_process_is_polled(tmp_path, watch, monkeypatch):
    import watchfiles

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "the limit of watches is reached")

    monkeypatch.setattr(watchfiles, "watch", refuse)
    watching = watch(rescan_seconds=0.1)
    await asyncio.sleep(0.2)
    (tmp_path / "a").write_text("a")
    await watching.until(lambda: watching.names == ["a"])


async def test_a_name_that_is_not_text_is_left_out_and_stops_nothing(tmp_path, watch):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).write_text("x")
    (tmp_path / "b").write_text("x")
    watching = watch()
    await watching.until(lambda: watching.events)
    assert watching.names == ["b"]


async def test_existing_files_come_again_after_a_restart_under_the_same_identity(tmp_path):
    for n in range(3):
        (tmp_path / str(n)).write_text(str(n))
    one = await first(DirectoryTrigger(tmp_path, settle_seconds=0), 3)
    other = await first(DirectoryTrigger(tmp_path, settle_seconds=0), 3)
    assert [event.identity for event in one] == [event.identity for event in other]


async def test_a_file_that_was_replaced_by_one_of_the_same_size_and_age_is_another(tmp_path):
    identities = []
    for name in ("a", "new"):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, ns=(7, 7))
        os.replace(tmp_path / name, tmp_path / "a")
        (event,) = await first(DirectoryTrigger(tmp_path, settle_seconds=0), 1)
        identities.append(event.identity)
    assert len(set(identities)) == 2
    assert all(identity.startswith("a@7.1.") for identity in identities)


async def test_many_files_that_are_there_do_not_overflow_a_slow_subscriber(tmp_path):
    for n in range(50):
        (tmp_path / str(n)).write_text(str(n))
    manager = SharedStreamManager(max_subscriber_queue=4)
    events: Any = route(manager, 1, DirectoryTrigger(tmp_path, settle_seconds=0)).events
    names = set()
    for _ in range(50):
        names.add((await asyncio.wait_for(events.__anext__(), 30)).payload["name"])
        await asyncio.sleep(0.002)
    assert len(names) == 50
    await events.aclose()
    await manager.stop_all()


async def test_fired_identities_are_kept_until_the_stream_can_no_longer_redeliver_them(tmp_path):
    (tmp_path / "a").write_text("a")
    (path, version), *_ = await look_twice(DirectorySettings(str(tmp_path), settle_seconds=0))
    now = asyncio.get_running_loop().time()

    async def stream() -> AsyncIterator[Any]:
        yield Looked(now)
        for at in (now, now + 60, now + 60):
            yield FoundFile(path, version)
            yield Looked(at)
        yield FoundFile(path, Version(1, 2, 3))
        yield Looked(now + 120)
        yield FoundFile(path, version)

    fired = [event async for event in DirectoryTrigger(tmp_path, settle_seconds=0).filter_shared_stream(stream())]
    assert [event.payload["size_bytes"] for event in fired] == [1, 2, 1]


def test_it_is_created_again_as_it_was_and_shares_by_what_it_looks_at(tmp_path):
    one = DirectoryTrigger(
        tmp_path, pattern="*.csv", recursive=True, settle_seconds=2, rescan_seconds=5, missing="wait"
    )
    again = made_again(one)
    assert isinstance(again, DirectoryTrigger)
    assert again.shared_stream_key() == one.shared_stream_key()
    assert DirectoryTrigger(tmp_path).shared_stream_key() != one.shared_stream_key()
    other_names = DirectoryTrigger(tmp_path, recursive=True, settle_seconds=2, rescan_seconds=5, missing="wait")
    assert other_names.shared_stream_key() == one.shared_stream_key()


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [("", {}), ("x", {"settle_seconds": -1}), ("x", {"rescan_seconds": 0}), ("x", {"missing": "ignore"})],
)
def test_arguments_that_make_no_sense_are_refused(path, kwargs):
    with pytest.raises(
        ValueError, match=r"path is empty|must not be negative|must be positive|missing must be fail or wait"
    ):
        DirectoryTrigger(path, **kwargs)


@pytest.mark.parametrize("arguments", [{"pattern": ""}, {"pattern": "/in/*"}, {"pattern": "a/*.csv"}, {"path": "~/in"}])
def test_a_folder_or_pattern_that_never_has_a_file_is_refused(arguments):
    with pytest.raises(ValueError, match=r"pattern|path"):
        DirectoryTrigger(**{"path": "in"} | arguments)
    DirectoryTrigger("in", pattern="a/*.csv", recursive=True)
