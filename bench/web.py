"""What the web UI of a running pipeline costs and how fast it answers: `python -m bench.web [page|clients|search]`.

JSON lines out. A pipeline with known results runs with recorder, web UI and default settings, the clients are in this
process. Clients are measured in turn with none, as CPU time of the driver at 1,000 messages a second; searches are
asked one after the other while messages come as fast as the pipeline takes them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness import TICKS, Bench, chosen, report
from bench.recording import make_lines

from tidemill.runtime.embedded.broker import free_port
from tidemill.runtime.process.table import read_stat
from tidemill.web.access.hashes import hash_token

TOKEN = "the-token-of-the-bench"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
GROUP = "web"
PER_SECOND = 1_000
CLIENTS = 3
#: Clients are there for this long in turn with none, this often: a minute of both.
TURN_SECONDS, TURNS = 20, 3
#: For the searches: this many messages are there before, and this many requests of each kind are made.
BEFORE, REQUESTS = 300_000, 60
_ASSET = re.compile(r'(?:src|href)="(/static/[^"]+)"')


class Site:
    """A pipeline with a web UI."""

    def __init__(self, bench: Bench, port: int, driver: int) -> None:
        self.bench = bench
        self.port = port
        self.driver = driver
        self.fed = 0

    def feed(self, values: list[bytes]) -> None:
        self.bench.feed(values)
        self.fed += len(values)

    def get(self, path: str) -> tuple[float, bytes]:
        """Return how long an answer took over a connection of its own, and the answer."""
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path, headers=HEADERS)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise AssertionError(f"{path}: {answer.status} {body[:200]!r}")
        return time.perf_counter() - start, body

    def driver_seconds(self) -> float:
        """Return the CPU time of the driver's process alone."""
        return sum(int(field) for field in read_stat(self.driver)[11:13]) / TICKS

    @contextlib.contextmanager
    def fed_meanwhile(self, per_second: int | None) -> Iterator[None]:
        """Feed messages until the block ends; None: as many as the broker takes, in bursts of 50,000."""
        ended = threading.Event()
        count = 50_000 if per_second is None else per_second // 10
        values = make_lines(count)

        def work() -> None:
            while not ended.is_set():
                start = time.monotonic()
                self.feed(values)
                if per_second is not None:
                    ended.wait(max(0.0, 0.1 - (time.monotonic() - start)))
                else:
                    while self.fed - self.bench.committed(GROUP) > 2 * count and not ended.wait(0.05):
                        pass

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    @contextlib.contextmanager
    def followed(self, clients: int) -> Iterator[list[int]]:
        """Follow the overview with so many clients until the block ends; yields how many updates each has had."""
        updates = [0] * clients
        connections = [http.client.HTTPConnection("127.0.0.1", self.port, timeout=60) for _ in range(clients)]

        def follow(number: int) -> None:
            with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
                connections[number].request("GET", "/api/v1/live?view=page", headers=HEADERS)
                answer = connections[number].getresponse()
                while line := answer.readline():
                    updates[number] += line.startswith(b"event:")

        threads = [threading.Thread(target=follow, args=(number,), daemon=True) for number in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield updates
        finally:
            for connection in connections:
                if connection.sock is not None:
                    connection.sock.close()
                connection.close()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Site]:
    """Run a pipeline whose web UI this process may use."""
    bench = Bench(folder)
    port = free_port()
    try:
        debug = {
            "enabled": True,
            "port": port,
            "db_dir": str(folder / "recordings"),
            "tokens": {"bench": {"hash": hash_token(TOKEN), "role": "read"}},
        }
        sinks = {"filesystem": {"out": {"base_path": str(folder / "out")}}}
        with bench.pipeline("Known", GROUP, sinks=sinks, debug=debug) as process:
            site = Site(bench, port, process.pid)
            site.feed(make_lines(5_000))
            bench.wait_committed(GROUP, 5_000)
            bench.wait_settled(GROUP, 2)
            yield site
    finally:
        bench.close()


def page(site: Site) -> None:
    """The first page with all that it loads, the charts' numbers included, as a browser without a cache gets it."""
    _, html = site.get("/")
    assets = list(dict.fromkeys(_ASSET.findall(html.decode())))
    sizes, times = {}, []
    for _ in range(20):
        spent = 0.0
        for path in ["/", *assets, "/api/v1/series?seconds=900"]:
            seconds, body = site.get(path)
            sizes[path], spent = len(body), spent + seconds
        times.append(spent)
    report(
        bench="page",
        kilobytes=sum(sizes.values()) / 1000,
        bar_kilobytes=150,
        parts=sizes,
        milliseconds=statistics.median(times) * 1000,
        worst_milliseconds=max(times) * 1000,
        bar_milliseconds=200,
        load=os.getloadavg()[0],
    )


def clients(site: Site) -> None:
    """Clients on the overview, at a steady rate."""
    used: dict[int, list[float]] = {0: [], CLIENTS: []}
    received: list[int] = []
    rates: list[float] = []
    with site.fed_meanwhile(PER_SECOND):
        time.sleep(5)
        for turn in range(2 * TURNS):
            count = CLIENTS if turn % 2 else 0
            with site.followed(count) as updates:
                time.sleep(2)
                before, seen, start = site.driver_seconds(), list(updates), time.monotonic()
                fed = site.fed
                time.sleep(TURN_SECONDS)
                spent = (site.driver_seconds() - before) / (time.monotonic() - start)
                used[count].append(spent)
                rates.append((site.fed - fed) / (time.monotonic() - start))
                received += [now - then for now, then in zip(updates, seen, strict=True)]
    if min(received) < TURN_SECONDS:
        raise AssertionError(f"updates of the clients in {TURN_SECONDS} s: {received}")
    share = {count: statistics.mean(found) * 100 for count, found in used.items()}
    report(
        bench="clients",
        clients=CLIENTS,
        percent_of_a_core={count: [round(each * 100, 2) for each in found] for count, found in used.items()},
        messages_per_second=statistics.mean(rates),
        updates_per_client=statistics.mean(received) / TURN_SECONDS,
        more_percent=share[CLIENTS] - share[0],
        bar_percent=3,
        load=os.getloadavg()[0],
    )


SEARCHES = {
    "messages": "/api/v1/messages",
    "failed": "/api/v1/messages?status=failed",
    "offset, hit": "/api/v1/messages?topic=in&partition=1&offset=4711",
    "offset, miss": "/api/v1/messages?topic=in&partition=1&offset=999999999",
    "key, miss": "/api/v1/messages?key=nobody",
    "story": "/api/v1/messages/in/1/4711",
    "task, miss": "/api/v1/messages?task=nobody",
    "label, miss": "/api/v1/messages?label=a%3Db",
    "error, miss": "/api/v1/messages?error=nobody",
    "tasks": "/api/v1/tasks",
    "events": "/api/v1/events",
    "failures": "/api/v1/failures",
    "runs": "/api/v1/runs",
    "overview": "/api/v1/overview",
    "series": "/api/v1/series?seconds=900",
}


def search(site: Site) -> None:
    """Each kind of list and search, while the pipeline does all it can."""
    site.feed(make_lines(BEFORE))
    site.bench.wait_committed(GROUP, site.fed)
    times: dict[str, list[float]] = {name: [] for name in SEARCHES}
    with site.fed_meanwhile(None):
        time.sleep(2)
        done, start = site.bench.committed(GROUP), time.monotonic()
        for _ in range(REQUESTS):
            for name, path in SEARCHES.items():
                seconds, body = site.get(path)
                json.loads(body)
                times[name].append(seconds * 1000)
        per_second = (site.bench.committed(GROUP) - done) / (time.monotonic() - start)
    p95 = {name: sorted(found)[int(len(found) * 0.95)] for name, found in times.items()}
    report(
        bench="search",
        messages_per_second=per_second,
        p50_ms={name: round(statistics.median(found), 1) for name, found in times.items()},
        p95_ms={name: round(value, 1) for name, value in p95.items()},
        worst_p95_ms=max(p95.values()),
        bar_ms=300,
        load=os.getloadavg()[0],
    )


if __name__ == "__main__":
    measures = {"page": page, "clients": clients, "search": search}
    wanted = chosen(measures)
    where = Path(tempfile.mkdtemp(prefix="tidemill-bench-"))
    try:
        with running(where) as site:
            for name in wanted:
                measures[name](site)
    finally:
        shutil.rmtree(where, ignore_errors=True)
