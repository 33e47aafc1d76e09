"""Processes of the tree are killed while a loop of task groups runs: each iteration comes once, in order."""

from __future__ import annotations

import os
import signal

import pytest
from tests.cli.dags.conftest import DevSite
from tests.until import wait_until

from tidemill.runtime.process.table import find_descendants, find_marked, read_command

ITERATIONS = 30
FILE = """
import time
from tidemill.dags import DAG, LoopDecision, task, task_group

with DAG("training"):
    @task
    def train(*, loop):
        with open("{folder}/ran", "a") as ran:
            print(loop.index, file=ran)
        time.sleep(0.05)
        return 1.0 if loop.index == 1 else loop.previous["loss"] * 0.9
    @task
    def evaluate(loss):
        return {"loss": loss}
    @task_group
    def epoch():
        return evaluate(train())
    def is_good(*, loop):
        return LoopDecision(done=loop.result["loss"] < 0.9 ** (ITERATIONS - 1.5), reason="the loss")
    @task
    def report(results):
        return [result["loss"] for result in results]
    report(epoch.loop(max_iterations=2 * ITERATIONS, until=is_good))
"""
#: The processes that are killed, by a part of their command; the empty one is `dev` itself, which is started again.
VICTIMS = ("services.worker.process", "services.triggerer.tasks.process", "services.zygote", "")


class Training:
    """A `dev` with a run of a loop."""

    def __init__(self, dev: DevSite) -> None:
        self.dev = dev
        text = FILE.replace("{folder}", str(dev.folder)).replace("ITERATIONS", str(ITERATIONS))
        (dev.folder / "dags" / "training.py").write_text(text)

    @property
    def ran(self) -> list[int]:
        """The iterations that have run, in order."""
        path = self.dev.folder / "ran"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def wait(self, iterations: int) -> None:
        wait_until(lambda: len(set(self.ran)) >= iterations, 120.0, what=lambda: f"{self.ran}\n{self.dev.log[-3000:]}")

    def kill(self, victim: str) -> None:
        assert self.dev.process is not None
        root = self.dev.process.pid
        pids = [each for each in find_descendants(root) if victim in read_command(each)] if victim else [root]
        assert pids, self.dev.log[-3000:]
        os.kill(pids[0], signal.SIGKILL)
        if not victim:
            self.dev.process.wait()
            wait_until(lambda: not find_marked(self.dev.mark), what="all processes of the killed dev are gone")
            self.dev.start()

    def check(self) -> None:
        """Check that the run ends with each iteration there once, and with the results in order."""
        over = ("success", "failed")
        wait_until(lambda: self.dev.rows("runs", "list", "training")[0]["state"] in over, 120.0, what=lambda: self.ran)
        assert self.dev.rows("runs", "list", "training")[0]["state"] == "success", self.dev.log[-3000:]
        rows = self.dev.rows("tasks", "elements", "training", "epoch")
        assert [row["state"] for row in rows] == ["success"] * ITERATIONS
        (result,) = [row["value"] for row in self.dev.rows("tasks", "xcoms", "training") if row["task"] == "report"]
        assert result == pytest.approx([0.9**number for number in range(ITERATIONS)])


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_each_iteration_comes_once_though_worker_triggerer_zygote_and_dev_are_killed(any_dev: DevSite) -> None:
    training = Training(any_dev)
    any_dev.start()
    arguments = ("dags", "trigger", "training", "--run", "r1")
    wait_until(lambda: any_dev.run(*arguments).returncode == 0, what=lambda: any_dev.log)
    for number, victim in enumerate(VICTIMS, 1):
        training.wait(number * ITERATIONS // (len(VICTIMS) + 1))
        training.kill(victim)
    training.check()
    assert training.ran == sorted(training.ran)
    assert set(training.ran) == set(range(1, ITERATIONS + 1))
    (any_dev.folder / "ran").unlink()
    assert any_dev.run("tasks", "clear", "training", "epoch", "--index", "11", "--downstream").returncode == 0
    training.wait(4)
    training.kill(VICTIMS[0])
    training.check()
    assert set(training.ran) == set(range(12, ITERATIONS + 1)), "those before it are kept"
    assert any_dev.stop() == 0
