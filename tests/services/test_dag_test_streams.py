"""`tidemill dags test` with operators that stream, from a real HTTP server and from a trigger alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.paged_server import serve_pages

from tidemill.config.settings import Settings
from tidemill.services.dag_test import run_dag_test

PAGES = 12
#: The pages that the task which fails once has requested.
REQUESTED: list[int] = []


def build_page(number: int, link: str | None) -> dict[str, object]:
    body: dict[str, object] = {"value": [number, number]}
    return body if link is None else body | {"@odata.nextLink": link}


def note_page(number: int, link: str | None) -> dict[str, object]:
    REQUESTED.append(number)
    return build_page(number, link)


@pytest.fixture
def url() -> Iterator[str]:
    with serve_pages(PAGES, build_page) as url:
        yield url


FILE = """
from pathlib import Path

from tidemill.dags import DAG, GraphStreamOperator, StreamOperator, task
from tidemill.dags.operators.http_pages import HttpPagesTrigger

with DAG("pages"):
    URL = "ADDRESS"

    @task
    def add(page):
        return sum(page["value"])

    @task
    def first(event):
        return event["body"]["value"][0]

    def fail_once(page):
        marker = Path("MARKER")
        if page["value"][0] == 5 and not marker.exists():
            marker.touch()
            raise ValueError("it broke")
        return page["value"][0]

    class Again(GraphStreamOperator):
        stream_max_events = 2

    @task
    def check_again(numbers):
        assert list(numbers) == list(range(12)), list(numbers)

    again = Again(
        task_id="again", url="NOTED", page_filter=fail_once, retries=1, retry_delay=0
    )
    check_again(again.output)

    @task
    def check(sums, numbers):
        assert list(sums) == [2 * number for number in range(12)], list(sums)
        assert list(numbers) == list(range(12)), list(numbers)

    pages = GraphStreamOperator(task_id="pages", url=URL)
    source = StreamOperator(task_id="source", trigger=HttpPagesTrigger(URL, next_url=["@odata.nextLink"]))
    check(add.expand(page=pages.output), first.expand(event=source.output))
"""


def test_twelve_pages_are_one_stream_and_a_source_needs_no_attempt(tmp_path: Path, url: str) -> None:
    REQUESTED.clear()
    marker = str(tmp_path / "failed")
    said: list[str] = []
    with serve_pages(PAGES, note_page) as noted:
        file = FILE.replace("ADDRESS", url).replace("MARKER", marker).replace("NOTED", noted)
        (tmp_path / "file.py").write_text(file)
        assert run_dag_test(Settings(), tmp_path, "pages", {}, None, said.append) == "success"

    attempts = [line for line in said if line.endswith((": try 1", ": handle_trigger_events"))]
    own = [line for line in attempts if line.startswith(("--- pages", "--- source"))]
    # The task defers once, and one attempt handles the pages, or two if a page was slow.
    assert own[:2] == ["--- pages: try 1", "--- pages: handle_trigger_events"]
    assert len(own) <= 3
    # The retry begins with the page after the last batch that was kept.
    start = REQUESTED.index(4, REQUESTED.index(5))
    assert REQUESTED[:start] == list(range(start))
    assert REQUESTED[start:] == list(range(4, PAGES))
