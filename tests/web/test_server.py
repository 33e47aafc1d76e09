"""The server: on a real port, from the start of a pipeline to its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs
from tests.until import slack, wait_until
from tests.web.scripted_pipeline import ScriptedPipeline

from tidemill.core.errors import ConfigError
from tidemill.spark.live.web_ui import WebUi, serve_web
from tidemill.web import connections


@contextlib.contextmanager
def served(pipeline: ScriptedPipeline | None = None) -> Iterator[WebUi]:
    with serve_web((pipeline or ScriptedPipeline()).watched()) as web:
        assert web is not None
        web.begin()
        wait_until(lambda: ask(web, "/healthz")[0] == 200, 30)
        yield web


def find_place(web: WebUi) -> tuple[str, int]:
    parts = urlsplit(web.address)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def ask(web: WebUi, path: str, headers: dict[str, str] | None = None) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(*find_place(web), timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())


def log_in(web: WebUi) -> dict[str, str]:
    """Return the headers of a session."""
    status, _, headers = ask(web, f"/login?{urlsplit(web.address).query}")
    assert status == 200
    return {"Cookie": headers["set-cookie"].split(";")[0]}


def test_the_address_with_its_key_is_logged_and_shows_the_pipeline() -> None:
    with capture_logs() as logs, served() as web:
        status, page, _ = ask(web, "/", log_in(web))
        assert (status, "order-workers" in page) == (200, True)
        assert ask(web, "/")[0] == 303
        place = find_place(web)
    assert [line["web"] for line in logs] == [web.address]
    with pytest.raises(OSError):
        socket.create_connection(place, 5)


def test_a_client_from_before_the_engines_is_answered_once_they_were_asked_for() -> None:
    with serve_web(ScriptedPipeline().watched()) as web:
        assert web is not None
        early = socket.create_connection(find_place(web), 30)
        early.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        web.begin()
        with contextlib.closing(early), early.makefile("rb") as answer:
            assert answer.readline().startswith(b"HTTP/1.1 200")


def test_an_end_before_the_beginning_frees_the_port() -> None:
    with serve_web(ScriptedPipeline().watched()) as web:
        assert web is not None
        place = find_place(web)
    socket.create_server(place).close()


def test_an_end_during_the_import_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    importing, go_on = threading.Event(), threading.Event()

    def build_slowly(name: str) -> Any:
        importing.set()
        go_on.wait(60)
        raise ImportError(name)

    monkeypatch.setattr("tidemill.spark.live.web_ui.importlib.import_module", build_slowly)
    with capture_logs() as logs, serve_web(ScriptedPipeline().watched()) as web:
        assert web is not None
        web.begin()
        assert importing.wait(60)
        place = find_place(web)
    socket.create_server(place).close()
    go_on.set()
    web._thread.join(60)
    assert [line["event"] for line in logs] == ["serving the web UI"]


def test_a_stream_has_the_state_at_once_and_ends_with_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with served() as web:
        connection = http.client.HTTPConnection(*find_place(web), timeout=30)
        connection.request("GET", "/api/v1/live", headers=log_in(web))
        answer = connection.getresponse()
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        assert answer.readline() == b"event: overview\r\n"
        overview: dict[str, Any] = json.loads(answer.readline().removeprefix(b"data: "))
        assert overview["group"] == "order-workers"
        began = time.monotonic()
    assert time.monotonic() - began < slack(10)
    rest = answer.read()
    assert rest.startswith(b"\r\n")
    connection.close()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_silent_clients_give_way_and_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    with served() as web, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(find_place(web), 30)) for _ in range(6)]
        for _ in range(5):
            assert ask(web, "/healthz")[0] == 200
        assert silent[0].recv(1) == b""
        monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.05)
        slow = stack.enter_context(socket.create_connection(find_place(web), 30))
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost:")
        assert slow.recv(1) == b""


def test_clients_that_send_their_bodies_slowly_keep_nobody_out_and_leave_nothing_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    head = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    with served() as web, contextlib.ExitStack() as stack:
        for _ in range(6):
            slow = stack.enter_context(socket.create_connection(find_place(web), 30))
            slow.sendall(head + b"x")
        for _ in range(5):
            assert ask(web, "/healthz")[0] == 200
        slow = stack.enter_context(socket.create_connection(find_place(web), 30))
        slow.sendall(head + b"x")
        assert ask(web, "/healthz")[0] == 200  # so that the server has accepted the slow one before
        began = time.monotonic()
        web.close()
        assert time.monotonic() - began < slack(10)
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1) == b""
    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []


@pytest.mark.parametrize("line", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: " + b"x" * 100_000 + b"\r\n\r\n"])
def test_what_is_not_http_is_refused(line: bytes) -> None:
    with served() as web, contextlib.closing(socket.create_connection(find_place(web), 30)) as client:
        client.sendall(line)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(100).startswith((b"HTTP/1.1 400", b""))
        assert ask(web, "/healthz")[0] == 200


def test_a_chosen_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        pipeline = ScriptedPipeline({"debug": {"port": port}})
        with pytest.raises(ConfigError, match=rf"debug.port: port {port} of 127.0.0.1 is in use"):
            serve_web(pipeline.watched()).__enter__()


def test_a_web_ui_that_cannot_be_built_is_logged_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.spark.live.web_ui._BUILDER", "tidemill.web.no_such_module")
    with capture_logs() as logs, serve_web(ScriptedPipeline().watched()) as web:
        assert web is not None
        web.begin()
        wait_until(lambda: len(logs) == 2, 30)
    assert logs[1]["event"] == "the web UI cannot be started; the pipeline runs without it"


def test_off_means_that_nothing_of_it_is_imported() -> None:
    program = """
import sys
from types import SimpleNamespace
from tidemill.config.settings import Settings
from tidemill.spark.live.web_ui import serve_web
from tidemill.spark.pipeline import Pipeline
with serve_web(SimpleNamespace(settings=Settings.model_validate({"debug": {"enabled": False}}))) as web:
    assert web is None
names = "fastapi", "starlette", "uvicorn", "jinja2", "argon2", "sse_starlette", "tidemill.web"
print(sorted(name for name in sys.modules if name.startswith(names)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_two_pipelines_of_one_folder_share_the_number_of_a_chosen_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    debug = {"enabled": True, "port": port}
    first, second, other = (
        ScriptedPipeline({"debug": debug | {"db_dir": str(tmp_path / name)}}).watched() for name in ("a", "a", "b")
    )
    with serve_web(first) as one, serve_web(second) as two:
        assert one is not None
        assert two is not None
        assert one.address.startswith(f"http://127.0.0.1:{port}/")
        assert not two.address.startswith(f"http://127.0.0.1:{port}/")
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"), serve_web(other):
            pass
