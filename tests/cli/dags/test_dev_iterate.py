"""Thousands of HTTP calls in one attempt, whose process is killed halfway: each result is stored once.

`TIDEMILL_TEST_CALLS` sets their number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.cli.dags.conftest import DevSite
from tests.until import wait_until

CALLS = int(os.environ.get("TIDEMILL_TEST_CALLS", "400"))
CONCURRENCY = 20
DAG = """
import asyncio, os
from pathlib import Path
from tidemill.dags import DAG, task

with DAG("calls"):
    @task(task_concurrency=CONCURRENCY, retries=1, retry_delay=0.1)
    async def call(number):
        if not Path("PIDS").exists():
            Path("PIDS").write_text(str(os.getpid()))
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        writer.write(f"GET /{number} HTTP/1.0\\r\\n\\r\\n".encode())
        answer = await reader.read()
        writer.close()
        if b" 200 " not in answer.partition(b"\\r\\n")[0]:
            raise ValueError("the server failed")
        return number
    @task
    def add(numbers):
        return sum(numbers)
    add(call.iterate(number=list(range(CALLS))))
"""


class Server(ThreadingHTTPServer):
    """Fails the first request of one call in a hundred."""

    request_queue_size = 100

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: Counter[int] = Counter()
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """Answers a call after a while."""

    server: Server

    def do_GET(self) -> None:
        number = int(self.path[1:])
        with self.server.lock:
            self.server.requests[number] += 1
            again = self.server.requests[number] > 1
        time.sleep(0.05)
        self.send_response(500 if number % 100 == 50 and not again else 200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def query(dev: DevSite, statement: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(dev.folder / "dags.db", timeout=60)) as connection:
        return connection.execute(statement).fetchall()


@pytest.mark.long
def test_calls_go_on_in_another_process_where_a_killed_one_has_stopped(dev: DevSite, server: Server) -> None:
    pids = dev.folder / "pids"
    values = {"CONCURRENCY": CONCURRENCY, "PIDS": pids, "PORT": server.server_address[1], "CALLS": CALLS}
    text = DAG
    for name, value in values.items():
        text = text.replace(name, str(value))
    (dev.folder / "dags" / "calls.py").write_text(text)
    dev.start()
    wait_until(lambda: dev.run("dags", "trigger", "calls", "--run", "r1").returncode == 0, what=lambda: dev.log)
    wait_until(lambda: server.requests.total() >= CALLS // 2, what=lambda: dev.log)

    os.kill(int(pids.read_text()), signal.SIGKILL)

    ended = ([("success",)], [("failed",)])
    wait_until(lambda: query(dev, "select state from dag_run") in ended, seconds=120, what=lambda: dev.log)
    assert query(dev, "select state from dag_run") == [("success",)]
    assert query(dev, "select count(*), min(state), max(state) from task_part") == [(CALLS, "success", "success")]
    assert query(dev, "select value from task_part order by number") == [(str(number),) for number in range(CALLS)]
    assert query(dev, "select value from xcom") == [(str(CALLS * (CALLS - 1) // 2),)]
    # Calls that were under way, or whose results were not stored yet, are made again.
    again = server.requests.total() - CALLS - CALLS // 100
    assert 0 <= again <= CONCURRENCY * 10
