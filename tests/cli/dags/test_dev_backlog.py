"""Generators that yield far more than may be stored ahead, under `dev`, where their elements need what they hold."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any

import pytest
from tests.cli.dags.conftest import DevSite
from tests.until import wait_until

GENERATOR = """
import time
from tidemill.dags import DAG, task

with DAG("maps", max_active_runs=8, params={"count": 0, "pause": 0.0}):
    @task
    def numbers(params):
        for number in range(params["count"]):
            time.sleep(params["pause"])
            yield number
    @task
    def double(number):
        return 2 * number
    @task
    def collect(doubles):
        total = sum(doubles)
        return [len(doubles), total]
    collect(double.expand(number=numbers()))
"""


def query(dev: DevSite, statement: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(dev.folder / "dags.db", timeout=60)) as connection:
        return connection.execute(statement).fetchall()


def play(
    dev: DevSite, yields: int, backlog: int, *, runs: int = 1, places: int = 1, slots: int = 1, pause: float = 0.0
) -> None:
    """Play runs at a time, and check their results, and how far their generators were ahead."""
    (dev.folder / "dags" / "maps.py").write_text(GENERATOR)
    settings = {
        "TIDEMILL_WORKER__REUSE_PROCESSES": '["*"]',
        "TIDEMILL_WORKER__CONCURRENCY": str(places),
        "TIDEMILL_DAGS__MAX_BACKLOG": str(backlog),
        "TIDEMILL_DAGS__MAX_OUTSTANDING": "8",
    }
    dev.start(**settings)
    assert dev.run("pools", "set", "default_pool", slots).returncode == 0
    wait_until(lambda: dev.run("dags", "show", "maps").returncode == 0, what=lambda: dev.log)
    for number in range(runs):
        conf = f'{{"count": {yields}, "pause": {pause}}}'
        assert dev.run("dags", "trigger", "maps", "--run", f"r{number}", "--conf", conf).returncode == 0
    farthest = 0

    def look() -> bool:
        nonlocal farthest
        ahead = query(dev, "select max(arrived - created) from task_map")[0][0] or 0
        farthest = max(farthest, ahead)
        held = "select count(*) from task_instance where state in ('queued', 'running', 'ending') and block in (0, 3)"
        assert query(dev, held)[0][0] <= slots
        states = [state for (state,) in query(dev, "select state from dag_run")]
        assert "failed" not in states
        return states == ["success"] * runs

    seconds = 120 + runs * yields / 20
    wait_until(look, seconds, what=lambda: dev.log[-3000:], pause_seconds=0.05)
    results = "select x.value from xcom x join task_instance t on t.id = x.task where t.task_id = 'collect'"
    assert query(dev, results) == [(f"[{yields},{yields * (yields - 1)}]",)] * runs
    # Each element ran once, and each generator made a single attempt.
    assert query(dev, "select count(*), sum(tries) from task_instance where map_index >= 0") == [(runs * yields,) * 2]
    assert query(dev, "select distinct tries from task_instance where task_id = 'numbers'") == [(1,)]
    assert farthest < backlog + 1_000 + 1
    assert dev.stop() == 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_generator_and_its_elements_share_a_single_slot_and_place(dev: DevSite) -> None:
    play(dev, yields=100, backlog=30, pause=0.001)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_eight_runs_on_eight_places(dev: DevSite) -> None:
    play(dev, yields=100, backlog=30, runs=8, places=8, slots=8, pause=0.001)
