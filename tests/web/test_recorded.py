"""Pages and API over a real recording: what they show is what was recorded."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.recorder.rows import START, message, messages, task, tasks
from tests.until import until
from tests.web.recordings import COUNT, ERROR_CLASS, FAILED, KEY, REFUSED, TOPIC, record
from tests.web.scripted_pipeline import SCRIPT, SECRET, ScriptedPipeline
from tests.web.serving import log_in

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.pipeline.handler.models import ErrorKind
from tidemill.recorder.format.counts import Counts
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.reading.queries import MessageQuery
from tidemill.recorder.writing.writer import RecordWriter
from tidemill.runtime.link.progress import EngineProgress
from tidemill.web.formats import format_moment
from tidemill.web.pipeline.start import open_archive
from tidemill.web.recorded.filters import parse_time
from tidemill.web.recorded.models import MessageHistory, RecordedMessageView, RecordedTaskView
from tidemill.web.recorded.waterfall import draw_waterfall
from tidemill.web.series import build_series

PAGES = [
    "/messages",
    f"/messages/{TOPIC}/{FAILED % 4}/{FAILED}",
    "/messages/orders/0/999999",
    "/tasks",
    "/failures",
    "/events",
    "/recordings",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("recordings") / "db"
    record(path)
    return path


@pytest.fixture
def pipeline(folder: Path) -> ScriptedPipeline:
    return ScriptedPipeline({"debug": {"enabled": True, "db_dir": str(folder), "max_ui_rows": 120}})


async def read(client: httpx.AsyncClient, path: str) -> Any:
    answer = await client.get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", PAGES)
async def test_text_of_users_is_never_markup_and_no_secret_is_shown(pipeline: ScriptedPipeline, path: str) -> None:
    async with log_in(pipeline) as client:
        answer = await client.get(path)

    assert answer.status_code == (404 if "999999" in path else 200)
    assert SCRIPT not in answer.text
    assert SECRET not in answer.text
    assert not re.search(r"<[^>]*\s(?:style|on\w+)=", answer.text)
    if "999999" not in path and path != "/recordings":
        assert html.escape(SCRIPT) in answer.text


async def test_all_messages_are_found_page_by_page_once_each(pipeline: ScriptedPipeline) -> None:
    seen: list[int] = []
    async with log_in(pipeline) as client:
        cursor = ""
        while True:
            page = await read(client, f"/messages?limit=70&since=1d&cursor={cursor}")
            seen += [row["offset"] for row in page["rows"]]
            if page["cursor"] is None:
                break
            cursor = page["cursor"]
        most = await read(client, "/messages?limit=100000")

    assert sorted(seen) == list(range(COUNT))
    assert seen[0] == COUNT - 1
    assert len(most["rows"]) == 120


async def test_a_page_leads_to_the_next_one_with_the_same_filters(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        first = (await client.get("/messages?since=24h&status=done")).text
        more = re.search(r'hx-get="([^"]+)"', first)
        assert more is not None
        second = (await client.get(html.unescape(more[1]))).text

    assert "status=done" in more[1]
    found = [re.findall(r"<code>orders:\d:(\d+)</code>", page) for page in (first, second)]
    assert len(found[0]) == 100
    assert not set(found[0]) & set(found[1])


@pytest.mark.parametrize(
    ("filters", "offsets"),
    [
        ({"key": KEY}, {40, 90, 140, 190, 240}),
        ({"status": "failed"}, {0, 80, 160, 240}),
        ({"task": "task-17"}, {17}),
        ({"label": "tenant=acme", "task": "task-140", "key": KEY}, {140}),
        ({"min_seconds": "2"}, {FAILED}),
        ({"error": "exit code 3", "partition": "0"}, {0, 80, 160, 240}),
        ({"topic": TOPIC, "partition": "1", "offset": "81"}, {81}),
        ({"key": "nobody"}, set()),
        ({"recording": "another"}, set()),
        ({"until": "2001-01-01"}, set()),
    ],
)
async def test_messages_are_found_by_what_is_known_of_them(
    pipeline: ScriptedPipeline, filters: dict[str, str], offsets: set[int]
) -> None:
    async with log_in(pipeline) as client:
        answer = await client.get("/api/v1/messages", params=filters)
        page = await client.get("/messages", params=filters)

    assert {row["offset"] for row in answer.json()["rows"]} == offsets
    assert {int(found) for found in re.findall(r"<code>orders:\d:(\d+)</code>", page.text)} == offsets


@pytest.mark.parametrize(
    "query",
    [
        "cursor=nonsense",
        "cursor=--e30",
        "since=yesterday",
        "partition=-1",
        "offset=x",
        "offset=99999999999999999999999",
        "status=lost",
        "since=١h",
        "label=tenant",
        "min_seconds=nan",
        "max_seconds=1e13",
        f"key={'x' * 2000}",
        "limit=0",
    ],
)
async def test_a_wrong_filter_is_named_and_answered_with_a_problem(pipeline: ScriptedPipeline, query: str) -> None:
    async with log_in(pipeline) as client:
        answer = await client.get(f"/api/v1/messages?{query}")
        page = await client.get(f"/messages?{query}", headers={"Accept": "text/html"})

    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(f"{query.partition('=')[0]}: ")
    assert page.status_code == (200 if query.startswith("limit") else 422)


async def test_a_kind_of_tasks_that_does_not_exist_is_refused(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        wrong = await client.get("/api/v1/tasks?kind=bogus")
        known = [(await client.get(f"/api/v1/tasks?kind={kind}")).status_code for kind in ("ok", *ErrorKind)]
    assert (wrong.status_code, wrong.json()["detail"][:24]) == (422, "kind: expected one of ok")
    assert known == [200] * (len(ErrorKind) + 1)


async def test_a_cursor_of_another_query_is_refused(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        cursor = (await read(client, "/messages?limit=5"))["cursor"]
        answer = await client.get(f"/api/v1/messages?limit=5&status=done&cursor={cursor}")
    assert answer.status_code == 422


@pytest.mark.parametrize("text", [f"{TOPIC}:0:{FAILED}", f"{TOPIC}/0/{FAILED}"])
async def test_the_search_leads_to_a_message_by_its_place(pipeline: ScriptedPipeline, text: str) -> None:
    async with log_in(pipeline) as client:
        place = await client.get("/messages", params={"find": text})
        key = await client.get("/messages", params={"find": "customer-3", "since": "1h"})

    assert place.headers["location"] == f"/messages/{TOPIC}/0/{FAILED}"
    assert key.headers["location"] == "/messages?since=1h&key=customer-3"


async def test_a_message_tells_its_whole_story(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        story = await read(client, f"/messages/{TOPIC}/0/{FAILED}")
        page = (await client.get(f"/messages/{TOPIC}/0/{FAILED}")).text

    (told,) = story["stories"]
    assert told["message"]["key"] == KEY
    assert [task["attempt"] for task in told["tasks"]] == [1, 2, 3]
    kinds = [event["kind"] for event in told["events"]]
    assert kinds == ["task_retry", "task_retry", "task_failed", "sink_error", "dead_lettered"]
    assert told["tasks"][2]["stderr"] == f"Traceback {SCRIPT}"
    for text in (
        "buffer, window and arrange",
        "task-240, try 3",
        "hooks and delivery",
        "postgres.db",
        "exit code 3",
        "--order",
    ):
        assert text in page
    assert page.count('<svg class="bar') >= 10
    assert page.index("task-240, try 2") < page.index("task failed") < page.index("dead lettered")


async def test_a_message_that_is_not_finished_is_shown_with_its_place(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        story = await read(client, "/messages/orders/0/11")
        page = await client.get("/messages/orders/0/11")
        silent = await client.get("/messages/orders/0/13")
    assert story["stories"] == []
    assert (story["now"]["stage"], story["now"]["behind"], story["now"]["engine"]) == ("behind its key", 10, 0)
    assert page.status_code == 200
    assert "waits for an earlier message with its key (offset 10)" in page.text
    assert 'href="/messages/orders/0/10"' in page.text
    assert "Nothing is recorded" not in page.text
    assert SCRIPT not in page.text
    assert silent.status_code == 404
    assert "cannot be read: engine 0 is silent" in silent.text


async def test_what_is_not_recorded_says_what_is_kept(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        page = (await client.get("/messages/orders/0/999999")).text
        answer = await client.get("/api/v1/messages/orders/0/999999")

    assert "This message is not recorded" in page
    assert answer.status_code == 404


@pytest.mark.parametrize("path", [f"/messages/t/0/{2**63}", f"/messages/t/{2**31}/0", "/messages/t/0/-1"])
async def test_a_place_that_no_message_can_have_is_refused(pipeline: ScriptedPipeline, path: str) -> None:
    async with log_in(pipeline) as client:
        assert [(await client.get(f"{prefix}{path}")).status_code for prefix in ("", "/api/v1")] == [422, 422]


def test_a_time_beyond_all_calendars_is_shown_as_a_number() -> None:
    assert format_moment(1.7e12) == "1700000000000 s after 1970"


async def test_failures_are_grouped_with_counts_and_an_example(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        failures = await read(client, "/failures?since=1h")
        page = (await client.get("/failures?since=1h")).text

    (group,) = failures["groups"]
    assert group["error_class"] == ERROR_CLASS
    assert group["count"] == max(count for kind, count in group["kinds"].items() if kind != "task_retry")
    assert sum(group["kinds"].values()) == sum(count for _, count in group["minutes"]) > group["count"]
    assert group["example"]["offset"] == FAILED
    assert page.count("<rect ") >= 2


async def test_tasks_and_events_are_filtered_by_the_address(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        failed = await read(client, "/tasks?kind=exit")
        letters = await read(client, "/events?kind=dead_lettered")
        action = await read(client, "/events?text=release")
        wrong = await client.get("/api/v1/events?kind=nothing")

    assert {task["task_id"] for task in failed["rows"]} == {f"task-{FAILED}"}
    assert {event["offset"] for event in letters["rows"]} == {0, 80, 160, 240, REFUSED}
    assert [event["data"] for event in action["rows"]] == [{"by": "ann"}]
    assert wrong.status_code == 422


async def test_recordings_are_listed_without_the_paths_of_the_host(pipeline: ScriptedPipeline, folder: Path) -> None:
    async with log_in(pipeline) as client:
        found = await read(client, "/recordings")
        page = (await client.get("/recordings")).text

    assert [(row["messages"], row["tasks"], row["live"]) for row in found] == [(COUNT, COUNT + 2, False)]
    assert str(folder) not in page
    assert "path" not in found[0]


def test_times_may_be_absolute_or_before_now() -> None:
    assert parse_time("since", "2h", 10_000.0) == 2_800_000_000
    assert parse_time("since", "1970-01-01T01:00+01:00", 0.0) == 0
    assert parse_time("since", "", 0.0) is None


def test_bars_stay_within_the_picture_even_if_clocks_disagree() -> None:
    finished = RecordedMessageView.model_construct(
        tasks=1, consumed_at=100.0, arranged_at=99.0, tasks_done_at=101.0, resolved_at=103.0
    )
    task = RecordedTaskView.model_construct(
        task_id="t", attempt=1, queued_at=None, started_at=90.0, ended_at=110.0, kind="ok"
    )
    told = MessageHistory.model_construct(
        message=finished, tasks=[task], events=[], committed_at=None, committed_exactly=False
    )
    bars = draw_waterfall(told)

    assert bars
    assert all(bar.left >= 0 and bar.left + bar.width <= 1000.001 for bar in bars)
    assert all((bar.seconds or 0) >= 0 for bar in bars)


def test_a_message_without_tasks_has_no_bar_of_tasks() -> None:
    finished = RecordedMessageView.model_construct(
        tasks=0, consumed_at=1.0, arranged_at=2.0, tasks_done_at=2.0, resolved_at=3.0
    )
    told = MessageHistory.model_construct(
        message=finished, tasks=[], events=[], committed_at=None, committed_exactly=False
    )
    assert [bar.name for bar in draw_waterfall(told)] == [
        "buffer, window and arrange or transform",
        "hooks and delivery",
    ]


async def test_charts_of_longer_times_are_made_of_what_was_counted(tmp_path: Path) -> None:
    pipeline = ScriptedPipeline({"debug": {"enabled": True, "db_dir": str(tmp_path / "db")}})
    done = [0]
    with RecordWriter(
        pipeline.settings.debug,
        "order-workers",
        "worker-1",
        read_progress=lambda: EngineProgress(consumed=done[0], messages_done=done[0], lag={"orders/0": 7}),
    ) as writer:
        async with log_in(pipeline) as client:

            async def is_counted() -> bool:
                done[0] += 50
                series = await read(client, "/series?seconds=3600")
                return sum(value or 0 for value in series["done"]) > 0 and 7 in series["lag"]

            deadline = time.monotonic() + 60
            while not await is_counted():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
            page = (await client.get("/?range=3600")).text
        assert writer.statistics.problem == ""
    assert 'data-series="/api/v1/series?seconds=3600"' in page


async def test_a_recording_in_memory_is_shown_also_to_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", find_no_home)
    pipeline = ScriptedPipeline({"debug": {"enabled": True, "db_dir": "~/recordings"}})
    with RecordWriter(pipeline.settings.debug, "order-workers", "worker-1") as writer:
        writer.put_rows("engine", 0, 1, RowTable.MESSAGES, messages(message(4711)))
        await until(lambda: writer.statistics.rows == 1)
        found = open_archive(pipeline.watched(), writer).find_messages(MessageQuery(), "", 10)
    assert [row.offset for row in found.rows] == [4711]


def test_a_gap_in_what_was_counted_is_a_gap_in_the_chart() -> None:
    counts = [Counts(at=60, messages_done=120, attempt_counts=[0, 0, 4, *[0] * 12]), Counts(at=240, messages_done=60)]
    series = build_series(counts, 60, 1000.0)
    assert series.at == [60.0, 120.0, 240.0]
    assert series.done == [2.0, None, 1.0]
    assert series.task_p50[0] == pytest.approx(0.0175)


def test_a_step_that_is_not_over_is_not_shown_as_a_drop() -> None:
    counts = [Counts(at=60, messages_done=120), Counts(at=120, messages_done=5)]
    assert build_series(counts, 60, 170.0).done == [2.0]
    assert build_series(counts, 60, 182.0).done == [2.0, pytest.approx(5 / 60)]


@pytest.mark.parametrize("times", ["since=1960-01-01", "since=1950-01-01T00:00:00.5&until=2100-01-01", "since=1d"])
async def test_pages_of_times_before_1970_lead_to_the_next_one(pipeline: ScriptedPipeline, times: str) -> None:
    async with log_in(pipeline) as client:
        first = await read(client, f"/messages?limit=100&{times}")
        second = await read(client, f"/messages?limit=100&{times}&cursor={first['cursor']}")

    assert {row["offset"] for row in first["rows"]} == set(range(COUNT - 100, COUNT))
    assert {row["offset"] for row in second["rows"]} == set(range(COUNT - 200, COUNT - 100))


async def test_a_message_whose_only_payload_was_dead_lettered_does_not_look_done(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        rows = (await client.get("/api/v1/messages?limit=20")).json()["rows"]
        story = (await client.get(f"/api/v1/messages/orders/{REFUSED % 4}/{REFUSED}")).json()
        listed = (await client.get(f"/messages?key=customer-{REFUSED % 7}")).text
        page = (await client.get(f"/messages/orders/{REFUSED % 4}/{REFUSED}")).text
    found = {row["offset"]: (row["status"], row["dead_lettered"]) for row in rows}
    assert found[REFUSED] == ("done", True), "the status of the history keeps its meaning"
    assert found[FAILED] == ("failed", False)
    assert found[REFUSED - 1] == ("done", False)
    assert story["stories"][0]["message"]["dead_lettered"] is True
    assert 'href="/letters/letter-4"' in page, "the page of a message leads to its letter"
    assert listed.count('<span class="chip bad">dead-lettered</span>') == 1
    assert page.count('<span class="chip bad">dead-lettered</span>') == 2
    assert '<span class="chip good">done</span>' not in page


#: Turns the text behind it around, moves the cursor of a terminal, hides, ends a line.
ODD = "a\u202eb\x1b[2Jc\u200bd\x00"
SHOWN = r"a\u202eb\x1b[2Jc\u200bd\x00"


async def test_what_cannot_be_seen_or_turns_text_around_is_shown_as_its_number(tmp_path: Path) -> None:
    row = message(7, error=f"exit {ODD}", status="failed")
    ran = task(ODD, [7], labels=[(f"name{ODD}", ODD)], args=[ODD], error=f"one\n\ttwo {ODD}", stderr=b"x\xe2\x80\xae")
    event = RecordedEvent(START + 9_000, EventKind.TASK_FAILED, TOPIC, 0, 7, ODD, text=f"no {ODD}", error_class=ODD)
    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(row))
        writer.put_rows("e1", 0, 2, RowTable.TASKS, tasks(ran))
        writer.put_events("e1", 0, 3, [event])
        await until(lambda: writer.statistics.rows == 2)
    debug = {"enabled": True, "db_dir": str(tmp_path)}
    async with log_in(ScriptedPipeline({"debug": debug})) as client:
        found = (await client.get("/api/v1/tasks")).json()["rows"][0]
        paths = [
            "/messages",
            "/messages/orders/0/7",
            "/tasks",
            "/events?runs=all",
            "/failures?since=2000-01-01&runs=all",
        ]
        pages = [(await client.get(path)).text for path in paths]
        search = await client.get("/tasks", params={"task": ODD})
    assert found["task_id"] == ODD, "programs get what it is"
    for path, page in zip(paths, pages, strict=True):
        shown = [char for char in page if not char.isprintable() and char != "\n"]
        assert set(shown) <= {"\t"}, path
        assert SHOWN in html.unescape(page), path
    assert "one\n\ttwo" in html.unescape(pages[1]), "lines stay lines"
    assert f'value="{ODD}"' in search.text, "what is sent again is what was given"
    assert "No recorded task matches" not in search.text


async def test_no_key_an_empty_one_and_one_that_says_none_are_three_things(tmp_path: Path) -> None:
    keys = [None, b"", b"none", b"no key", b"empty key"]
    rows = [message(offset, key=key) for offset, key in enumerate(keys)]
    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(*rows))
        await until(lambda: writer.statistics.rows == len(rows))
    async with log_in(ScriptedPipeline({"debug": {"enabled": True, "db_dir": str(tmp_path)}})) as client:
        found = (await client.get("/api/v1/messages")).json()["rows"]
        page = (await client.get("/messages")).text
        alone = [(await client.get(f"/messages/orders/0/{offset}")).text for offset in range(len(keys))]
    assert [row["key"] for row in found] == ["empty key", "no key", "none", "", None]
    wanted = ['<i class="faint">no key</i>', '<i class="faint">empty key</i>']
    wanted += [f'<code title="{key}">{key}</code>' for key in ("none", "no key", "empty key")]
    for text, own in zip(wanted, alone, strict=True):
        assert page.count(text) == 1, text
        assert own.count(text) == 1, text
