"""`tidemill dags test` with operators that stream, from a real HTTP server and from a trigger alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tidemill.config.settings import Settings
from tidemill.services.dag_test import run_dag_test

PAGES = 12


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        number = int(parse_qs(urlsplit(self.path).query).get("page", ["0"])[0])
        body: dict[str, object] = {"value": [number, number]}
        if number + 1 < PAGES:
            body["@odata.nextLink"] = f"?page={number + 1}"
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/items"
    server.shutdown()
    server.server_close()


FILE = """
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

    @task
    def check(sums, numbers):
        assert list(sums) == [2 * number for number in range(12)], list(sums)
        assert list(numbers) == list(range(12)), list(numbers)

    pages = GraphStreamOperator(task_id="pages", url=URL)
    source = StreamOperator(task_id="source", trigger=HttpPagesTrigger(URL, next_url=["@odata.nextLink"]))
    check(add.expand(page=pages.output), first.expand(event=source.output))
"""


def test_twelve_pages_are_one_stream_and_a_source_needs_no_attempt(tmp_path: Path, url: str) -> None:
    (tmp_path / "file.py").write_text(FILE.replace("ADDRESS", url))
    said: list[str] = []

    assert run_dag_test(Settings(), tmp_path, "pages", {}, None, said.append) == "success"

    attempts = [line for line in said if line.endswith((": try 1", ": handle_trigger_events"))]
    own = [line for line in attempts if line.startswith(("--- pages", "--- source"))]
    # The task defers once, and one attempt handles the pages, or two if a page was slow.
    assert own[:2] == ["--- pages: try 1", "--- pages: handle_trigger_events"]
    assert len(own) <= 3
