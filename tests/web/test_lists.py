"""Engines and partitions in pages: the worst first, filtered and paged by their address, described only if shown."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from tests.web.scripted_pipeline import SCRIPT, SECRET, ScriptedPipeline
from tests.web.serving import log_in, make_app

from tidemill.runtime.link.progress import EngineProgress, PartitionHead, name_stalled_partition
from tidemill.spark.live.shared_progress import SharedProgress
from tidemill.spark.progress import EngineStatus, PauseStatus
from tidemill.web.pages import Pages
from tidemill.web.pipeline import models
from tidemill.web.pipeline.partitions import PartitionQuery, PartitionTable
from tidemill.web.pipeline.section import PipelineView
from tidemill.web.pipeline.start import describe_about, open_archive

ENGINES, EACH = 50, 20


def lag_of(number: int) -> int:
    """Return a lag that no other partition has."""
    return number * 7 % 1_000


def make_engine(slot: int) -> EngineStatus:
    numbers = range(slot * EACH, (slot + 1) * EACH)
    names = [f"orders/{number}" for number in numbers]
    progress = EngineProgress(
        messages_done=100,
        partitions=names,
        lag={name: lag_of(number) for name, number in zip(names, numbers, strict=True)},
        paused=names[:1],
        flow=dict.fromkeys(names, (30, 10, 0)),
        heads={
            names[1]: PartitionHead(5, 0.0, None, "task", "runs", 0),
            names[2]: PartitionHead(5, 0.0, None, "", "", 0),
        },
    )
    return EngineStatus(slot, "running", 4_000 + slot, "node", 1, 0.1, progress)


def make_large_pipeline(pipeline: ScriptedPipeline) -> ScriptedPipeline:
    """Return it with a thousand partitions; two of them stand still, two engines are in trouble."""
    pipeline.engines = [make_engine(slot) for slot in range(ENGINES)]
    for number, text in ((730, "its task hangs"), (11, f"{SCRIPT} waits: password={SECRET}")):
        progress = pipeline.engines[number // EACH].progress
        assert progress is not None
        progress.waits = {name_stalled_partition(f"orders/{number}"): text}
    pipeline.engines[30] = EngineStatus(30, "waiting", starts=4)
    old = pipeline.engines[40]
    pipeline.engines[40] = EngineStatus(40, "running", 1, "node", 1, 12.0, old.progress)
    return pipeline


@pytest.fixture
def pipeline() -> ScriptedPipeline:
    return make_large_pipeline(ScriptedPipeline())


async def read(pipeline: ScriptedPipeline, path: str) -> Any:
    async with log_in(pipeline) as client:
        answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def read_all(pipeline: ScriptedPipeline, path: str, **filters: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    cursor = ""
    async with log_in(pipeline) as client:
        while True:
            page = (await client.get(path, params={"cursor": cursor, "limit": 77, **filters})).json()
            assert page["before"] == len(rows)
            rows += page["rows"]
            if page["cursor"] is None:
                assert page["matching"] == len(rows)
                return rows
            cursor = page["cursor"]


async def test_the_overview_has_the_worst_and_says_how_many_there_are(pipeline: ScriptedPipeline) -> None:
    overview = await read(pipeline, "/api/v1/overview")
    names = [each["name"] for each in overview["partitions"]]
    largest = sorted(range(1_000), key=lag_of, reverse=True)
    # Those of the engine that is being replaced belong to nobody.
    owned = [number for number in largest if number // EACH != 30]
    assert names[:2] == ["orders/730", "orders/11"], "those that stand still, the larger lag first"
    assert names[2:] == [f"orders/{number}" for number in owned if number not in (11, 730)][:18]
    assert (overview["partition_count"], overview["stalled_count"]) == (980, 2)
    assert [each["slot"] for each in overview["engines"]] == [30, 40, *range(18)]
    assert overview["engine_count"] == ENGINES


async def test_the_page_links_to_all_others(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        page = (await client.get("/")).text
    assert '<a href="/partitions">960 more</a>' in page
    assert '<a href="/engines">30 more</a>' in page
    assert 'href="/partitions?state=stalled">2 stalled</a>' in page
    assert page.count('<a href="/partitions?engine=') == 40 - 1, "20 partitions, 19 engines that have some"
    assert len(page.encode()) < 150_000


async def test_a_few_are_shown_in_their_own_order_and_not_by_what_changes() -> None:
    overview = await read(ScriptedPipeline(), "/api/v1/overview")
    assert [each["name"] for each in overview["partitions"]] == [f"orders/{number}" for number in range(4)]
    assert [each["slot"] for each in overview["engines"]] == [0, 1]
    async with log_in(ScriptedPipeline()) as client:
        assert " more</a>" not in (await client.get("/")).text


async def test_each_partition_is_on_one_page(pipeline: ScriptedPipeline) -> None:
    rows = await read_all(pipeline, "/api/v1/partitions")
    assert len({row["name"] for row in rows}) == len(rows) == 980
    rest = [row["lag"] for row in rows[2:]]
    assert {row["name"] for row in rows[:2]} == {"orders/11", "orders/730"}
    assert rest == sorted(rest, reverse=True)
    by_name = await read_all(pipeline, "/api/v1/partitions", order="name")
    assert [row["name"] for row in by_name] == [f"orders/{n}" for n in range(1_000) if n // EACH != 30]


async def test_a_page_goes_on_where_the_one_before_ended_though_lags_change(pipeline: ScriptedPipeline) -> None:
    first = await read(pipeline, "/api/v1/partitions?limit=10")
    last = first["rows"][-1]["lag"]
    for engine in pipeline.engines:
        if engine.progress is not None:  # the first ones have caught up
            engine.progress.lag = {name: lag if lag < last else 0 for name, lag in engine.progress.lag.items()}
    second = await read(pipeline, f"/api/v1/partitions?limit=10&cursor={first['cursor']}")
    assert second["rows"][0]["lag"] == last - 1
    assert not {row["name"] for row in first["rows"]} & {row["name"] for row in second["rows"]}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("state=stalled", {11, 730}),
        ("engine=7", set(range(140, 160))),
        ("engine=30", set()),
        ("state=held&engine=7", {141}),
        ("state=backpressure&engine=7", {140}),
        ("name=ers/73", {73, *range(730, 740)}),
        ("state=paused", {5}),
        ("state=paused&name=6", set()),
    ],
)
async def test_filters_of_partitions(pipeline: ScriptedPipeline, query: str, expected: set[int]) -> None:
    pipeline.pauses = [PauseStatus(5, 1_790_000_900.0, 900.0, "ann")]
    page = await read(pipeline, f"/api/v1/partitions?{query}")
    assert {int(row["name"].rpartition("/")[2]) for row in page["rows"]} == expected
    assert (page["matching"], page["total"]) == (len(expected), 980)
    if "engine=7" in query:
        assert {row["engine"] for row in page["rows"]} == {7}


async def test_a_pause_of_all_partitions_pauses_each(pipeline: ScriptedPipeline) -> None:
    pipeline.pauses = [PauseStatus(None, 1_790_000_900.0, 900.0, "ann")]
    assert (await read(pipeline, "/api/v1/partitions?state=paused"))["matching"] == 980


async def test_engines_are_paged_and_filtered_too(pipeline: ScriptedPipeline) -> None:
    rows = await read_all(pipeline, "/api/v1/engines")
    assert [row["slot"] for row in rows] == [30, 40, *(slot for slot in range(ENGINES) if slot not in (30, 40))]
    first = await read(pipeline, "/api/v1/engines?limit=20")
    second = await read(pipeline, f"/api/v1/engines?limit=20&cursor={first['cursor']}")
    assert [row["slot"] for row in second["rows"]][:2] == [18, 19]
    waiting = await read(pipeline, "/api/v1/engines?state=waiting")
    assert [row["slot"] for row in waiting["rows"]] == [30]
    assert (waiting["matching"], waiting["total"], waiting["cursor"]) == (1, ENGINES, None)


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("partitions?state=broken", "state: expected one of stalled, held, backpressure, paused, not 'broken'"),
        ("partitions?order=size", "order: expected one of worst, name, not 'size'"),
        ("partitions?engine=first", "engine: expected a whole number, not 'first'"),
        ("partitions?cursor=e30", "cursor: the cursor is damaged; start again without one"),
        ("partitions?limit=0", "limit: "),
        ("engines?state=broken", "state: expected one of idle, "),
        ("engines?cursor=@", "cursor: the cursor is damaged; start again without one"),
    ],
)
async def test_what_is_wrong_in_an_address_is_said(pipeline: ScriptedPipeline, path: str, detail: str) -> None:
    async with log_in(pipeline) as client:
        answer = await client.get(f"/api/v1/{path}")
        page = await client.get(f"/{path}")
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(detail)
    assert page.status_code == (200 if "limit" in path else 422)


async def test_a_cursor_is_of_its_own_list_and_filters(pipeline: ScriptedPipeline) -> None:
    of_all = (await read(pipeline, "/api/v1/partitions"))["cursor"]
    async with log_in(pipeline) as client:
        for path in ("partitions?order=name&", "partitions?engine=7&", "engines?"):
            answer = await client.get(f"/api/v1/{path}cursor={of_all}")
            assert answer.json()["detail"] == "cursor: the cursor belongs to another query; start again without one"


async def test_no_page_has_more_rows_than_the_settings_allow(pipeline: ScriptedPipeline) -> None:
    pipeline.settings.debug.max_ui_rows = 30
    assert len((await read(pipeline, "/api/v1/partitions?limit=500"))["rows"]) == 30
    assert len((await read(pipeline, "/api/v1/engines?limit=500"))["rows"]) == 30


async def test_the_pages_have_their_filters_and_the_next_page_in_the_address(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        page = (await client.get("/partitions?name=orders&order=name")).text
        assert "1 to 50 of 980" in page
        assert 'data-load="/partitions/rows?name=orders&amp;order=name"' in page
        following = re.search(r'id="next-page" href="([^"]+)"', page)
        assert following is not None
        second = (await client.get(following[1].replace("&amp;", "&"))).text
        assert "51 to 100 of 980" in second
        assert 'id="first-page" href="/partitions?name=orders&amp;order=name"' in second
        part = (await client.get(following[1].replace("&amp;", "&").replace("/partitions?", "/partitions/rows?"))).text
        assert "51 to 100 of 980" in part
        assert "<html" not in part
        assert "<code>orders/50</code>" in part
        none = (await client.get("/partitions?engine=999")).text
        assert "matches; " in none
        engines = (await client.get("/engines?state=waiting")).text
        assert "1 to 1 of 1" in engines
        assert " matching, 50 in total" in engines


@pytest.mark.parametrize("path", ["/partitions", "/partitions/rows", "/engines", "/api/v1/partitions"])
async def test_text_of_users_stays_text_and_secrets_stay_secret(pipeline: ScriptedPipeline, path: str) -> None:
    pipeline.engines[3] = EngineStatus(3, "running", 1, SCRIPT, 1, 0.1, pipeline.engines[3].progress)
    async with log_in(pipeline) as client:
        text = (await client.get(path)).text
    assert SECRET not in text
    if not path.startswith("/api"):
        assert SCRIPT not in text
        assert "&lt;script&gt;" in text


async def test_many_notes_are_cut_short_with_a_link(pipeline: ScriptedPipeline) -> None:
    for engine in pipeline.engines:
        if engine.progress is not None:
            engine.progress.waits = {name_stalled_partition(name): "hangs" for name in engine.progress.partitions}
    pipeline.engines[:20] = [EngineStatus(slot, "waiting", starts=2) for slot in range(20)]
    first = pipeline.engines[25].progress
    assert first is not None
    first.waits |= {"sinks.kafka.results": "no broker"}
    pipeline.orphans = list(range(400))
    async with log_in(pipeline) as client:
        overview = (await client.get("/api/v1/overview")).json()
        page = (await client.get("/")).text
    assert overview["waits"][0]["what"] == "sinks.kafka.results"
    assert (len(overview["waits"]), overview["wait_count"]) == (10, 29 * EACH + 1)
    assert (len(overview["problems"]), overview["problem_count"]) == (10, 22)
    assert f"{29 * EACH + 1 - 10} more</a> are waiting." in page
    assert "12 more engines</a> are in trouble." in page
    assert "18, 19 and 380 more of orders" in page
    assert len(page.encode()) < 150_000


async def test_only_rows_that_are_shown_are_described(
    pipeline: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = []
    build = models.Partition

    def count(**values: Any) -> models.Partition:
        described.append(values["name"])
        return build(**values)

    monkeypatch.setattr(models, "Partition", count)
    PartitionTable(pipeline.progress()).list_first()
    assert len(described) == 20


def test_the_order_by_name_is_kept_while_the_partitions_are_the_same(pipeline: ScriptedPipeline) -> None:
    progress = pipeline.progress()
    first = PartitionTable(progress)
    later = msgspec.structs.replace(progress, lag={"orders/3": 7})
    found = [row.name for row in PartitionTable(later, first).list_first(4)]
    assert found == ["orders/11", "orders/730", "orders/3", "orders/0"]
    moved = msgspec.structs.replace(progress, partitions=["orders/5", "orders/10", "orders/4"])
    assert [row.name for row in PartitionTable(moved, first).list_first()] == ["orders/4", "orders/5", "orders/10"]


@pytest.mark.parametrize("most", [1, 2, 3, 20, 979])
def test_the_first_are_those_of_the_list(pipeline: ScriptedPipeline, most: int) -> None:
    progress = pipeline.progress()
    for lag in (progress.lag, dict.fromkeys(progress.lag, 5), {}):
        table = PartitionTable(msgspec.structs.replace(progress, lag=lag))
        assert table.list_first(most) == table.find(PartitionQuery(), "", most).rows


async def test_all_who_look_within_a_beat_share_what_was_found(
    pipeline: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sums = [100.0], []
    watched = pipeline.watched()
    shared = SharedProgress(lambda: sums.append(1) or pipeline.progress(), 0.25, lambda: clock[0])  # type: ignore[func-returns-value]
    asked = type(watched.asked)(shared, watched.asked.state, watched.asked.find_orphans, lambda: 8)
    watched = pipeline.watched(asked=asked)
    view = PipelineView(watched, Pages(describe_about(watched)), open_archive(watched))
    view.sample()
    first = view.now()
    assert view.now() is first
    assert view.lists.find_engines("", "", 5).rows
    assert len(sums) == 1
    clock[0] += 0.25
    assert view.now() is not first
    assert len(sums) == 2


async def test_lists_need_a_login(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline, make_app(pipeline)) as client:
        await client.post("/logout")
        for path in ("/partitions", "/partitions/rows", "/engines/rows", "/api/v1/partitions", "/api/v1/engines"):
            assert (await client.get(path)).status_code in (303, 401)
