"""Hosts of one list as processes over one PostgreSQL: who runs it, who waits, and who takes over when."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import prepared
from tests.cli.sites import Site
from tests.store.server import PostgresServer
from tests.until import slack

from tidemill.runtime.process.exitcode import ExitCode

pytestmark = pytest.mark.timeout(180)

LEASE = 2.0

#: `tidemill triggers run`, with deaths noticed as fast as the argument says.
QUICK = """
import sys
from pathlib import Path
from tidemill.config.loading import load_settings
from tidemill.runtime.log.setup import configure
from tidemill.services.triggerer.lists.sessions import SessionPace
from tidemill.services.triggerer.process import run_host
settings = load_settings(None)
configure(settings.logging, worker_id="test")
lease = float(sys.argv[1])
sys.exit(run_host(settings, Path("spec.yaml"), SessionPace(lease, lease / 6, lease / 20)))
"""

TRIGGERS = """
import asyncio, os
from tidemill.triggers.base import BaseTrigger, TriggerEvent

class Ticks(BaseTrigger):
    def serialize(self):
        return "ticking.Ticks", {}
    async def run(self):
        while True:
            yield TriggerEvent(os.getpid())
            await asyncio.sleep(0.05)
    async def on_kill(self):
        open(f"killed-{os.getpid()}", "w").close()
    async def cleanup(self):
        open(f"cleaned-{os.getpid()}", "w").close()
"""

TICKS = "name: ticks, classpath: ticking.Ticks"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    yield made
    made.remove()


@pytest.fixture
def sites(tmp_path: Path, server: PostgresServer) -> Iterator[Callable[[str], Site]]:
    """Make folders with lists, all of one store, as those of several machines would be."""
    url = asyncio.run(server.new_database())
    made: list[Site] = []

    def make(name: str) -> Site:
        folder = tmp_path / name
        folder.mkdir()
        site = Site(folder)
        site.env |= {"TIDEMILL_STORE__URL": url, "TIDEMILL_TRIGGERER__LIST_NAME": "orders", "WORKER_ID": name}
        (folder / "ticking.py").write_text(TRIGGERS)
        site.write(TICKS)
        made.append(site)
        return site

    yield make
    for site in made:
        for process in site.hosts:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


def quick(site: Site, lease: float = LEASE) -> prepared.Forked:
    with (site.folder / "log.txt").open("ab") as log:
        process = prepared.start([lease], cwd=site.folder, env=site.env, code=QUICK, stdout=log, stderr=log)
    site.hosts.append(process)
    return process


def pids(site: Site) -> list[int]:
    """The processes that stored events, in the order of these."""
    return [row["payload"] for row in site.rows("events", "spec.yaml")]


def running(site: Site) -> None:
    site.until(lambda: "triggers started" in site.log)


def waiting(site: Site) -> None:
    site.until(lambda: "another host runs this list" in site.log)


def test_a_second_host_waits_for_the_first_and_takes_over_at_once_when_it_stops(sites):
    site, other = sites("one"), sites("two")
    first = site.host()
    running(site)
    second = other.host()
    waiting(other)
    [said] = [json.loads(line) for line in other.log.splitlines() if "another host runs this list" in line]
    assert (said["process"], said["list"]) == (first.pid, "orders")
    assert f"process {second.pid} is on standby; process {first.pid} on" in other.ask("streams", "spec.yaml").stdout
    [row] = other.rows("list", "spec.yaml")
    assert (row["list"], str(row["session"]).endswith(f"process {first.pid}")) == ("orders", True)

    first.terminate()
    assert first.wait(60) == ExitCode.OK
    other.until(lambda: "triggers started" in other.log, slack(15))  # and not 30 seconds later
    assert "Traceback" not in site.log + other.log


def test_a_host_that_waits_ends_at_once_when_it_is_told_to_and_reads_its_list_when_it_is_told_to(sites):
    site, other = sites("one"), sites("two")
    first = site.host()
    running(site)
    second = other.host()
    waiting(other)
    other.write(TICKS, "name: more, classpath: mine.Fires")
    second.send_signal(signal.SIGHUP)
    other.until(lambda: "the list of triggers was reloaded" in other.log)
    other.until(lambda: "runs other triggers" in other.log)
    second.terminate()
    assert second.wait(60) == ExitCode.OK
    assert first.poll() is None
    assert "triggers started" not in other.log


def test_two_hosts_in_one_folder_are_told_apart_and_the_lock_shows_a_death_at_once(sites):
    site = sites("one")
    first = site.host()
    running(site)
    second = site.host()
    waiting(site)
    shown = site.ask("streams", "spec.yaml").stdout.splitlines()
    assert [re.split("[:;]", line)[0] for line in shown] == [
        f"process {first.pid}",
        f"process {second.pid} is on standby",
    ]
    first.kill()
    first.wait()
    killed = time.monotonic()
    site.until(lambda: site.log.count("triggers started") == 2, slack(15))  # and not 30 seconds later
    assert '"noticed_by":"its lock"' in site.log.replace(": ", ":")
    assert time.monotonic() - killed < slack(15)
    site.until(lambda: second.pid in pids(site))


def test_a_death_on_another_machine_is_noticed_when_the_beat_stands_still(sites):
    site, other = sites("one"), sites("two")
    first = quick(site)
    running(site)
    second = quick(other)
    waiting(other)
    first.kill()
    first.wait()
    other.until(lambda: second.pid in pids(other))
    assert '"noticed_by":"its heartbeat"' in other.log.replace(": ", ":")


def stopped_and_continued(site: Site, other: Site, lease: float) -> None:
    first = quick(site, lease)
    running(site)
    site.until(lambda: first.pid in pids(site))
    second = quick(other, lease)
    waiting(other)
    first.send_signal(signal.SIGSTOP)
    time.sleep(2 * lease)  # the pause itself is what is tested
    other.until(lambda: second.pid in pids(other), 2 * lease + 30)
    first.send_signal(signal.SIGCONT)
    waiting(site)
    assert (site.folder / f"cleaned-{first.pid}").exists()
    assert not (site.folder / f"killed-{first.pid}").exists()
    stored = len(pids(other))
    other.until(lambda: len(pids(other)) > stored + 5)
    order = pids(other)
    assert order.index(second.pid) == order.count(first.pid), "the old one stored nothing after the new one began"
    rows = other.rows("events", "spec.yaml")
    assert [row["sequence_index"] for row in rows] == list(range(len(rows)))
    second.terminate()
    assert second.wait(60) == ExitCode.OK
    site.until(lambda: site.log.count("triggers started") == 2)
    first.terminate()
    assert first.wait(60) == ExitCode.OK
    assert "Traceback" not in site.log + other.log


@pytest.mark.long  # test_sessions.py has it of sessions
def test_a_host_that_was_stopped_for_twice_the_lease_hands_over_and_stores_nothing_more(sites):
    stopped_and_continued(sites("one"), sites("two"), LEASE)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_with_the_real_lease_a_death_is_followed_within_35_seconds(sites):
    site, other = sites("one"), sites("two")
    first = site.host()
    running(site)
    other.host()
    waiting(other)
    first.kill()
    first.wait()
    killed = time.monotonic()
    other.until(lambda: "triggers started" in other.log, 40)
    assert time.monotonic() - killed < slack(35)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_with_the_real_lease_a_host_that_was_stopped_for_a_minute_hands_over(sites):
    stopped_and_continued(sites("one"), sites("two"), 30.0)


def test_what_was_removed_while_no_host_ran_is_cancelled_by_a_replica_elsewhere(sites):
    site, other = sites("one"), sites("two")
    site.write(TICKS, "name: gone, classpath: mine.Fires")
    first = quick(site)
    running(site)
    first.kill()
    first.wait()
    quick(other)
    running(other)
    other.until(
        lambda: (
            {row["name"]: row["reason"] for row in other.rows("list", "spec.yaml")} == {"gone": "user", "ticks": None}
        )
    )


def test_a_list_with_a_name_of_another_live_list_is_refused_and_told_what_to_do(sites):
    site, other = sites("one"), sites("two")
    first = site.host()
    running(site)
    other.env["TIDEMILL_TRIGGERER__LIST_NAME"] = "bills"
    refused = other.ask("run", "spec.yaml")
    assert refused.returncode == ExitCode.CONFIG
    assert f"the list bills cannot run beside the list orders, which process {first.pid} on" in refused.stderr
    assert "both have the trigger 'ticks'" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert first.poll() is None


@pytest.mark.long
def test_one_killed_host_after_another_leaves_no_socket_behind_that_is_asked(sites):
    site = sites("one")
    for count in range(1, 4):
        host = site.host()
        site.until(lambda count=count: site.log.count("triggers started") == count)
        host.kill()
        host.wait()
    assert site.ask("streams", "spec.yaml").returncode == ExitCode.REMOTE
    last = site.host()
    site.until(lambda: site.log.count("triggers started") == 4)
    [report] = site.rows("streams", "spec.yaml")
    assert report["pid"] == last.pid
