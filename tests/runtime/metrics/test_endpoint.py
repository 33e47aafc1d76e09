"""The endpoint, as its clients see it."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.runtime.metrics.asking import ask, get, parse, scrape
from tests.until import wait_until

from tidemill.config.sections.metrics_settings import MetricsSettings
from tidemill.runtime.metrics import endpoint as endpoint_module
from tidemill.runtime.metrics.definitions import Definition, Kind
from tidemill.runtime.metrics.endpoint import MetricsEndpoint
from tidemill.runtime.metrics.exposition import write_families
from tidemill.runtime.metrics.families import Distribution, Family
from tidemill.runtime.sockets.ports import listen

DONE = Definition("done_total", Kind.COUNTER, "Done.", ("engine",))
TOOK = Definition("took_seconds", Kind.HISTOGRAM, "Took.", ("engine",))
ABOUT = Definition("worker_info", Kind.INFO, "Who.", ("worker_id",))

Start = Callable[..., MetricsEndpoint]


def collect() -> Iterable[Family]:
    yield Family(DONE, [(("0",), 3), (("1",), 4)])
    yield Family(TOOK, [(("0",), Distribution((0.1, 1.0), (2, 0, 1), 5.5))])
    yield Family(ABOUT, [(('w"\n\\',), 1)])


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[MetricsEndpoint] = []

    def run(
        collect: Callable[[], Iterable[Family]] = collect,
        dead: Callable[[], list[str]] = list,
        unready: Callable[[], list[str]] = list,
    ) -> MetricsEndpoint:
        listener = listen(MetricsSettings(port=0), is_chosen=True)
        assert listener is not None
        started.append(MetricsEndpoint(listener, collect, dead, unready).__enter__())
        return started[-1]

    yield run
    for endpoint in started:
        endpoint.__exit__(None, None, None)


def test_metrics_are_text_that_prometheus_parses(start: Start) -> None:
    found = scrape(start().address)

    assert found["tidemill_done_total"] == {("0",): 3, ("1",): 4}
    assert found["tidemill_took_seconds_bucket"] == {("0", "0.1"): 2, ("0", "1.0"): 2, ("0", "+Inf"): 3}
    assert (found["tidemill_took_seconds_sum"], found["tidemill_took_seconds_count"]) == ({("0",): 5.5}, {("0",): 3})
    assert found["tidemill_worker_info"] == {('w"\n\\',): 1}
    assert found["process_resident_memory_bytes"][()] > 0


def test_the_names_of_a_definition_are_those_of_the_samples() -> None:
    for definition, family in zip((DONE, TOOK, ABOUT), collect(), strict=True):
        assert sorted(parse(write_families([family]).decode())) == sorted(definition.list_series())


def test_a_large_answer_is_compressed_for_those_who_accept_that(start: Start) -> None:
    request = urllib.request.Request(f"{start().address}/metrics", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert "tidemill_done_total" in parse(gzip.decompress(answer.read()).decode())


def test_only_what_is_asked_for_by_name_is_answered(start: Start) -> None:
    address = start().address
    names = "name[]=tidemill_done_total&name[]=tidemill_took_seconds_sum&name[]=process_open_fds"

    found = parse(get(f"{address}/metrics?{names}")[1])
    took = {f"tidemill_took_seconds_{part}" for part in ("bucket", "sum", "count")}
    assert set(found) == {"tidemill_done_total", "process_open_fds", *took}
    assert parse(get(f"{address}/metrics?name[]=nothing")[1]) == {}


def test_checks_answer_503_with_the_reasons(start: Start) -> None:
    reasons: list[str] = []
    address = start(unready=lambda: reasons).address

    assert ask(f"{address}/readyz") == (200, [])
    reasons.append("it is starting")
    assert ask(f"{address}/readyz") == (503, ["it is starting"])
    assert ask(f"{address}/healthz") == (200, [])


def test_other_paths_and_methods_are_refused(start: Start) -> None:
    address = start().address

    assert get(f"{address}/")[0] == 200
    assert get(f"{address}/metrics/../etc")[0] == 404
    for method, status in (("POST", 405), ("DELETE", 405), ("HEAD", 200)):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        connection.request(method, "/metrics")
        answer = connection.getresponse()
        assert (answer.status, answer.read() != b"") == (status, method != "HEAD")
        connection.close()


def test_an_error_is_answered_without_its_text_and_the_next_request_as_usual(start: Start) -> None:
    wrong = [True]

    def fail() -> list[str]:
        if wrong[0]:
            raise LookupError("s3cret")
        return []

    address = start(unready=fail).address
    assert get(f"{address}/readyz") == (500, "see the log of the process\n")
    wrong[0] = False
    assert ask(f"{address}/readyz") == (200, [])


def is_disconnected(client: socket.socket) -> bool:
    client.settimeout(60)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_silent_clients_hold_up_no_other_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module._RequestHandler, "timeout", 0.2)
    monkeypatch.setattr(endpoint_module, "MAX_CLIENTS", 4)
    endpoint = start()
    host, port = endpoint.address.removeprefix("http://").split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(8)]
    try:
        with contextlib.suppress(OSError):  # it may have been too slow already
            silent[0].sendall(b"GET /healthz HT")

        def answers() -> bool:
            try:
                return ask(f"{endpoint.address}/healthz") == (200, [])
            except OSError:
                return False  # all places are taken for a moment

        wait_until(answers)
        assert all(is_disconnected(one) for one in silent)
    finally:
        for one in silent:
            one.close()


def test_clients_that_say_nothing_give_way_to_one_that_asks(start: Start) -> None:
    endpoint = start()
    host, port = endpoint.address.removeprefix("http://").split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(3 * endpoint_module.MAX_CLIENTS)]
    try:
        # A probe that is refused has a pipeline restarted that works.
        assert [ask(f"{endpoint.address}/healthz") for _ in range(10)] == [(200, [])] * 10
        assert is_disconnected(silent[0])
    finally:
        for one in silent:
            one.close()


def test_a_client_that_gets_no_thread_takes_no_place(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = start()

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(endpoint_module.MAX_CLIENTS + 1):
            with pytest.raises(OSError):
                ask(f"{endpoint.address}/healthz")
    assert ask(f"{endpoint.address}/healthz") == (200, [])


def test_it_ends_at_once_and_its_port_is_free_again_though_a_client_waits(start: Start) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def hang() -> list[str]:
        asked.set()
        go_on.wait(60)
        return []

    endpoint = start(unready=hang)
    client = threading.Thread(target=lambda: get(f"{endpoint.address}/readyz"))
    client.start()
    assert asked.wait(60)
    endpoint.__exit__(None, None, None)
    port = int(endpoint.address.rpartition(":")[2])
    again = listen(MetricsSettings(port=port), is_chosen=True)
    assert again is not None
    again.close()
    go_on.set()
    client.join(60)


def test_openmetrics_is_spoken_with_those_who_prefer_it(start: Start) -> None:
    status, text = get(f"{start().address}/metrics", Accept="application/openmetrics-text; version=1.0.0")

    assert (status, text.endswith("# EOF\n"), text.count("# EOF")) == (200, True, 1)
    found = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert found.pop("process_open_fds") == "gauge"
    kinds = {"tidemill_done": "counter", "tidemill_took_seconds": "histogram", "tidemill_worker": "info"}
    assert {name: kind for name, kind in found.items() if name.startswith("tidemill")} == kinds
