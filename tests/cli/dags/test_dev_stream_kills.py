"""Processes of the tree are killed while streams are handled: each emitted element comes once, in order.

KILLS_SEED=7 KILLS_ROUNDS=20 pytest -s --nightly tests/cli/dags/test_dev_stream_kills.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.cli.dags.conftest import DevSite
from tests.until import wait_until

from tidemill.runtime.process.table import find_descendants, find_marked, is_running, read_command

#: Further runs in which the processes and moments are random.
ROUNDS = int(os.environ.get("KILLS_ROUNDS", "0"))
SEED = int(os.environ.get("KILLS_SEED", "0")) or random.randrange(1_000_000)
EVENTS = 240
#: The processes that are killed, by a part of their command; the empty one is `dev` itself, which is started again.
VICTIMS = ("services.worker.process", "services.triggerer.tasks.process", "")
#: The process of the attempt that handles a stream: its try has failed then, and another one follows.
ATTEMPT = "attempt"
#: `dev` is stopped as by Ctrl-C, and started again.
STOP = "stop"
TRIGGER = """
import asyncio
from pathlib import Path
from tidemill.triggers import BaseTrigger, TriggerEvent

class Ticks(BaseTrigger):
    \"\"\"Fires numbers, as far as a file allows.\"\"\"
    def __init__(self, first, count, gate):
        super().__init__()
        self.first, self.count, self.gate = first, count, gate
    def serialize(self):
        return "ticks.Ticks", {"first": self.first, "count": self.count, "gate": self.gate}
    async def run(self):
        for number in range(self.first, self.count):
            while number >= int(Path(self.gate).read_text() or 0):
                await asyncio.sleep(0.01)
            yield TriggerEvent(number, identity=str(number))
            await asyncio.sleep(0.002)
"""
DAGS = """
import os, time
from datetime import timedelta
from pathlib import Path
from ticks import Ticks
from tidemill.dags import DAG, BaseOperator, StreamOperator, task

GATE, BLOCKED, SEEN = "{folder}/gate", Path("{folder}/blocked"), Path("{folder}/seen")

class Read(BaseOperator):
    stream_max_events = 10
    stream_linger = 0.5
    def execute(self, context):
        self.defer(trigger=Ticks(0, EVENTS, GATE))
    def handle_trigger_events(self, events, context):
        with SEEN.open("a") as seen:
            for event in events:
                print(os.getpid(), event.sequence_index, event.payload, file=seen, flush=True)
                context["stream"].emit(event.payload, identity=event.identity)
        if Path("{folder}/block").exists() and events[-1].payload >= EVENTS // 8 and not BLOCKED.exists():
            BLOCKED.touch()
            time.sleep(600)
        context["stream"].checkpoint(events[-1].payload)
    def on_stream_end(self, context):
        return context["stream"].cursor

with DAG("kills", max_active_tasks=50):
    again = dict(retries=9, retry_delay=timedelta(seconds=0.1))
    @task(**again)
    def double(number):
        return 2 * number
    @task(**again)
    def collect(numbers):
        return list(numbers)
    read = Read(task_id="read", **again)
    source = StreamOperator(task_id="source", trigger=Ticks(0, EVENTS, GATE), **again)
    collect.override(task_id="collect_read")(double.expand(number=read.output))
    collect.override(task_id="collect_source")(double.override(task_id="triple").expand(number=source.output))
"""


class Streams:
    """A `dev` with a run that reads two streams."""

    def __init__(self, dev: DevSite) -> None:
        self.dev = dev
        self.run = ""
        (dev.folder / "gate").write_text("0")
        (dev.folder / "dags" / "ticks.py").write_text(TRIGGER)
        text = DAGS.replace("{folder}", str(dev.folder)).replace("EVENTS", str(EVENTS))
        (dev.folder / "dags" / "kills.py").write_text(text)

    def start(self) -> None:
        self.dev.start(TIDEMILL_WORKER__REUSE_PROCESSES='["*"]')

    def trigger(self, run: str) -> None:
        self.run = run
        self.open(0)
        for name in ("blocked", "seen"):
            (self.dev.folder / name).unlink(missing_ok=True)
        arguments = ("dags", "trigger", "kills", "--run", run)
        wait_until(lambda: self.dev.run(*arguments).returncode == 0, what=lambda: self.dev.log[-3000:])

    def open(self, gate: int) -> None:
        """Let the triggers fire numbers below this one."""
        new = self.dev.folder / "gate.new"
        new.write_text(str(gate))
        new.rename(self.dev.folder / "gate")

    def query(self, statement: str, *arguments: Any) -> list[Any]:
        if url := self.dev.env.get("TIDEMILL_STORE__URL"):
            with ThreadPoolExecutor(1) as beside:  # the loop of the fixture runs in this thread
                return beside.submit(asyncio.run, _fetch(url, _number(statement), arguments)).result()
        with contextlib.closing(sqlite3.connect(self.dev.folder / "dags.db", timeout=60)) as connection:
            return connection.execute(statement, arguments).fetchall()

    def count_handled(self) -> int:
        """Return the number of events that both streams have handled."""
        rows = self.query(
            "select t.task_id, max(s.handled) from trigger_stream s join task_instance t on t.id = s.task "
            "join dag_run r on r.id = t.run where r.run_id = ? group by t.task_id",
            self.run,
        )
        return min(int(handled) for _, handled in rows) if len(rows) == 2 else 0

    def read_state(self) -> str:
        return str(self.query("select state from dag_run where run_id = ?", self.run)[0][0])

    def tell(self) -> str:
        """Return what is known about the run, for a failed assertion."""
        rows = self.query(
            "select t.task_id, t.map_index, t.state, t.error from task_instance t join dag_run r on r.id = t.run "
            "where r.run_id = ? and (t.map_index < 0 or t.state <> 'success')",
            self.run,
        )
        streams = self.query("select * from trigger_stream order by trigger_id desc limit 2")
        return f"{self.dev.log[-3000:]}\n{rows}\n{streams}\n{self.count_handled()} handled"

    def kill(self, victim: str) -> None:
        assert self.dev.process is not None
        if victim == STOP:
            assert self.dev.stop() == 0
            self.start()
            return
        root = self.dev.process.pid
        pids = [each for each in find_descendants(root) if victim in read_command(each)] if victim else [root]
        if victim == ATTEMPT:
            seen = self.dev.folder / "seen"
            pids = [int(line.split()[0]) for line in seen.read_text().splitlines()[-1:]] if seen.exists() else []
        if not pids:
            return  # it was killed a moment ago, and its successor is about to start
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: not is_running(pids[0]), what=f"{victim or 'dev'} is dead")
        if not victim:
            wait_until(lambda: not find_marked(self.dev.mark), what="all processes of the killed dev are gone")
            self.start()

    def check(self, tries: int | None) -> None:
        """Check that each element came once, in order, and that nothing ran again."""
        numbers = list(range(EVENTS))
        wait_until(lambda: self.read_state() in ("success", "failed"), 120.0, what=self.tell)
        assert self.read_state() == "success", self.tell()
        of_run = "from {} x join task_instance t on t.id = x.task join dag_run r on r.id = t.run where r.run_id = ?"
        for task_id, expected in (
            ("read", numbers[-1]),
            *((name, [2 * number for number in numbers]) for name in ("collect_read", "collect_source")),
        ):
            result = f"select x.value {of_run.format('xcom')} and t.task_id = ? and x.key = 'return_value'"
            assert [json.loads(value) for (value,) in self.query(result, self.run, task_id)] == [expected], task_id
        emitted = f"select x.value {of_run.format('map_item')} and t.task_id = ? order by x.number"
        for task_id in ("read", "source"):
            assert [json.loads(value) for (value,) in self.query(emitted, self.run, task_id)] == numbers, task_id
        again = f"select t.task_id, x.epoch {of_run.format('task_journal')} and x.before = 'success'"
        assert self.query(again, self.run) == []
        ends = f"select count(*), count(distinct x.task) {of_run.format('task_journal')} and x.after = 'success'"
        total = 2 * (EVENTS + 1) + 4
        assert self.query(ends, self.run) == [(total, total)]
        seen = [line.split() for line in (self.dev.folder / "seen").read_text().splitlines()]
        by_attempt: dict[str, list[int]] = {}
        for process, index, _ in seen:
            by_attempt.setdefault(process, []).append(int(index))
        assert all(indexes == sorted(set(indexes)) for indexes in by_attempt.values()), by_attempt
        if tries is not None:
            tried = "select t.task_id, t.tries from task_instance t join dag_run r on r.id = t.run where r.run_id = ?"
            found = dict(self.query(f"{tried} and t.task_id in ('read', 'source')", self.run))
            assert found == {"read": tries, "source": tries}


@pytest.mark.long
@pytest.mark.timeout(600 * (ROUNDS + 1))
def test_each_element_comes_once_though_worker_triggerer_and_dev_are_killed_in_the_middle(any_dev: DevSite) -> None:
    dev = any_dev
    streams = Streams(dev)
    Path(dev.folder, "block").touch()
    streams.start()
    streams.trigger("r1")
    streams.open(EVENTS // 4)
    # The worker is killed while the handler has a batch.
    wait_until((dev.folder / "blocked").exists, what=streams.tell)
    for number, victim in enumerate(VICTIMS, 1):
        streams.open((number + 1) * EVENTS // 4 - 1)
        wanted = (number - 1) * EVENTS // 4 + 10
        wait_until(lambda wanted=wanted: streams.count_handled() >= wanted, 120.0, what=streams.tell)
        streams.kill(victim)
    streams.open(EVENTS)
    streams.check(tries=1)
    (dev.folder / "block").unlink()
    random_ = random.Random(SEED)
    for number in range(ROUNDS):
        print(f"seed {SEED}, round {number}")
        kill_at_random(streams, random_, f"random{number}")
    assert dev.stop() == 0


def _number(statement: str) -> str:
    """Number the parameters of a statement as PostgreSQL has them."""
    first, *rest = statement.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


async def _fetch(url: str, statement: str, arguments: tuple[Any, ...]) -> list[Any]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(statement, *arguments)]
    finally:
        await connection.close()


def kill_at_random(streams: Streams, random_: random.Random, run: str) -> None:
    """Kill processes at random moments of a run, and check it."""
    streams.trigger(run)
    streams.open(EVENTS)
    began = time.monotonic()
    for victim in random_.choices([*VICTIMS, "services.zygote", ATTEMPT, STOP], k=random_.randint(1, 4)):
        time.sleep(random_.uniform(0.0, 1.0))
        print(f"  {time.monotonic() - began:.2f} s, {streams.count_handled()} handled: {victim or 'dev'}", flush=True)
        streams.kill(victim)
    streams.check(tries=None)
    print(f"  {time.monotonic() - began:.2f} s", flush=True)
