"""Each process of the tree is killed once while maps and a group run: each element ends once, and keeps its result.

With `MAP_KILLS=100000` it has as many elements. Above 2,000 there is one map instead of maps over maps and a group, and
in the end all processes are killed at once, twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from typing import Any

import pytest
from tests.cli.dags.conftest import DevSite
from tests.size import sized
from tests.until import wait_until

from tidemill.runtime.process.table import find_descendants, find_marked, is_running, read_command

ELEMENTS = int(os.environ.get("MAP_KILLS", sized(250, 500)))
IS_LARGE = ELEMENTS > 2_000
#: The mapped tasks and the mapped group, of which each has as many elements.
MAPS = ("double",) if IS_LARGE else ("add", "double", "triple", "triple.add", "triple.double")
#: The processes that are killed, by a part of their command; the empty one is `dev` itself, which is started again.
VICTIMS = ("services.zygote", "services.worker.process", "services.triggerer.tasks.process", "")
#: All processes at once.
ALL = "all"
KILLS = (*VICTIMS, ALL, ALL) if IS_LARGE else VICTIMS
SECONDS = 120 + ELEMENTS / 20
FILE = f"""
from datetime import timedelta
from tidemill.dags import DAG, task, task_group

with DAG("maps"):
    @task(retries=9, retry_delay=timedelta(seconds=0.1))
    def numbers():
        yield from range({ELEMENTS})
    @task(retries=9, retry_delay=timedelta(seconds=0.1))
    def double(number):
        return 2 * number
    @task(retries=9, retry_delay=timedelta(seconds=0.1))
    def add(one, other):
        return one + other
    @task(retries=9, retry_delay=timedelta(seconds=0.1))
    def collect(sums, triples):
        return [list(sums), list(triples)]
    @task_group
    def triple(number):
        return add(double(number), number)
    given = numbers()
    doubles = double.expand(number=given)
    if {IS_LARGE}:
        collect(doubles, [])
    else:
        sums = add.partial(other=1).expand(one=doubles)
        collect(sums, triple.partial(max_outstanding=50).expand(number=given))
"""


def query(dev: DevSite, statement: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(dev.folder / "dags.db", timeout=60)) as connection:
        return connection.execute(statement).fetchall()


def count_done(dev: DevSite) -> int:
    return int(query(dev, "select coalesce(min(success), 0) from task_map")[0][0])


def kill(dev: DevSite, victim: str) -> None:
    assert dev.process is not None
    root = dev.process.pid
    tree = list(find_descendants(root))
    if victim == ALL:
        pids = [root, *tree]
    elif victim:
        pids = [each for each in tree if victim in read_command(each)][:1]
    else:
        pids = [root]
    assert pids, victim
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, pids)), what=f"{victim or 'dev'} is dead")


@pytest.mark.long
@pytest.mark.timeout(600 + ELEMENTS / 10)
def test_each_element_ends_once_though_each_process_is_killed_on_the_way(dev: DevSite) -> None:
    (dev.folder / "dags" / "maps.py").write_text(FILE)
    settings = {"TIDEMILL_WORKER__REUSE_PROCESSES": '["*"]'}
    dev.start(**settings)
    wait_until(lambda: dev.run("dags", "trigger", "maps", "--run", "r1").returncode == 0, what=lambda: dev.log)

    for number, victim in enumerate(KILLS, 1):
        wanted = number * ELEMENTS // (len(KILLS) + 2)
        wait_until(lambda wanted=wanted: count_done(dev) >= wanted, SECONDS, what=lambda: dev.log[-3000:])
        assert count_done(dev) < ELEMENTS
        kill(dev, victim)
        if victim in ("", ALL):
            wait_until(lambda: not find_marked(dev.mark), what="all processes of the killed dev are gone")
            dev.start(**settings)

    wait_until(lambda: query(dev, "select state from dag_run") == [("success",)], SECONDS, what=lambda: dev.log[-3000:])
    of_elements = "select task_id, map_index, state from task_instance where map_index >= 0 order by task_id, map_index"
    states = [(task_id, index, "success") for task_id in MAPS for index in range(ELEMENTS)]
    assert query(dev, of_elements) == states
    left = query(dev, "select task, epoch from task_journal where before = 'success'")
    assert left == []
    successes = query(dev, "select count(*), count(distinct task) from task_journal where after = 'success'")
    # The elements, their heads, the generator and the task that collects the results.
    total = len(MAPS) * (ELEMENTS + 1) + 2
    assert successes == [(total, total)]
    collected = query(
        dev, "select x.value from xcom x join task_instance t on t.id = x.task where t.task_id = 'collect'"
    )
    doubles = [2 * number for number in range(ELEMENTS)]
    wanted = [doubles, []] if IS_LARGE else [[one + 1 for one in doubles], [3 * number for number in range(ELEMENTS)]]
    assert collected == [(str(wanted).replace(" ", ""),)]
    assert dev.stop() == 0
