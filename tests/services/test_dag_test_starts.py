"""`tidemill dags test` with tasks that start and end in their triggers."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.until import wait_until

from tidemill.config.settings import Settings
from tidemill.services.dag_test import run_dag_test

FILE = """
from tidemill.dags import DAG, BaseOperator, StartTriggerArgs, task


class Waits(BaseOperator):
    start_trigger_args = StartTriggerArgs("tests.services.triggerer.ending_trigger.Ends", "resume")
    start_from_trigger = True

    def resume(self, context, event=None):
        return event


with DAG("starts", params={"n": 3}):
    ends = Waits(task_id="ends", trigger_kwargs={"state": "success", "value": "{{ params.n }}"})
    resumes = Waits(task_id="resumes", trigger_kwargs={"value": "{{ ti.task_id }}"})
    Waits(task_id="skips", trigger_kwargs={"state": "skipped"})

    @task
    def items():
        return [{"state": "success", "value": 1}, {"state": "", "value": 2}]

    mapped = Waits.partial(task_id="mapped").expand(trigger_kwargs=items())

    @task
    def check(ends, resumes, mapped):
        assert (ends, resumes, list(mapped)) == ("3", "resumes", [1, 2])

    check(ends.output, resumes.output, mapped.output)
"""


def test_tasks_start_and_end_in_their_triggers_without_an_attempt(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(FILE)
    said: list[str] = []

    assert run_dag_test(Settings(), tmp_path, "starts", {}, None, said.append) == "success"

    tries = [line for line in said if line.endswith((": try 1", ": resume"))]
    assert sorted(tries) == ["--- check: try 1", "--- items: try 1", "--- mapped[1]: resume", "--- resumes: resume"]
    wait_until(lambda: all(one.name != "templates of triggers" for one in threading.enumerate()))


NO_LIST = """
from tidemill.dags import DAG, task


with DAG("no_list"):

    @task
    def text():
        return "text"

    @task
    def echo(value):
        return value

    echo.expand(value=text())
"""


def test_a_map_over_a_value_that_is_no_list_says_why_it_failed(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(NO_LIST)
    said: list[str] = []

    assert run_dag_test(Settings(), tmp_path, "no_list", {}, None, said.append) == "failed"

    assert [line for line in said if line.startswith("--- echo: ") and "'text'" in line]
