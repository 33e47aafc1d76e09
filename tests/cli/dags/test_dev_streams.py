"""A trigger streams 100 pages into one attempt, and the elements that the task emits run while the pages arrive."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any

import pytest
from tests.cli.dags.conftest import DevSite
from tests.until import wait_until

PAGES = 100
TRIGGER = """
import asyncio
from tidemill.triggers import BaseTrigger, TriggerEvent

class Pages(BaseTrigger):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def serialize(self):
        return "pages_trigger.Pages", {"count": self.count}

    async def run(self):
        for number in range(self.count):
            await asyncio.sleep(0.02)
            yield TriggerEvent({"page": number})
"""
DAG = f"""
from pages_trigger import Pages
from tidemill.dags import DAG, BaseOperator, task

class ReadPages(BaseOperator):
    def execute(self, context):
        self.defer(trigger=Pages({PAGES}))

    def handle_trigger_events(self, events, context):
        for event in events:
            context["stream"].emit(event.payload["page"])

    def on_stream_end(self, context):
        return "done"

with DAG("stream"):
    @task
    def double(page):
        return 2 * page
    @task
    def collect(doubles):
        return list(doubles)
    collect(double.expand(page=ReadPages(task_id="read").output))
"""


def query(dev: DevSite, statement: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(dev.folder / "dags.db", timeout=60)) as connection:
        return connection.execute(statement).fetchall()


@pytest.mark.long
def test_100_pages_are_handled_in_one_attempt_and_mapped_while_they_arrive(dev: DevSite) -> None:
    (dev.folder / "dags" / "pages_trigger.py").write_text(TRIGGER)
    (dev.folder / "dags" / "stream.py").write_text(DAG)
    dev.start(TIDEMILL_WORKER__REUSE_PROCESSES='["*"]')
    wait_until(lambda: dev.run("dags", "trigger", "stream", "--run", "r1").returncode == 0, what=lambda: dev.log)
    wait_until(
        lambda: query(dev, "select state from dag_run") in ([("success",)], [("failed",)]),
        60.0,
        what=lambda: dev.log[-3000:] + repr(query(dev, "select task_id, map_index, state, error from task_instance")),
    )
    states = query(dev, "select task_id, state, error from task_instance where map_index < 0 order by task_id")
    assert states == [(name, "success", None) for name in ("collect", "double", "read")]
    handoffs = query(
        dev,
        "select count(*) from task_journal j join task_instance t on t.id = j.task where t.task_id = 'read' "
        "and (j.given like 'claim%' or j.given like 'deferred%' or j.given like 'stream-idle%')",
    )
    assert handoffs[0][0] <= 4
    values = query(dev, "select x.value from xcom x join task_instance t on t.id = x.task where t.task_id = 'collect'")
    assert values == [(str([2 * number for number in range(PAGES)]).replace(" ", ""),)]
    assert query(dev, "select count(*) from map_item") == [(PAGES,)]
    assert dev.stop() == 0
