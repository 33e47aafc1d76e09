"""What is promised of shared streams, proven with two hosts of one list over one PostgreSQL and a real Kafka."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests import prepared
from tests.services.triggerer.proof_topic import NumberedTopic, Trio
from tests.sinks.conftest import proxy
from tests.store.server import PostgresServer
from tests.until import wait_until

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.runtime.embedded.broker import free_port
from tidemill.runtime.process.exitcode import ExitCode

__all__ = ["proxy"]

ROOT = Path(__file__).parents[3]


class Machine:
    """A folder with the list, as it would be on a machine of its own; a host at a time."""

    def __init__(self, folder: Path, trio: Trio, env: dict[str, str]) -> None:
        self.folder = folder
        self.log_path = folder / "log.txt"
        self.process: prepared.Forked | None = None
        runtime = folder / "run"
        runtime.mkdir(mode=0o700, parents=True)
        trio.write(folder)
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                    "XDG_RUNTIME_DIR": str(runtime), "PYTHONWARNINGS": "ignore", "WORKER_ID": folder.name,
                    "TIDEMILL_TRIGGERER__LIST_NAME": "proof", **env}  # fmt: skip
        self.env.pop("TIDEMILL_CONFIG", None)

    def start(self) -> prepared.Forked:
        with self.log_path.open("ab") as log:
            self.process = prepared.start(
                ["tests.services.triggerer.quick_host", "triggers", "run", "spec.yaml"],
                code=prepared.MODULE, cwd=self.folder, env=self.env, stdout=log, stderr=log,
            )  # fmt: skip
        return self.process

    @property
    def log(self) -> list[dict[str, Any]]:
        """What its hosts said."""
        text = self.log_path.read_text() if self.log_path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def said(self, event: str) -> int:
        return sum(event in line["event"] for line in self.log)

    def fenced(self) -> int:
        """How often it was told that another process has taken its place in the consumer group."""
        return sum("same member id" in json.dumps(line) for line in self.log)

    def streams_fenced(self) -> int:
        """How many of its streams were fenced."""
        return sum("stream failed" in line["event"] and "same member id" in json.dumps(line) for line in self.log)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


class Feeding:
    """Writes messages little by little, from a thread, for as long as the hosts need: on a busy machine that is long.

    Args:
        topic: Where to.
        count: How many there are in the end, at least.
        per_second: How many a second.
        start: How many there are already.
    """

    def __init__(self, topic: NumberedTopic, count: int, per_second: int, start: int = 0) -> None:
        self.topic, self.count, self.per_second = topic, count, per_second
        self.fed = start
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            more = max(1, self.per_second // 10)
            self.topic.feed(more, self.fed)
            self.fed += more

    def finish(self) -> int:
        """Write what is missing at once, and return how many there are."""
        self.end()
        more = max(0, self.count - self.fed)
        self.topic.feed(more, self.fed)
        self.fed += more
        return self.fed

    def end(self) -> None:
        self._over.set()
        self._thread.join()


class Pair:
    """Two machines, the store, and the topic.

    Args:
        folder: Where.
        url: Of an empty database.
        broker: A real one.
        count: How many messages there are in the end, at least.
        lease: How long a host may be silent, in seconds.
    """

    def __init__(self, folder: Path, url: str, broker: Any, count: int, lease: float) -> None:
        self.topic = NumberedTopic(folder / "notes", broker)
        self.trio = Trio(self.topic, count)
        self.lease = lease
        env = {"TIDEMILL_STORE__URL": url, "QUICK_HOST_LEASE": str(lease)}
        self.one, self.two = (Machine(folder / name, self.trio, env) for name in ("one", "two"))
        self._runner = asyncio.Runner()
        self._connection = self._runner.run(asyncpg.connect(url))
        self.feeding: Feeding | None = None

    def ask(self, query: str) -> list[Any]:
        return self._runner.run(self._connection.fetch(query))

    def rows(self) -> list[tuple[str, dict[str, int]]]:
        """Return who fired what, in the order in which it was stored."""
        found = self.ask(
            "SELECT t.name, e.payload FROM trigger_event e JOIN trigger t ON t.id = e.trigger_id ORDER BY e.id"
        )
        return [(row["name"], json.loads(row["payload"])) for row in found]

    def stored_by(self, pid: int) -> int:
        return self.ask(f"SELECT count(*) FROM trigger_event WHERE payload::json ->> 'pid' = '{pid}'")[0][0]

    def owner(self) -> int:
        """Return the process whose session has the list; 0: nobody has it."""
        found = self.ask("SELECT s.pid FROM trigger_list l JOIN service_session s ON s.id = l.session_id")
        return found[0]["pid"] if found else 0

    def committed(self) -> int:
        return sum(self.topic.committed().values())

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        def logs() -> str:
            return "".join(one.log_path.read_text()[-3000:] for one in (self.one, self.two) if one.log_path.exists())

        wait_until(condition, seconds, what=logs, pause_seconds=0.05)

    def until_stored_by(self, machine: Machine, more: int, seconds: float = 60.0) -> None:
        """Wait until a host stores events that it did not have stored before."""
        assert machine.process is not None
        pid = machine.process.pid
        before = self.stored_by(pid)
        self.until(lambda: self.stored_by(pid) >= before + more, seconds)

    def wait_in_line(self, machine: Machine) -> None:
        """Start a host, and wait until it waits for the other one."""
        before = machine.said("another host runs this list")
        machine.start()
        self.until(lambda: machine.said("another host runs this list") > before)

    def check_now(self) -> None:
        """Hold what is committed at this moment against what is stored."""
        committed = self.topic.committed()
        self.trio.check_committed(committed, self.rows())

    def close(self) -> None:
        if self.feeding is not None:
            self.feeding.end()
        for machine in (self.one, self.two):
            machine.end()
        self._runner.run(self._connection.close())
        self._runner.close()


@pytest.fixture
def pair(request, tmp_path, postgres, embedded_kafka) -> Iterator[Pair]:
    count, lease = request.param
    url = asyncio.run(postgres.new_database())
    made = Pair(tmp_path, url, embedded_kafka, count, lease)
    yield made
    made.close()


def stop_and_go_on(pair: Pair, owner: Machine, other: Machine) -> None:
    """Stop the owner for twice the lease, so that the other takes over, and let it go on to be stored nothing of.

    A member that stood still for longer than its session in the group joins again as soon as it continues, before its
    host can look at the list: then the other one's stream is fenced, once, and reads again.
    """
    assert owner.process is not None
    pid, waited, fenced = owner.process.pid, owner.said("another host runs this list"), other.streams_fenced()
    outlived = 2000 * pair.lease > KafkaSettings().session_timeout_ms
    owner.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    pair.until_stored_by(other, 20, pair.lease + 30)
    noticed = time.monotonic() - stopped
    time.sleep(max(0.0, 2 * pair.lease - noticed))  # the pause itself is what is tested
    stored = pair.stored_by(pid)
    owner.signal(signal.SIGCONT)
    pair.until(lambda: owner.said("another host runs this list") > waited)
    pair.until_stored_by(other, 20)
    assert pair.stored_by(pid) == stored, "it stored events after another host had taken over"
    taken = other.streams_fenced() - fenced
    assert taken <= outlived, "it took part in the group under the id of the host that had taken over"
    pair.check_now()
    print(f"taken over {noticed:.1f} s after the stop")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("pair", "per_second", "stops"),
    [
        pytest.param((1_000, 1.5), 50, 2, id="short"),
        # Each third message ends a run of a trigger, which waits for the store before the next: 40 ms at a load of 10.
        # The lease of a host as it is by itself has tests in tests/cli/test_triggers_replicas.py.
        pytest.param((8_000, 30.0), 100, 1, id="full", marks=pytest.mark.nightly),
    ],
    indirect=["pair"],
)
def test_each_event_is_stored_once_or_dead_lettered_for_a_failure_on_it_while_hosts_are_stopped_killed_and_replaced(
    pair, per_second, stops
):
    owner, other = pair.one, pair.two
    began = time.monotonic()
    pair.feeding = Feeding(pair.topic, pair.trio.count, per_second)
    owner.start()
    pair.until(lambda: owner.said("triggers started"))
    pair.wait_in_line(other)
    pair.until_stored_by(owner, 20)
    for _ in range(stops):
        stop_and_go_on(pair, owner, other)
        owner, other = other, owner

    owner.signal(signal.SIGKILL)
    owner.process.wait()
    pair.check_now()
    pair.until_stored_by(other, 20, pair.lease + 30)
    owner, other = other, owner

    pair.wait_in_line(other)
    owner.signal(signal.SIGTERM)
    assert owner.process.wait(60) == ExitCode.OK
    pair.check_now()
    pair.until_stored_by(other, 20, 20)  # it need not wait for the lease to pass

    pair.trio.count = pair.feeding.finish()
    pair.until(lambda: pair.committed() == pair.trio.count, 300)
    seconds = time.monotonic() - began
    other.signal(signal.SIGTERM)
    assert other.process.wait(60) == ExitCode.OK

    rows = pair.rows()
    pair.trio.check_end(rows)
    order = [row["pid"] for _, row in rows]
    print(f"{pair.trio.count} messages in {seconds:.1f} s; {len(set(order))} processes stored events")
    assert pair.owner() == 0
    assert not pair.ask("SELECT id FROM service_session WHERE ended_us IS NULL AND list = 'proof'"), (
        "a session was left behind"
    )
    said = [line["event"] for machine in (pair.one, pair.two) for line in machine.log]
    assert not [one for one in said if "bug in tidemill" in one]


@pytest.fixture
def tcp_postgres() -> Iterator[PostgresServer]:
    server = PostgresServer(free_port())
    asyncio.run(server.add_user())
    yield server
    server.remove()


@pytest.mark.long  # the short proof above has take-overs
@pytest.mark.timeout(180)
def test_a_host_that_cannot_reach_the_store_leaves_the_stream_to_the_one_that_has_taken_over(
    tmp_path, tcp_postgres, proxy, embedded_kafka
):
    url = asyncio.run(tcp_postgres.new_database())
    name = url.split("?")[0].rpartition("/")[2]
    between = proxy(tcp_postgres.port)
    pair = Pair(tmp_path, url, embedded_kafka, 600, 1.5)
    try:
        owner, other = pair.one, pair.two
        owner.env["TIDEMILL_STORE__URL"] = tcp_postgres.tcp_url(name, between.port)
        owner.start()
        pair.until(lambda: owner.said("triggers started"))
        pair.wait_in_line(other)
        pair.topic.feed(100)
        pair.until(lambda: pair.committed() == 100)
        between.down()
        pair.until(lambda: owner.fenced())
        pair.feeding = Feeding(pair.topic, 600, 50, start=100)
        pair.until(lambda: pair.committed() >= 400)
        assert other.fenced() == 0, "the one that was cut off took its place in the group again"
        waited = owner.said("another host runs this list")
        between.up()
        pair.until(lambda: owner.said("another host runs this list") > waited)
        pair.trio.count = pair.feeding.finish()
        pair.until(lambda: pair.committed() == pair.trio.count)
        assert other.fenced() == 0
        for machine in (owner, other):
            machine.signal(signal.SIGTERM)
            assert machine.process.wait(60) == ExitCode.OK
        pair.trio.check_end(pair.rows())
    finally:
        pair.close()
