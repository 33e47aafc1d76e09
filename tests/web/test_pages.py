"""What pages and API show of a pipeline."""

from __future__ import annotations

import html
import json
import re

import msgspec
import pytest
from tests.web.scripted_pipeline import SCRIPT, SECRET, ScriptedPipeline
from tests.web.serving import connect, log_in

from tidemill.runtime.link.progress import EngineProgress
from tidemill.runtime.loop.durations import Durations
from tidemill.spark.progress import EngineStatus, PipelineProgress
from tidemill.spark.run_state import RunPhase, RunState
from tidemill.web.pipeline.sampler import PipelineSampler, find_quantile
from tidemill.web.pipeline.settings_view import list_settings

PAGES = ["/", "/configuration", "/configuration?changed=true", "/api/docs"]
TEXTS = [*PAGES, "/api/v1/overview", "/api/v1/series", "/api/v1/configuration", "/api/openapi.json"]


@pytest.mark.parametrize("path", TEXTS)
async def test_no_page_shows_a_secret(path: str) -> None:
    async with log_in(ScriptedPipeline()) as client:
        answer = await client.get(path)

    assert answer.status_code == 200
    assert SECRET not in answer.text


@pytest.mark.parametrize("path", PAGES)
async def test_text_of_users_is_never_markup(path: str) -> None:
    async with log_in(ScriptedPipeline()) as client:
        page = (await client.get(path)).text

    assert SCRIPT not in page
    assert "javascript:" not in re.sub(r"<code>.*?</code>", "", page)
    scripts = re.findall(r"<script[^>]*>", page)
    assert all('src="/static/' in script for script in scripts)
    assert not re.search(r"\s(?:style|on\w+)=", page)
    if path == "/":
        assert html.escape(SCRIPT) in page


async def test_the_overview_has_the_numbers_of_the_progress() -> None:
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        overview = (await client.get("/api/v1/overview")).json()

    progress = pipeline.progress()
    assert overview["state"] == "running"
    assert overview["done"] == progress.messages_done == 82_000
    assert overview["lag"]["messages"] == sum(progress.lag.values())
    assert overview["tasks"] | {"max_running": 16, "failed": 74, "timed_out": 10} == overview["tasks"]
    assert overview["letters"] == {"written": 74, "dropped": 0, "kinds": {"task": 60, "delivery": 14}}
    first = overview["partitions"][0]
    assert (first["name"], first["engine"], first["lag"], first["committed_offset"]) == ("orders/0", 0, 1_800, 20_400)
    assert first["uncommitted"] == 20_625 - 20_400 - 3
    assert "its result waits for sinks.postgres.db" in first["stalled"]
    held = first["held_by"]
    assert (held["topic"], held["partition"], held["offset"], held["stage"]) == ("orders", 0, 20_400, "sink")
    assert overview["partitions"][1]["held_by"] is None, "it has no work"
    sinks = {sink["name"]: sink for sink in overview["sinks"]}
    assert sinks["postgres.db"] | {"breaker": "open", "refused": 14, "ui_url": ""} == sinks["postgres.db"]
    assert sinks["kafka.results"]["ui_url"] == "https://kafka-ui.example/results"
    assert sinks["filesystem.log"]["delivered"] == 0
    assert sinks["postgres.db"]["batch_p50_seconds"] == pytest.approx(0.0198, abs=0.001)


async def test_the_page_of_a_pipeline_that_starts_says_what_it_waits_for() -> None:
    pipeline = ScriptedPipeline()
    pipeline.engines, pipeline.run = [], RunState(step="Spark is starting", step_seconds=3.2)
    async with log_in(pipeline) as client:
        page = (await client.get("/")).text
        ready = await client.get("/readyz")

    assert "it is starting: Spark is starting (3 s)" in page
    assert "No engine has started yet" in page
    assert ready.status_code == 503
    assert ready.json()["reasons"] == ["it is starting: Spark is starting (3 s)"]


async def test_health_needs_no_login_and_quotes_no_error() -> None:
    pipeline = ScriptedPipeline()
    pipeline.orphans = [3]
    async with connect(pipeline) as client:
        alive, ready = await client.get("/healthz"), await client.get("/readyz")

    assert (alive.status_code, ready.status_code) == (200, 503)
    assert {"sinks.postgres.db is down", "partition 3 has no owner"} <= set(ready.json()["reasons"])
    assert SCRIPT not in ready.text


async def test_what_cannot_be_found_is_a_page_for_readers_and_a_problem_for_programs() -> None:
    async with log_in(ScriptedPipeline()) as client:
        page = await client.get("/no-such-page", headers={"Accept": "text/html"})
        problem = await client.get("/api/v1/no-such-thing", headers={"Accept": "text/html"})
        wrong = await client.get("/api/v1/series?seconds=10000000")

    assert (page.status_code, problem.status_code, wrong.status_code) == (404, 404, 422)
    assert "page not found: /no-such-page" in page.text
    assert problem.json()["detail"] == "page not found: /api/v1/no-such-thing"
    assert wrong.json()["detail"].startswith("seconds: ")


async def test_actions_are_carried_out() -> None:
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        release = await client.post("/api/v1/actions/release")
        drain = await client.post("/api/v1/actions/drain", json={"confirm": "order-workers"})

    assert (release.status_code, drain.status_code) == (200, 200)
    assert release.json() == {"text": "Released the brake of 1 engine; 2 held messages become dead letters."}
    assert pipeline.actions == ["release", "drain"]


async def test_without_a_brake_there_is_nothing_to_release() -> None:
    pipeline = ScriptedPipeline()
    pipeline.release = list  # type: ignore[method-assign]
    async with log_in(pipeline) as client:
        answer = await client.post("/api/v1/actions/release")
    assert answer.status_code == 409


async def test_the_api_page_names_every_operation_of_the_document() -> None:
    async with log_in(ScriptedPipeline()) as client:
        document = (await client.get("/api/openapi.json")).json()
        page = (await client.get("/api/docs")).text

    assert "/api/v1/overview" in document["paths"]
    assert all(f"<code>{path}</code>" in page for path in document["paths"])


def test_settings_say_where_their_values_come_from() -> None:
    pipeline = ScriptedPipeline()
    changed = pipeline.settings.model_copy(deep=True)
    changed.executor.max_executors = 99
    environ = {"TIDEMILL_KAFKA__BROKERS": "kafka-1:9092"}
    found = {setting.key: setting for setting in list_settings(changed, pipeline.settings, environ)}

    assert found["kafka.brokers"].origin == "environment"
    assert found["kafka.source_topic"].origin == "configured"
    assert found["executor.max_executors"].origin == "on_startup"
    assert found["executor.mode"].origin == "default"
    assert (found["executor.max_executors"].value, found["executor.max_executors"].default) == ("99", "4")
    assert found["sinks.postgres.db.dsn"].value == '"postgresql://***@db/orders"'
    assert found["sinks.postgres.db.dsn"].default is None
    assert json.loads(found["kafka.client_config"].value) == {"sasl.password": "***"}


def test_samples_give_rates_trends_and_quantiles() -> None:
    sampler = PipelineSampler()
    assert sampler.rate("done") == 0.0
    for second in range(5):
        counts = [0, 0, 10 * second, *[0] * 12]
        engine = EngineStatus(0, "running", progress=EngineProgress(cpu_seconds=second / 2))
        progress = PipelineProgress(
            messages_done=100 * second, lag={"t/0": 1000 - 50 * second}, attempts=Durations(counts), engines=[engine]
        )
        sampler.add(1000.0 + second, 50.0 + second, progress)

    assert sampler.rate("done") == 100.0
    assert sampler.cpu_percent(0) == 50.0
    assert sampler.task_quantile(0.5) == pytest.approx(0.0175)
    lag = sampler.lag()
    assert (lag.messages, lag.change_per_second, lag.clear_seconds) == (800, -50.0, 16.0)
    series = sampler.series(2)
    assert series.at == [1003.0, 1004.0]
    assert series.done == [100.0, 100.0]
    assert series.lag == [850.0, 800.0]


def test_an_engine_that_is_replaced_gives_no_nonsense() -> None:
    sampler = PipelineSampler()
    for second, cpu_seconds in enumerate((9.0, 1.0)):
        engine = EngineStatus(0, "running", progress=EngineProgress(cpu_seconds=cpu_seconds))
        sampler.add(1000.0 + second, 50.0 + second, PipelineProgress(engines=[engine]))
    assert sampler.cpu_percent(0) is None


@pytest.mark.parametrize("step", [-10_800.0, -0.5, 0.0, 7200.0, 86_400.0])
def test_a_clock_that_is_set_changes_neither_rates_nor_what_charts_show(step: float) -> None:
    sampler = PipelineSampler()
    for second in range(6):
        engine = EngineStatus(0, "running", progress=EngineProgress(cpu_seconds=second / 2))
        progress = PipelineProgress(messages_done=100 * second, lag={"t/0": 1000 - 50 * second}, engines=[engine])
        sampler.add(1000.0 + second + (step if second >= 3 else 0.0), 50.0 + second, progress)

    assert sampler.rate("done") == 100.0
    assert sampler.cpu_percent(0) == 50.0
    assert sampler.lag().change_per_second == -50.0
    series = sampler.series()
    assert series.at == [1001.0 + second + step for second in range(5)]
    assert series.done == [100.0] * 5


def test_of_two_samples_of_one_moment_the_later_one_counts() -> None:
    sampler = PipelineSampler()
    for done in (1, 2):
        sampler.add(1000.0, 50.0, PipelineProgress(messages_done=done))
    assert sampler.rate("done") == 0.0
    sampler.add(1001.0, 51.0, PipelineProgress(messages_done=5))
    assert sampler.series().done == [3.0]


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert find_quantile([0] * 14 + [3], 0.99) == 300.0
    assert find_quantile([], 0.5) is None


async def test_an_engine_that_is_lost_is_shown() -> None:
    pipeline = ScriptedPipeline()
    pipeline.run = RunState(RunPhase.DRAINING, 1.0, 60.0, left_seconds=29.0)
    pipeline.engines = [msgspec.structs.replace(pipeline.engines[0], state="link lost", silent_seconds=12.0)]
    async with log_in(pipeline) as client:
        page = (await client.get("/")).text

    assert "engine 0 is not running: link lost" in page
    assert "at most 29.0 s left" in page
    assert 'data-action="/api/v1/actions/drain"' not in page
