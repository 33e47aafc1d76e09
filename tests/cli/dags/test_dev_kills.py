"""Two processes of the tree are killed, with an action of a user in between: nothing of their tasks is left.

KILLS=50 KILLS_SEED=7 pytest --long tests/cli/dags/test_dev_kills.py
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest
from tests.cli.dags.conftest import DevSite
from tests.size import sized
from tests.until import slack, wait_until

from tidemill.runtime.process.table import find_descendants, find_marked, is_running, list_processes, read_command

ROUNDS = int(os.environ.get("KILLS", sized(2, 4)))
SEED = int(os.environ.get("KILLS_SEED", "0")) or random.randrange(1_000_000)

GRACE_SECONDS = 1

#: Each attempt starts programs in its group, in a session of their own, and without environment and parent.
LEAVES = """
import asyncio, os, subprocess, time
from tidemill.dags import DAG, BaseOperator, BashOperator, task
from tidemill.triggers.base import BaseTrigger

class Starts(BaseTrigger):
    def serialize(self):
        return "leaves.Starts", {{}}
    async def run(self):
        os.system("(setsid env -i sleep {seconds}5 &)")
        await asyncio.Event().wait()
        yield

class Waits(BaseOperator):
    def execute(self, context):
        self.defer(trigger=Starts(), method_name="resume")
    def resume(self, context, event=None):
        pass

with DAG("leaves"):
    BashOperator(
        task_id="bash",
        bash_command="setsid sleep {seconds}1 & sleep {seconds}2 & (setsid env -i sleep {seconds}3 &) ; sleep 6000",
    )
    Waits(task_id="waits")
    @task
    def py():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 256)
                os.execve("/bin/sleep", ["sleep", "{seconds}4"], {{}})
            os._exit(0)
        time.sleep(6000)
    py()
"""


class Leaves:
    """A `dev` whose tasks leave programs behind, and those programs."""

    def __init__(self, dev: DevSite) -> None:
        self.dev = dev
        # Like those of nobody else on this machine.
        self.seconds = f"7{os.getpid()}"
        (dev.folder / "dags" / "leaves.py").write_text(LEAVES.format(seconds=self.seconds))
        self.runs = 0

    def start(self) -> None:
        self.dev.start(TIDEMILL_WORKER__TERM_GRACE_SECONDS=str(GRACE_SECONDS), TIDEMILL_WORKER__CONCURRENCY="8")

    def programs(self) -> dict[int, str]:
        found = {pid: read_command(pid).strip() for pid in list_processes()}
        return {pid: said for pid, said in found.items() if said.startswith(f"sleep {self.seconds}")}

    def programs_of_attempts(self) -> dict[int, str]:
        """Return those of task processes: those of triggers live as long as the triggerer does."""
        return {pid: said for pid, said in self.programs().items() if not said.endswith("5")}

    def until_started(self) -> None:
        wait_until(lambda: len(set(self.programs().values())) == 5, what=lambda: f"{self.programs()}\n{self.dev.log}")

    def trigger(self) -> None:
        self.runs += 1
        done = self.dev.run("dags", "trigger", "leaves", "--run", f"r{self.runs}")
        assert done.returncode == 0, done.stderr

    def act(self, action: str) -> None:
        """Do what a user does; it may fail, since what it needs may have been killed."""
        run = f"r{self.runs}"
        if action == "cancel":
            self.dev.run("runs", "cancel", "leaves", run)
        elif action == "trigger":
            self.dev.run("dags", "trigger", "leaves")
        elif action == "clear":
            self.dev.run("tasks", "clear", "leaves", "--run", run)
        elif action == "mark":
            self.dev.run("tasks", "mark", "leaves", "bash", "--as", "failed", "--run", run)

    def cancel_all(self) -> None:
        for row in self.dev.rows("runs", "list", "leaves"):
            if row["state"] not in ("success", "failed"):
                done = self.dev.run("runs", "cancel", "leaves", row["run"])
                assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.timeout(120 * ROUNDS)
def test_nothing_is_left_after_two_kills_and_an_action_in_between(dev: DevSite) -> None:
    random_ = random.Random(SEED)
    leaves = Leaves(dev)
    leaves.start()
    for number in range(ROUNDS):
        leaves.trigger()
        leaves.until_started()
        story = [f"seed {SEED}, round {number}"]
        kill_two(leaves, random_, story)
        began = time.monotonic()
        if dev.process is not None and is_running(dev.process.pid):
            leaves.cancel_all()
            began = time.monotonic()
            wait_until(
                lambda: not leaves.programs_of_attempts(),
                what=lambda story=story: f"nothing is left: {leaves.programs()}\n{story}",
            )
            assert time.monotonic() - began < slack(5 + GRACE_SECONDS), story
        else:
            wait_until(
                lambda: not leaves.programs() and not find_marked(dev.mark),
                what=lambda story=story: f"nothing is left: {leaves.programs()} {find_marked(dev.mark)}\n{story}",
            )
            assert time.monotonic() - began < slack(5), story
            leaves.start()
        print(*story, f"{time.monotonic() - began:.2f} s", sep="\n  ")
    assert dev.stop() == 0
    assert leaves.programs() == {}


def kill_two(leaves: Leaves, random_: random.Random, story: list[str]) -> None:
    """Kill two processes, with an action of a user in between, and tell what was done."""
    assert leaves.dev.process is not None
    root = leaves.dev.process.pid
    for action in (random_.choice(["nothing", "clear", "mark", "cancel", "trigger"]), ""):
        alive = [root, *find_descendants(root)] if is_running(root) else list(find_marked(leaves.dev.mark))
        tree = [pid for pid in alive if pid not in leaves.programs()]
        if tree:
            # As often those at the top as one of the many leaves.
            victim = random_.choice([*tree, *tree[:3]])
            story.append(f"kills {victim} {read_command(victim)[:90]}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: not is_running(victim), what=f"{victim} is dead")
        story.append(action)
        leaves.act(action)
