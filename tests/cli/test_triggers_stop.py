"""How a trigger host ends when something is in the way: triggers that do not end, and stores that are not there."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from tests.cli.sites import Site
from tests.store.server import PostgresServer

from tidemill.runtime.process.exitcode import ExitCode

TRIGGERS = """
import asyncio, threading, time
from tidemill.triggers.base import BaseTrigger, TriggerEvent

class Odd(BaseTrigger):
    def __init__(self, how):
        super().__init__()
        self.how = how
    def serialize(self):
        return "odd.Odd", {"how": self.how}
    async def run(self):
        yield TriggerEvent("there")
        open("there", "w").close()
        if self.how == "block":
            while True:
                time.sleep(0.05)
        if self.how == "thread":
            await asyncio.to_thread(threading.Event().wait)
        if self.how == "own-thread":
            threading.Thread(target=threading.Event().wait).start()
            await asyncio.Event().wait()
        if self.how == "count":
            for n in range(1_000_000):
                yield TriggerEvent(n)
                await asyncio.sleep(0.01)
        raise RuntimeError("password=hunter2 is wrong")
"""


@pytest.fixture
def odd(site: Site) -> Site:
    (site.folder / "odd.py").write_text(TRIGGERS)
    return site


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.remove()


def started(site: Site, how: str, **env: str):
    site.write(f"name: odd, classpath: odd.Odd, kwargs: {{how: {how}}}, restart: never")
    host = site.host(**env)
    site.until(lambda: (site.folder / "there").exists())
    return host


def test_a_second_signal_ends_a_host_at_once_even_if_a_trigger_blocks_its_loop(odd):
    host = started(odd, "block")
    host.terminate()
    time.sleep(0.3)  # two signals of one kind at once are one
    assert host.poll() is None
    host.terminate()
    assert host.wait(60) == ExitCode.STOPPED


@pytest.mark.parametrize("how", ["thread", "own-thread"])
def test_a_thread_that_never_ends_holds_up_a_stop_for_some_seconds_only(odd, how):
    host = started(odd, how)
    host.send_signal(signal.SIGINT)
    assert host.wait(60) == ExitCode.OK
    assert [row["reason"] for row in odd.rows("list", "spec.yaml")] == ["shutdown"]


def test_a_failure_is_kept_whole_without_its_secrets(odd):
    odd.write("name: odd, classpath: odd.Odd, kwargs: {how: fail}, restart: never")
    assert odd.host().wait(60) == ExitCode.OK
    [row] = odd.rows("list", "spec.yaml")
    assert row["state"] == "failed"
    assert "Traceback" in str(row["error"])
    assert str(row["error"]).rstrip().endswith("RuntimeError: password=*** is wrong")
    assert "hunter2" not in odd.log
    table = odd.ask("list", "spec.yaml").stdout
    assert len(table.splitlines()) == 2
    assert "RuntimeError: password=*** is wrong" in table


def test_another_list_in_the_same_sqlite_file_is_refused_and_told_what_to_do(odd):
    first = started(odd, "count")
    (odd.folder / "other.yaml").write_text("[]")
    second = odd.ask("run", "other.yaml")
    assert second.returncode == ExitCode.CONFIG
    assert f"is in use by process {first.pid}" in second.stderr
    assert "store.url" in second.stderr


def test_a_host_that_is_killed_runs_its_triggers_again_and_continues_their_numbers(odd):
    first = started(odd, "count")
    odd.until(lambda: len(odd.rows("events", "spec.yaml")) > 5)
    first.kill()
    first.wait()
    kept = odd.rows("events", "spec.yaml")
    second = started(odd, "count")
    odd.until(lambda: len(odd.rows("events", "spec.yaml")) > len(kept) + 2)
    second.terminate()
    assert second.wait(60) == ExitCode.OK
    rows = odd.rows("events", "spec.yaml")
    assert rows[: len(kept)] == kept
    assert [row["sequence_index"] for row in rows] == list(range(len(rows)))


def test_a_store_whose_file_is_removed_is_saved_and_the_host_ends(odd):
    host = started(odd, "count")
    odd.until(lambda: len(odd.rows("events", "spec.yaml")) > 5)
    kept = odd.rows("events", "spec.yaml")
    (path,) = odd.folder.glob("*.db")
    for file in odd.folder.glob(f"{path.name}*"):
        file.unlink()

    assert host.wait(60) == ExitCode.REMOTE
    (saved,) = odd.folder.glob(f"{path.name}.recovered-*")
    assert str(saved) in odd.log
    saved.rename(path)
    assert odd.rows("events", "spec.yaml")[: len(kept)] == kept


def test_a_store_that_is_gone_at_a_stop_is_a_failure_that_says_how_many_events_wait(odd, own_postgres):
    host = started(odd, "count", TIDEMILL_STORE__URL=own_postgres.url())
    own_postgres.stop("immediate")
    odd.until(lambda: "cannot write to the store; events are waiting" in odd.log)
    host.terminate()
    assert host.wait(60) == ExitCode.REMOTE
    assert "events may not be stored, because the store" in odd.log


def test_a_store_that_is_not_there_at_the_start_is_a_failure(odd, own_postgres):
    own_postgres.stop("immediate")
    odd.write()
    assert odd.host(TIDEMILL_STORE__URL=own_postgres.url()).wait(60) == ExitCode.REMOTE
    assert "is unreachable" in odd.log
    assert "Traceback" not in odd.log
