"""How fast the streams of triggers are in the whole tree of `tidemill dev`: SQLite, durable, web UI and metrics on.

    python -m bench.dag_streams [pages] [idle] [first] [source] [batched] [--events N] [--seconds S]

JSON lines out. Times are those of the tasks' and triggers' own clocks.

    pages       100 pages of an HTTP server, 20 ms each: an operator that defers once per page, `HttpStreamOperator`,
                and `StreamOperator`; the same for `GraphStreamOperator` over 12 pages. Hand-offs by the journal (bar: 3
                for a stream), seconds, and CPU time of the tree
    idle        a trigger yields an event every 50 ms, until the handler runs (bar: p50 30 ms, p99 250 ms); and one that
                finds no attempt, because the task has given its worker back
    first       the same for the first event of each of 20 streams (bar: 500 ms)
    source      N events of a `StreamOperator` through a map of trivial tasks, processes reused: elements/s from the
                first yield to the last end (bar: 400), milliseconds until the first element runs (bar: 1,000), and the
                growth of PSS after the first 10,000 (bar: 50 MB)
    batched     one trigger that yields for S seconds as fast as it can, into one handler: handled events/s (bar: 5,000)
                and the growth of PSS after a quarter of it (bar: 50 MB)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from bench.dag_maps import play, read_moments, read_sizes
from bench.dag_tree import Tree, percentile, start_tree
from bench.harness import report, tree_cpu_seconds

from tidemill.runtime.json.codec import decode
from tidemill.runtime.process.table import read_command
from tidemill.store.calls.instance_calls import TaskHistory
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.xcom_calls import ListXComs

PAGES, GRAPH_PAGES, PAGE_SECONDS = 100, 12, 0.02
FIRSTS = 20
TRIGGERS = """
import asyncio, time
import httpx
from tidemill.triggers.base import BaseTrigger, TriggerEvent

class PageTrigger(BaseTrigger):
    \"\"\"Fires once, with a page.\"\"\"
    def __init__(self, url):
        super().__init__()
        self.url = url
    def serialize(self):
        return "streaming.PageTrigger", {"url": self.url}
    async def run(self):
        async with httpx.AsyncClient(trust_env=False) as client:
            yield TriggerEvent((await client.get(self.url)).json())

class Clock(BaseTrigger):
    \"\"\"Fires the time, some times with a pause, or for some seconds without one.\"\"\"
    def __init__(self, pauses=(), count=0, seconds=0.0):
        super().__init__()
        self.pauses, self.count, self.seconds = pauses, count, seconds
    def serialize(self):
        return "streaming.Clock", {"pauses": self.pauses, "count": self.count, "seconds": self.seconds}
    async def run(self):
        for pause in self.pauses:
            await asyncio.sleep(pause)
            yield TriggerEvent(time.time())
        for number in range(self.count):
            yield TriggerEvent(time.time())
        end = time.time() + self.seconds
        while time.time() < end:
            yield TriggerEvent(time.time())
"""
DAGS = """
import time
from streaming import Clock, PageTrigger
from tidemill.dags import DAG, BaseOperator, GraphStreamOperator, HttpStreamOperator, StreamOperator, task

def now():
    return time.time()

with DAG("tasks"):
    task(now)()

class DeferPerPage(BaseOperator):
    def execute(self, context):
        self.defer(trigger=PageTrigger("ADDRESS?pages=PAGES"), method_name="use", kwargs={"numbers": []})
    def use(self, context, event=None, numbers=()):
        numbers = [*numbers, event["number"]]
        if event["next"] is None:
            return numbers
        self.defer(trigger=PageTrigger("ADDRESS" + event["next"]), method_name="use", kwargs={"numbers": numbers})

class Numbers(HttpStreamOperator):
    def on_stream_end(self, context):
        return "done"

class GraphNumbers(GraphStreamOperator):
    def on_stream_end(self, context):
        return "done"

with DAG("deferring"):
    DeferPerPage(task_id="read")
with DAG("streaming"):
    Numbers(task_id="read", url="ADDRESS?pages=PAGES", next_url="next", page_filter=lambda page: page["number"])
with DAG("graph"):
    GraphNumbers(task_id="read", url="ADDRESS?pages=GRAPH", page_filter=lambda page: page["number"])
with DAG("worker_free"):
    from tidemill.dags.operators.http_pages import HttpPagesTrigger
    StreamOperator(task_id="read", trigger=HttpPagesTrigger("ADDRESS?pages=PAGES", next_url="next"))

class Delays(BaseOperator):
    \"\"\"Returns how long each event took from its yield to the handler.\"\"\"
    def __init__(self, pauses, **kwargs):
        super().__init__(**kwargs)
        self.pauses = pauses
    def execute(self, context):
        self.defer(trigger=Clock(pauses=self.pauses))
    def handle_trigger_events(self, events, context):
        now, stream = time.time(), context["stream"]
        stream.checkpoint([*(stream.cursor or []), *(now - event.payload for event in events)])
    def on_stream_end(self, context):
        return context["stream"].cursor

class Impatient(Delays):
    stream_linger = 0.05

with DAG("idle"):
    Delays(task_id="read", pauses=[0.05] * 300)
with DAG("resumed"):
    Impatient(task_id="read", pauses=[0.5] * 40)
with DAG("first"):
    Delays(task_id="read", pauses=[0.1])

class Counts(BaseOperator):
    def execute(self, context):
        self.defer(trigger=Clock(seconds=context["params"]["seconds"]))
    def handle_trigger_events(self, events, context):
        stream = context["stream"]
        first, count, batches, _ = stream.cursor or (events[0].payload, 0, 0, 0)
        assert [event.sequence_index for event in events] == list(range(count, count + len(events)))
        stream.checkpoint((first, count + len(events), batches + 1, time.time()))
    def on_stream_end(self, context):
        return context["stream"].cursor

with DAG("batched", params={"seconds": 10.0}):
    Counts(task_id="read")

@task
def element(yielded):
    return [yielded, time.time()]

with DAG("source"):
    element.expand(yielded=StreamOperator(task_id="read", trigger=Clock(count=EVENTS)).output)
"""


class _Handler(BaseHTTPRequestHandler):
    """Answers with numbered pages, each of which takes a while."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        query = {name: int(values[0]) for name, values in parse_qs(urlsplit(self.path).query).items()}
        number, pages = query.get("page", 0), query["pages"]
        page: dict[str, Any] = {"number": number, "next": None}
        if number + 1 < pages:
            page["next"] = f"?pages={pages}&page={number + 1}"
            page["@odata.nextLink"] = f"http://{self.headers['host']}/items{page['next']}"
        data = json.dumps(page).encode()
        time.sleep(PAGE_SECONDS)
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve_pages() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/items"
    server.shutdown()
    server.server_close()


async def read_result(site: Tree, run: RunRecord) -> Any:
    (row,) = (await site.store.call(ListXComs(run.dag_id, run.run_id, limit=10))).rows
    return decode(row.value)


async def count_hand_offs(site: Tree, run: RunRecord) -> int:
    """Return how often the task was claimed, deferred, or gave its worker back."""
    rows = (await site.store.call(TaskHistory(run.dag_id, run.run_id, "read"))).rows
    return sum(row.given.startswith(("claim", "deferred", "stream-idle")) for row in rows)


async def measure_pages(site: Tree, arguments: argparse.Namespace) -> None:
    for dag_id, pages in (("deferring", PAGES), ("streaming", PAGES), ("worker_free", PAGES), ("graph", GRAPH_PAGES)):
        await play(site, "tasks")
        load, cpu = os.getloadavg()[0], tree_cpu_seconds(site.process.pid)
        run = await play(site, dag_id)
        cpu = tree_cpu_seconds(site.process.pid) - cpu
        assert run.ended_us is not None
        if dag_id == "deferring":
            assert await read_result(site, run) == list(range(pages))
        report(
            bench=f"dag_streams pages {dag_id}",
            load=load,
            pages=pages,
            hand_offs=await count_hand_offs(site, run),
            seconds=(run.ended_us - run.created_us) / 1e6,
            cpu_seconds=cpu,
        )


async def measure_idle(site: Tree, arguments: argparse.Namespace) -> None:
    for dag_id in ("idle", "resumed"):
        load = os.getloadavg()[0]
        delays = await read_result(site, await play(site, dag_id))
        _say(dag_id, load, delays[1:])


async def measure_first(site: Tree, arguments: argparse.Namespace) -> None:
    load, delays = os.getloadavg()[0], []
    for _ in range(FIRSTS):
        delays += await read_result(site, await play(site, "first"))
    _say("first", load, delays)


def _say(name: str, load: float, delays: list[float]) -> None:
    figures = {f"p{share}_ms": 1e3 * percentile(delays, share / 100) for share in (50, 99)}
    report(bench=f"dag_streams {name}", load=load, count=len(delays), **figures, longest_ms=1e3 * max(delays))


async def measure_source(site: Tree, arguments: argparse.Namespace) -> None:
    load, cpu = os.getloadavg()[0], tree_cpu_seconds(site.process.pid)
    first_sizes: dict[int, int] = {}
    run = await play(site, "source", first_sizes)
    cpu, sizes = tree_cpu_seconds(site.process.pid) - cpu, read_sizes(site)
    moments = await read_moments(site, run)
    assert len(moments) == arguments.events
    assert [moment for moment, _ in moments] == sorted(moment for moment, _ in moments)
    assert run.ended_us is not None
    report(
        bench="dag_streams source",
        elements=len(moments),
        load=load,
        load_after=os.getloadavg()[0],
        elements_per_s=len(moments) / (run.ended_us / 1e6 - moments[0][0]),
        first_ms=1e3 * (moments[0][1] - moments[0][0]),
        yielding_s=moments[-1][0] - moments[0][0],
        cpu_ms=1e3 * cpu / len(moments),
        **_compare(first_sizes, sizes),
    )


async def measure_batched(site: Tree, arguments: argparse.Namespace) -> None:
    load, cpu = os.getloadavg()[0], tree_cpu_seconds(site.process.pid)
    samples: list[dict[int, int]] = []

    async def sample() -> None:
        await asyncio.sleep(arguments.seconds / 4)
        samples.append(read_sizes(site))
        await asyncio.sleep(arguments.seconds / 2)
        samples.append(read_sizes(site))

    sampling = asyncio.create_task(sample())
    run = await play(site, "batched", seconds=arguments.seconds)
    await sampling
    cpu = tree_cpu_seconds(site.process.pid) - cpu
    first, count, batches, last = await read_result(site, run)
    report(
        bench="dag_streams batched",
        load=load,
        load_after=os.getloadavg()[0],
        events=count,
        events_per_s=count / (last - first),
        batches=batches,
        cpu_us=1e6 * cpu / count,
        **_compare(*samples),
    )


def _compare(before: dict[int, int], after: dict[int, int]) -> dict[str, Any]:
    """Return the growth of the process that has grown most, and the size of all."""
    growth = {pid: size - before[pid] for pid, size in after.items() if pid in before}
    grown = max(growth, key=growth.__getitem__, default=None)
    return {
        "growth_mb": None if grown is None else growth[grown] / 1e6,
        "grown": None if grown is None else read_command(grown)[-60:],
        "pss_mb": sum(after.values()) / 1e6,
    }


BENCHES: dict[str, Callable[[Tree, argparse.Namespace], Awaitable[None]]] = {
    "pages": measure_pages,
    "idle": measure_idle,
    "first": measure_first,
    "source": measure_source,
    "batched": measure_batched,
}
#: Those that measure with a process for each attempt, the default.
_FRESH = ("pages",)


async def main(names: list[str], arguments: argparse.Namespace) -> None:
    with serve_pages() as address:
        given = {"ADDRESS": address, "PAGES": str(PAGES), "GRAPH": str(GRAPH_PAGES), "EVENTS": str(arguments.events)}
        text = DAGS
        for name, value in given.items():
            text = text.replace(name, value)
        for name in names:
            reuse = "[]" if name in _FRESH else '["*"]'
            async with start_tree(text, reuse=reuse, modules={"streaming": TRIGGERS}) as site:
                await play(site, "tasks")
                await BENCHES[name](site, arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], default=list(BENCHES))
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.names, arguments))
