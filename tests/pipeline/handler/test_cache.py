"""The cache over real SQLite files: what is read back after what, and what a failing disk does."""

from __future__ import annotations

import asyncio
import datetime
import os
import resource
import sqlite3
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import pytest
import structlog
from tests.until import until

from tidemill.config.settings import CacheSettings
from tidemill.core.errors import HandlerError
from tidemill.pipeline.handler.cache import Cache, NoCache


async def opened(folder: Path, **settings: Any) -> Cache:
    settings = {"flush_interval_seconds": 600.0, **settings}
    cache = Cache(CacheSettings(enabled=True, path=str(folder), **settings), "g.worker.0")
    await cache.open()
    return cache


def rows(folder: Path) -> dict[str, Any]:
    db = sqlite3.connect(folder / "g.worker.0-cache.db")
    try:
        return dict(db.execute("SELECT key, expires_at FROM entries ORDER BY rowid"))
    finally:
        db.close()


async def test_what_was_set_is_read_back_at_once_and_after_a_restart(tmp_path: Path) -> None:
    cache = await opened(tmp_path)
    cache.set("order-7", {"total": 3, "lines": ["a", b"b", None, 1.5]})
    assert await cache.get("order-7") == {"total": 3, "lines": ["a", b"b", None, 1.5]}
    assert cache.peek("order-7") == {"total": 3, "lines": ["a", b"b", None, 1.5]}
    assert "order-7" in cache
    await cache.close()
    cache = await opened(tmp_path)
    assert cache.peek("order-7") == {"total": 3, "lines": ["a", b"b", None, 1.5]}
    cache.delete("order-7")
    assert "order-7" not in cache
    assert await cache.get("order-7", "nothing") == "nothing"
    await cache.close()
    cache = await opened(tmp_path)
    assert await cache.get("order-7") is None
    statistics = cache.statistics()
    assert (statistics.hits, statistics.misses) == (0, 1)
    await cache.close()


async def test_what_left_the_memory_is_read_from_the_file(tmp_path: Path) -> None:
    cache = await opened(tmp_path, max_memory_entries=10)
    for n in range(100):
        cache.set(str(n), n)
    assert [await cache.get(str(n)) for n in range(100)] == list(range(100)), "before anything could be written"
    await until(lambda: len(rows(tmp_path)) == 100)
    await until(lambda: cache.peek("3", "not in memory") == "not in memory", what="the cache knows what is written")
    assert cache.statistics().entries == 10
    assert "3" not in cache
    assert await asyncio.gather(*[cache.get(str(n)) for n in range(100)]) == list(range(100))
    assert await cache.get("100") is None
    await cache.close()
    cache = await opened(tmp_path, max_memory_entries=10)
    assert cache.statistics().entries == 10
    assert [await cache.get(str(n)) for n in range(100)] == list(range(100))
    await cache.close()


async def test_it_is_written_in_its_interval_and_sooner_when_much_has_changed(tmp_path: Path) -> None:
    cache = await opened(tmp_path, flush_interval_seconds=0.05)
    cache.set("a", 1)
    await until(lambda: "a" in rows(tmp_path))
    await cache.close()
    cache = await opened(tmp_path, max_memory_entries=5)
    for n in range(5):
        cache.set(str(n), n)
    await until(lambda: len(rows(tmp_path)) == 6)
    await cache.close()


async def test_an_entry_ends_with_its_time_by_the_wall_clock_also_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = await opened(tmp_path)
    cache.set("short", 1, ttl=60)
    cache.set("long", 2, ttl=3600)
    cache.set("ever", 3)
    await cache.close()
    assert rows(tmp_path)["ever"] is None
    assert abs(rows(tmp_path)["short"] - time.time() - 60) < 10
    now = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: now)
    cache = await opened(tmp_path)
    assert [await cache.get(key) for key in ("short", "long", "ever")] == [None, 2, 3]
    now += 3600
    assert [cache.peek(key) for key in ("short", "long", "ever")] == [None, None, 3]
    cache.set("more", 4)
    await cache.close()
    assert set(rows(tmp_path)) == {"ever", "more"}, "what has expired is deleted with the next flush"


class Model(pydantic.BaseModel):
    name: str
    when: datetime.date


@dataclass
class Plain:
    x: int


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ((1, 2), [1, 2]),
        (Model(name="a", when=datetime.date(2024, 1, 2)), {"name": "a", "when": "2024-01-02"}),
        (Plain(3), {"x": 3}),
        (
            datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
            datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
        ),
        (2**63, 2**63),
    ],
)
async def test_values_come_back_as_messagepack_has_them_from_memory_as_from_the_file(
    tmp_path: Path, value: object, kept: object
) -> None:
    cache = await opened(tmp_path)
    cache.set("k", value)
    assert cache.peek("k") == kept
    await cache.close()
    cache = await opened(tmp_path)
    assert await cache.get("k") == kept
    await cache.close()


async def test_a_value_that_is_changed_after_it_was_set_or_read_does_not_change_the_cache(tmp_path: Path) -> None:
    cache = await opened(tmp_path)
    value = [1]
    cache.set("k", value)
    value.append(2)
    (await cache.get("k")).append(3)
    assert cache.peek("k") == [1]
    await cache.close()


@pytest.mark.parametrize(
    ("key", "value", "ttl", "error", "text"),
    [
        (7, 1, None, TypeError, "must be text"),
        ("\ud800", 1, None, ValueError, "surrogate"),
        ("k", object(), None, TypeError, "the cache cannot store the value of 'k'"),
        ("k", 2**64, None, TypeError, "the cache cannot store the value of 'k'"),
        ("k", 1, 0, ValueError, "ttl must be a positive number"),
        ("k", 1, "60", ValueError, "ttl must be a positive number"),
        ("k", 1, True, ValueError, "ttl must be a positive number"),
        ("k", 1, float("nan"), ValueError, "ttl must be a positive number"),
    ],
)
async def test_what_cannot_be_kept_is_refused_where_it_is_set(
    tmp_path: Path, key: Any, value: Any, ttl: Any, error: type[Exception], text: str
) -> None:
    cache = await opened(tmp_path)
    with pytest.raises(error, match=text):
        cache.set(key, value, ttl)
    assert cache.statistics().entries == 0
    await cache.close()


@pytest.mark.parametrize("damage", ["no database at all" * 100, b"\0" * 5000, "in the middle"])
async def test_a_broken_file_is_set_aside_with_a_warning(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "g.worker.0-cache.db"
    if damage == "in the middle":
        cache = await opened(tmp_path)
        for n in range(2000):
            cache.set(str(n), "x" * 100)
        await cache.close()
        with open(path, "r+b") as stream:
            stream.seek(4096 * 2)
            stream.write(b"\xff" * 4096 * 20)
    else:
        path.write_bytes(damage.encode() if isinstance(damage, str) else damage)
    was = path.read_bytes()
    with structlog.testing.capture_logs() as logs:
        cache = await opened(tmp_path)
    assert [entry["log_level"] for entry in logs] == ["warning"]
    (aside,) = tmp_path.glob("*.broken-*")
    assert aside.read_bytes() == was
    assert logs[0]["kept_as"] == str(aside)
    cache.set("k", 1)
    await cache.close()
    assert list(rows(tmp_path)) == ["k"]


async def test_a_file_that_breaks_while_it_is_used_is_set_aside_too(tmp_path: Path) -> None:
    path = tmp_path / "g.worker.0-cache.db"
    cache = await opened(tmp_path, max_memory_entries=1000)
    for n in range(5000):
        cache.set(str(n), "x" * 100)
    await until(lambda: len(rows(tmp_path)) == 5000)
    await until(lambda: cache.peek("0") is None, what="the cache knows what is written")
    await cache._in_thread(cache._file.close)
    with open(path, "r+b") as stream:
        stream.write(b"\xff" * 4096 * 20)
    with structlog.testing.capture_logs() as logs:
        assert await cache.get("0") is None
        assert await cache.get("4999") == "x" * 100, "what is in memory is served"
        cache.set("new", 1)
        await cache.close()
    assert [entry["event"] for entry in logs] == ["the cache's file is damaged; a new one is started"]
    assert "new" in rows(tmp_path)


@contextmanager
def full_disk(size: int) -> Any:
    """No file may grow beyond this size: what a full disk looks like to one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_with_a_full_disk_it_continues_in_memory_says_so_and_recovers(tmp_path: Path) -> None:
    cache = await opened(tmp_path, flush_interval_seconds=0.02, max_memory_entries=50)
    cache.set("old", "first")
    await until(lambda: "old" in rows(tmp_path))
    assert cache.describe_wait() is None
    with full_disk(64 * 1024), structlog.testing.capture_logs() as logs:
        cache.set("old", "second")
        for n in range(200):
            cache.set(f"big-{n}", "x" * 5000)
            if n % 20 == 0:
                await asyncio.sleep(0)
        await until(cache.describe_wait)
        assert "cannot be written" in (cache.describe_wait() or "")
        assert "continuing in memory only" in (cache.describe_wait() or "")
        assert await cache.get("big-199") == "x" * 5000
        for n in range(200):
            cache.set(f"big-{n}", n)
        await until(lambda: cache._known.lost)
        assert await cache.get("old") in (None, "second"), "never the value before"
        assert await cache.get("big-199") == 199
    assert "the cache continues in memory only" in {entry["event"] for entry in logs}
    await until(lambda: cache.describe_wait() is None)
    await cache.close()
    assert "big-199" in rows(tmp_path)
    cache = await opened(tmp_path)
    assert await cache.get("big-199") == 199
    assert await cache.get("old") in (None, "second")
    await cache.close()


async def test_a_folder_that_cannot_be_created_leaves_a_memory_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with structlog.testing.capture_logs() as logs:
        cache = await opened(tmp_path / "file")
        cache.set("k", 1)
        assert await cache.get("k") == 1
        assert await cache.get("other") is None
        assert "cannot be read" in (cache.describe_wait() or "")
        await cache.close()
    assert any(entry["event"].startswith("cached values are lost") and entry["values"] == 1 for entry in logs)


async def test_the_event_loop_continues_while_the_file_is_locked_and_the_value_is_written_later(tmp_path: Path) -> None:
    cache = await opened(tmp_path, flush_interval_seconds=0.02)
    other = sqlite3.connect(tmp_path / "g.worker.0-cache.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    cache.set("k", 1)
    slowest = last = 0.0
    ends = time.monotonic() + 0.5
    last = time.monotonic()
    while time.monotonic() < ends:
        await asyncio.sleep(0.005)
        slowest, last = max(slowest, time.monotonic() - last), time.monotonic()
    assert slowest < 0.3
    other.execute("ROLLBACK")
    other.close()
    await until(lambda: "k" in rows(tmp_path))
    await cache.close()


async def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    cache = await opened(tmp_path)
    cache.set("k", 1)
    await cache.close()
    assert (tmp_path / "g.worker.0-cache.db").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["g.worker.0-cache.db"], "nothing else is left of it"


async def test_a_closed_cache_says_that_it_is_closed(tmp_path: Path) -> None:
    cache = await opened(tmp_path)
    await cache.close()
    await cache.close()
    with pytest.raises(HandlerError, match="closed"):
        cache.set("k", 1)
    with pytest.raises(HandlerError, match="closed"):
        await cache.get("k")


def test_where_there_is_no_cache_any_use_says_why() -> None:
    none = NoCache()
    with pytest.raises(HandlerError, match=r"set cache\.enabled"):
        none.get("k")
    with pytest.raises(HandlerError, match=r"set cache\.enabled"):
        _ = "k" in none


KILLED = """
import asyncio, sys
from tidemill.config.settings import CacheSettings
from tidemill.pipeline.handler.cache import Cache
async def main():
    cache = Cache(CacheSettings(enabled=True, path=sys.argv[1], flush_interval_seconds=0.02), "g.worker.0")
    await cache.open()
    n = 0
    while True:
        n += 1
        cache.set("count", n)
        await asyncio.sleep(0.001)
        if not cache._known.unwritten:
            print(n, flush=True)
asyncio.run(main())
"""


async def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    written = [int(process.stdout.readline()) for _ in range(5)]
    process.kill()
    process.wait()
    process.stdout.close()
    cache = await opened(tmp_path)
    assert await cache.get("count") >= written[-1]
    await cache.close()
