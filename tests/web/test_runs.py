"""Several pipelines below one folder: each web UI shows all of their runs, by group and worker."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.recorder.rows import message, messages, task, tasks
from tests.until import wait_until
from tests.web.scripted_pipeline import SCRIPT, ScriptedPipeline
from tests.web.serving import log_in

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.recorder.format.counts import Counts, add_workers
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.writing.writer import RecordWriter
from tidemill.runtime.link.progress import EngineProgress

#: Group, worker and the offset of the one message of each run; the last one's names cannot be those of a folder.
RUNS = [("order-workers", "worker-1", 1), ("order-workers", "worker-2", 2), (f"invoices {SCRIPT}", "worker-1", 3)]


def write(writer: RecordWriter, offset: int) -> None:
    at = int(time.time() * 1_000_000)
    writer.put_rows("e", 0, 1, RowTable.MESSAGES, messages(message(offset, resolved_at=at, consumed_at=at - 1_000)))
    writer.put_rows("e", 0, 2, RowTable.TASKS, tasks(task(f"t-{offset}", [offset], ended_at=at)))
    failed = RecordedEvent(at, EventKind.TASK_FAILED, "orders", 0, offset, f"t-{offset}", text="no", error_class="no")
    writer.put_events("e", 0, 3, [failed])
    wait_until(lambda: writer.statistics.rows == 2 and writer.statistics.events == 1, 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs are being written, the last one has ended."""
    folder = tmp_path_factory.mktemp("runs") / "db"
    with ExitStack() as stack:
        for group, worker, offset in reversed(RUNS):
            writer = RecordWriter(DebugSettings(db_dir=str(folder)), group, worker)
            if offset == 3:
                with writer:
                    write(writer, offset)
            else:
                write(stack.enter_context(writer), offset)
        yield folder


@pytest.fixture
def pipeline(folder: Path) -> ScriptedPipeline:
    return ScriptedPipeline({"debug": {"enabled": True, "db_dir": str(folder)}})


async def read(client: httpx.AsyncClient, path: str, **filters: str) -> Any:
    answer = await client.get(f"/api/v1{path}", params=filters)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_all_runs_are_listed_with_whether_they_are_written(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        found = await read(client, "/runs")
        page = (await client.get("/runs")).text

    assert {(run["group"], run["worker"], run["live"]) for run in found} == {
        (RUNS[0][0], "worker-1", True),
        (RUNS[1][0], "worker-2", True),
        (RUNS[2][0], "worker-1", False),
    }
    assert [run["live"] for run in found] == [True, True, False]
    assert page.count("running</span>") == 2
    assert page.count("ended</span>") == 1
    assert SCRIPT not in page


@pytest.mark.parametrize(
    ("filters", "offsets"),
    [
        ({}, {1, 2, 3}),
        ({"group": "order-workers"}, {1, 2}),
        ({"worker": "worker-1"}, {1, 3}),
        ({"group": RUNS[2][0], "worker": "worker-1"}, {3}),
        ({"group": RUNS[2][0], "worker": "worker-2"}, set()),
        ({"group": "nobody"}, set()),
        ({"recording": "order-workers.worker-2"}, {2}),
        ({"recording": "../order-workers.worker-2"}, set()),
    ],
)
async def test_every_list_is_filtered_by_group_and_worker(
    pipeline: ScriptedPipeline, filters: dict[str, str], offsets: set[int]
) -> None:
    async with log_in(pipeline) as client:
        assert {row["offset"] for row in (await read(client, "/messages", **filters))["rows"]} == offsets
        by_label = await read(client, "/messages", label="tenant=acme", **filters)
        assert {row["offset"] for row in by_label["rows"]} == offsets
        found = (await read(client, "/tasks", **filters))["rows"]
        assert {offset for row in found for offset in row["offsets"]} == offsets
        failed = (await read(client, "/events", kind="task_failed", **filters))["rows"]
        assert {row["offset"] for row in failed} == offsets
        groups = (await read(client, "/failures", **filters))["groups"]
        assert sum(group["count"] for group in groups) == len(offsets)
        assert sum(row["messages"] for row in await read(client, "/recordings", **filters)) == len(offsets)
        for path in ("/messages", "/tasks", "/events", "/failures", "/recordings", "/runs"):
            page = await client.get(path, params=filters)
            assert page.status_code == 200
            if path != "/recordings":
                assert "worker-2</option>" in page.text, path


async def test_failures_and_events_are_those_of_this_pipeline_unless_others_are_asked_for(
    pipeline: ScriptedPipeline,
) -> None:
    assert pipeline.settings.kafka.consumer_group == RUNS[0][0]
    wanted = {"": 2, "?kind=task_failed": 2, "?runs=all": 3, "?group=&worker=": 3, "?worker=worker-1": 2}
    async with log_in(pipeline) as client:
        for query, count in wanted.items():
            page = html.unescape((await client.get(f"/events{query}")).text)
            assert page.count('<td class="faint">') == count, query
            assert ("show all runs" in page) == (query in ("", "?kind=task_failed")), query
            assert ('value="order-workers" selected' in page) == (query in ("", "?kind=task_failed")), query
        for query, count in (("", 2), ("?runs=all", 3), ("?group=&worker=", 3), (f"?group={RUNS[0][0]}", 2)):
            page = html.unescape((await client.get(f"/failures{query}")).text)
            assert f"<b>{count}</b>" in page, query
            (link,) = re.findall(r'href="(/events[?]error_class=[^"]+)"', page)
            assert (await client.get(link)).text.count('<td class="faint">') == count, query
        chosen = (await client.get("/events?group=&kind=task_failed")).text
        assert "runs=all" in chosen, "what was chosen stays when one goes on"


async def test_pages_of_a_group_go_on_when_a_worker_joins_it(folder: Path, tmp_path: Path) -> None:
    debug = DebugSettings(db_dir=str(tmp_path / "db"))
    pipeline = ScriptedPipeline({"debug": {"enabled": True, "db_dir": debug.db_dir}})
    with RecordWriter(debug, "g", "w1") as first, RecordWriter(debug, "g", "w2") as second:
        write(first, 1)
        write(second, 2)
        async with log_in(pipeline) as client:
            page = await read(client, "/messages", group="g", limit="1")
            with RecordWriter(debug, "g", "w3") as third:
                write(third, 3)
                following = await read(client, "/messages", group="g", limit="1", cursor=page["cursor"])
    assert [row["offset"] for row in [*page["rows"], *following["rows"]]] == [2, 1]


async def test_the_overview_names_the_other_runs_with_a_link(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        page = (await client.get("/")).text
        others = page[page.index('id="others"') :]
        links = re.findall(r'href="(/runs\?recording=[^"]+)"', others)
        shown = [(await client.get(link)).text for link in links]

    assert len(links) == 2
    assert not any("worker-1" in link and "order-workers" in link for link in links)
    assert all("Messages per second" in text for text in shown)
    assert sum("ended; the charts end at" in text for text in shown) == 1


async def test_charts_add_up_what_several_workers_did_at_a_time(tmp_path: Path) -> None:
    debug = DebugSettings(db_dir=str(tmp_path / "db"))
    pipeline = ScriptedPipeline({"debug": {"enabled": True, "db_dir": debug.db_dir}})
    done = [0]

    def progress() -> EngineProgress:
        done[0] += 10
        return EngineProgress(messages_done=done[0], lag={"orders/0": 7}, in_flight=5)

    with ExitStack() as stack:
        for worker in ("w1", "w2"):
            stack.enter_context(RecordWriter(debug, "g", worker, read_progress=progress))
        async with log_in(pipeline) as client:
            deadline = time.monotonic() + 60
            while True:
                both = await read(client, "/runs/series", seconds="900", group="g")
                if 14 in both["lag"] and 10 in both["in_flight"]:
                    break
                assert time.monotonic() < deadline, both
                await asyncio.sleep(0.2)
            one = await read(client, "/runs/series", seconds="900", worker="w1")
    assert set(one["lag"]) <= {7, None}


def test_the_lag_of_one_worker_stays_known_beside_one_that_has_none() -> None:
    counts = Counts(at=1, lag=5, in_flight=2, consumed=3)
    add_workers(counts, Counts(at=1, in_flight=4, consumed=1))
    assert (counts.lag, counts.in_flight, counts.consumed) == (5, 6, 4)


async def test_bounded_runs_are_marked_on_each_page_and_show_what_failed(tmp_path: Path) -> None:
    debug = DebugSettings(db_dir=str(tmp_path / "db"))
    pipeline = ScriptedPipeline({"debug": {"enabled": True, "db_dir": debug.db_dir}})
    with RecordWriter(debug, "g", "w.backfill", bounded=True) as writer, RecordWriter(debug, "g", "w") as live:
        write(writer, 1)
        write(live, 2)
    async with log_in(pipeline) as client:
        marked = {run["worker"]: run["bounded"] for run in await read(client, "/runs")}
        periods = {row["worker"]: row["bounded"] for row in await read(client, "/recordings")}
        pages = [(await client.get(path)).text for path in ("/runs", "/recordings")]
        story = (await client.get("/messages/orders/0/1")).text
        other = (await client.get("/messages/orders/0/2")).text
    assert marked == periods == {"w.backfill": True, "w": False}
    assert [page.count(">bounded run<") for page in pages] == [1, 1]
    assert "never, in a bounded run" in story
    assert "bounded run" not in other
