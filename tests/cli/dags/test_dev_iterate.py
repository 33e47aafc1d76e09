"""Each process of the tree is killed once while an attempt makes many HTTP calls and a loop runs: nothing is lost.

`TIDEMILL_TEST_CALLS=10000` makes as many calls.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.cli.dags.conftest import DevSite
from tests.cli.dags.test_dev_map_kills import kill, query
from tests.size import sized
from tests.until import wait_until

from tidemill.runtime.process.table import find_marked, is_running

CALLS = int(os.environ.get("TIDEMILL_TEST_CALLS", sized(200, 2_000)))
CONCURRENCY = 20
GATES = """
import asyncio
from pathlib import Path
from tidemill.triggers import BaseTrigger, TriggerEvent

def read_gate():
    return int(Path("{folder}/gate").read_text() or 0)

class Gate(BaseTrigger):
    \"\"\"Fires once the gate is open for a number.\"\"\"
    def __init__(self, number):
        super().__init__()
        self.number = number
    def serialize(self):
        return "gates.Gate", {"number": self.number}
    async def run(self):
        while read_gate() < self.number:
            await asyncio.sleep(0.02)
        yield TriggerEvent(self.number)
"""
DAGS = """
import asyncio, os, time
from pathlib import Path
from gates import Gate, read_gate
from tidemill.dags import DAG, BaseOperator, LoopDecision, task, task_group

FOLDER = Path("{folder}")
again = dict(retries=9, retry_delay=0.1)

def note(name, number):
    with (FOLDER / name).open("a") as file:
        print(os.getpid(), number, file=file)

with DAG("calls", default_args=again):
    @task(task_concurrency=CONCURRENCY)
    async def call(number):
        note("called", number)
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        writer.write(f"GET /{number} HTTP/1.0\\r\\n\\r\\n".encode())
        answer = await reader.read()
        writer.close()
        if b" 200 " not in answer.partition(b"\\r\\n")[0]:
            raise ValueError("the server failed")
        return number
    @task
    def add(numbers):
        return sum(numbers)
    add(call.iterate(number=list(range(CALLS))))

with DAG("training", default_args=again):
    @task
    def train(*, loop):
        note("trained", loop.index)
        while read_gate() < 2 * loop.index - 1:
            time.sleep(0.02)
        return (loop.previous or 0) + 1
    class Wait(BaseOperator):
        template_fields = ("number",)
        def __init__(self, number, **kwargs):
            super().__init__(**kwargs)
            self.number = number
        def execute(self, context):
            self.defer(trigger=Gate(2 * self.number), method_name="resume")
        def resume(self, context, event=None):
            return self.number
    def until(*, loop):
        note("decided", loop.index)
        if loop.index == 4 and not (FOLDER / "refused").exists():
            (FOLDER / "refused").touch()
            raise ValueError("not at once")
        return LoopDecision(loop.result >= 5, f"it has {loop.result}")
    @task_group
    def epoch():
        return Wait(task_id="wait", number=train()).output
    @task
    def report(results):
        return list(results)
    report(epoch.loop(max_iterations=9, until=until))

with DAG("limits"):
    @task
    def nothing():
        return 1
    @task_group
    def step():
        nothing()
    never = lambda *, loop: False
    step.override(group_id="fails").loop(max_iterations=2, until=never)
    step.override(group_id="succeeds").loop(max_iterations=2, until=never, on_max="succeed")
"""


class Server(ThreadingHTTPServer):
    """Answers calls below a number, and fails the first request of one in a hundred."""

    request_queue_size = 100
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: Counter[int] = Counter()
        self.changed = threading.Condition()
        self.end = 0

    def open(self, end: int) -> None:
        """Answer calls below this number."""
        with self.changed:
            self.end = end
            self.changed.notify_all()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that were killed."""


class Handler(BaseHTTPRequestHandler):
    """Answers a call once the server is open for it."""

    server: Server

    def do_GET(self) -> None:
        number = int(self.path[1:])
        with self.server.changed:
            self.server.requests[number] += 1
            again = self.server.requests[number] > 1
            self.server.changed.wait_for(lambda: number < self.server.end)
        self.send_response(500 if number % 100 == 50 and not again else 200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield found
    found.open(CALLS)
    found.shutdown()
    found.server_close()


class Runs:
    """A `dev` with runs of all DAGs."""

    def __init__(self, dev: DevSite, server: Server) -> None:
        self.dev, self.server = dev, server
        self.open(0)
        values = {"{folder}": dev.folder, "PORT": server.server_address[1], "CALLS": CALLS, "CONCURRENCY": CONCURRENCY}
        for name, text in (("gates", GATES), ("runs", DAGS)):
            for word, value in values.items():
                text = text.replace(word, str(value))
            (dev.folder / "dags" / f"{name}.py").write_text(text)
        self.start()
        for dag in ("calls", "training", "limits"):
            wait_until(lambda dag=dag: self.dev.run("dags", "trigger", dag).returncode == 0, what=self.tell)

    def start(self) -> None:
        self.dev.start(TIDEMILL_WORKER__REUSE_PROCESSES='["*"]')

    def open(self, gate: int) -> None:
        """Let the loop pass: each iteration asks twice."""
        new = self.dev.folder / "gate.new"
        new.write_text(str(gate))
        new.rename(self.dev.folder / "gate")

    def read(self, name: str) -> list[tuple[int, int]]:
        """Return the processes and the numbers that tasks have noted."""
        path = self.dev.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(process), int(number)) for process, number in (line.split() for line in lines)]

    def wait_for_calls(self, end: int) -> None:
        """Have calls below this number answered, and wait until their outcomes are stored."""
        self.server.open(end)
        counted = "select count(*) from task_part"
        wait_until(lambda: query(self.dev, counted)[0][0] >= end, 120.0, what=self.tell)

    def wait_for_training(self, iteration: int, times: int) -> None:
        """Wait until the first task of an iteration has begun as often."""
        wanted = [iteration] * times
        wait_until(
            lambda: [number for _, number in self.read("trained") if number == iteration] == wanted,
            120.0,
            what=self.tell,
        )

    def kill_attempts(self) -> None:
        """Kill the processes that make calls and that train."""
        pids = [self.read(name)[-1][0] for name in ("called", "trained")]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, pids)), what="the attempts are dead")

    def tell(self) -> str:
        """Return what is known about the runs, for a failed assertion."""
        states = "select task_id, map_index, state, tries, error from task_instance"
        return f"{self.dev.log[-3000:]}\n{query(self.dev, states)}\n{self.read('trained')} {self.read('decided')}"


@pytest.mark.long
@pytest.mark.timeout(600 + CALLS // 20)
def test_calls_and_iterations_end_once_though_each_process_is_killed_on_the_way(dev: DevSite, server: Server) -> None:
    runs, step = Runs(dev, server), CALLS // 4
    runs.wait_for_calls(step)
    runs.wait_for_training(1, times=1)
    runs.kill_attempts()

    runs.wait_for_training(1, times=2)
    runs.open(3)
    runs.wait_for_training(2, times=1)
    deferred = "select count(*) from task_instance where state = 'deferred'"
    wait_until(lambda: query(dev, deferred) == [(1,)], what=runs.tell)
    runs.wait_for_calls(2 * step)
    kill(dev, "services.worker.process")
    kill(dev, "services.triggerer.tasks.process")

    runs.open(4)
    runs.wait_for_training(3, times=1)
    # The second iteration is cleared while the third one runs.
    cleared = dev.run("tasks", "clear", "training", "epoch", "--index", "1", "--downstream")
    assert cleared.returncode == 0, cleared.stderr
    runs.wait_for_training(3, times=2)
    runs.wait_for_calls(3 * step)
    kill(dev, "")
    wait_until(lambda: not find_marked(dev.mark), what="all processes of the killed dev are gone")
    runs.open(99)
    server.open(CALLS)
    runs.start()

    states = "select d.dag_id, r.state from dag_run r join dag d on d.id = r.dag order by d.dag_id"
    wait_until(lambda: {state for _, state in query(dev, states)} <= {"success", "failed"}, 120.0, what=runs.tell)
    assert query(dev, states) == [("calls", "success"), ("limits", "failed"), ("training", "success")], runs.tell()
    check_calls(runs)
    check_loops(runs)
    assert dev.stop() == 0


def check_calls(runs: Runs) -> None:
    dev, server = runs.dev, runs.server
    parts = query(dev, "select number, state, value from task_part order by number")
    assert parts == [(number, "success", str(number)) for number in range(CALLS)]
    of_task = "from xcom x join task_instance t on t.id = x.task where t.task_id = '{}'"
    assert query(dev, f"select x.value {of_task.format('add')}") == [(str(CALLS * (CALLS - 1) // 2),)]
    # Only calls that were under way when a process died are made again, and those that failed.
    again = server.requests.total() - CALLS - CALLS // 100
    assert 0 <= again <= 3 * CONCURRENCY
    claims = "from task_journal x join task_instance t on t.id = x.task where x.after = 'running' and t.map_index = 0"
    workers = query(dev, f"select count(distinct x.said_by) {claims} and t.task_id = 'call'")
    assert workers == [(3,)]


def check_loops(runs: Runs) -> None:
    dev = runs.dev
    value = "select x.value from xcom x join task_instance t on t.id = x.task where t.task_id = 'report'"
    assert query(dev, value) == [("[1,2,3,4,5]",)]
    # One that succeeded ran again only where it was cleared, from the second iteration on.
    left = (
        "select t.map_index, x.given from task_journal x join task_instance t on t.id = x.task "
        "where x.before = 'success' and t.map_index >= 0"
    )
    found = query(dev, left)
    assert {index for index, _ in found} <= {1, 2}, found
    assert {given.partition(" ")[0] for _, given in found} <= {"clear", "remove", "map-told"}, found
    once = (
        "select count(*), count(distinct x.task) from task_journal x join task_instance t on t.id = x.task "
        "where x.after = 'success' and t.task_id like 'epoch.%' and t.map_index in (0, 3, 4)"
    )
    assert query(dev, once) == [(9, 9)]
    assert [number for _, number in runs.read("decided")].count(4) == 2
    loops = "select task_id, state from task_instance where task_id in ('fails', 'succeeds') and map_index < 0"
    assert sorted(query(dev, loops)) == [("fails", "failed"), ("succeeds", "success")]
    gates = (
        "select map_index, state from task_instance where task_id = 'fails.loop_gate' and map_index >= 0 "
        "order by map_index"
    )
    assert query(dev, gates) == [(0, "success"), (1, "failed")]
    rows = dev.rows("tasks", "elements", "training", "epoch")
    assert [(row["map_index"], row["state"]) for row in rows] == [(index, "success") for index in range(5)]
    assert rows[-1]["label"].startswith("ends: it has 5")
