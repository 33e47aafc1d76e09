"""100 pages of an HTTP server are handled in one attempt, and what it emits runs while the pages arrive."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cli.dags.conftest import DevSite
from tests.paged_server import serve_pages
from tests.until import wait_until

PAGES = 100
DAG = """
from tidemill.dags import DAG, HttpStreamOperator, task

class ReadPages(HttpStreamOperator):
    # On a busy machine, a page may take longer than the default.
    stream_linger = 30
    def on_stream_end(self, context):
        return "done"

with DAG("stream"):
    @task
    def double(page):
        return 2 * page
    @task
    def collect(doubles):
        return list(doubles)
    read = ReadPages(task_id="read", url="ADDRESS", next_url="paging.next", page_filter=lambda page: page["number"])
    collect(double.expand(page=read.output))
"""


@pytest.fixture
def address() -> Iterator[str]:
    with serve_pages(PAGES, lambda number, link: {"number": number, "paging": {"next": link}}, seconds=0.02) as url:
        yield url


def query(dev: DevSite, statement: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(dev.folder / "dags.db", timeout=60)) as connection:
        return connection.execute(statement).fetchall()


@pytest.mark.long
def test_100_pages_are_handled_in_one_attempt_and_mapped_while_they_arrive(dev: DevSite, address: str) -> None:
    (dev.folder / "dags" / "stream.py").write_text(DAG.replace("ADDRESS", address))
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
    assert handoffs == [(3,)], "execute is claimed, it defers, and the stream is claimed"
    values = query(dev, "select x.value from xcom x join task_instance t on t.id = x.task where t.task_id = 'collect'")
    assert values == [(str([2 * number for number in range(PAGES)]).replace(" ", ""),)]
    assert query(dev, "select count(*) from map_item") == [(PAGES,)]
    assert dev.stop() == 0
