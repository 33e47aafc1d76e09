"""`tidemill dags test` with tasks whose attempt runs all elements."""

from __future__ import annotations

from pathlib import Path

from tidemill.config.settings import Settings
from tidemill.services.dag_test import run_dag_test

FILE = """
from tidemill.dags import DAG, Variable, task

with DAG("calls"):
    @task
    def numbers():
        yield from range(5)

    @task
    async def add(x, ti):
        Variable.set("seen", x)
        return x + ti.xcom_pull(task_ids="one")

    @task
    def one():
        return 1

    @task
    def check(found):
        assert list(found) == [1, 2, 3, 4, 5], list(found)

    found = add.iterate(x=numbers())
    one() >> found
    check(found)
"""


FAILS = """
from tidemill.dags import DAG, task

with DAG("fails"):
    @task
    def check(x):
        assert x != 2

    check.iterate(x=[0, 1, 2, 3])
"""


def test_how_many_elements_failed_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    said: list[str] = []
    assert run_dag_test(Settings(), tmp_path, "fails", {}, None, said.append) == "failed"
    assert len([line for line in said if "1 of 4 elements failed" in line]) == 1
    assert not any("1 of 1" in line for line in said)


def test_coroutines_call_the_store(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(FILE)
    said: list[str] = []
    assert run_dag_test(Settings(), tmp_path, "calls", {}, None, said.append) == "success", said
