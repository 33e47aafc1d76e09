"""Queries for Prometheus: about metrics that exist, of the right worker, with links that are safe."""

from __future__ import annotations

import html
import re
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.web.scripted_pipeline import SCRIPT, ScriptedPipeline
from tests.web.serving import log_in

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.runtime.metrics.definitions import Kind
from tidemill.spark.live.pipeline_metrics import DEFINITIONS
from tidemill.web.pipeline.prometheus import list_queries

SERIES = {series: definition for definition in DEFINITIONS for series in definition.list_series()}


@pytest.mark.parametrize("query", [query.query for query in list_queries(DebugSettings(), "w", "")])
def test_a_query_names_only_series_and_labels_that_exist(query: str) -> None:
    named = set(re.findall(r"\btidemill_\w+", query))
    assert named
    assert named <= SERIES.keys()
    for series in named:
        labels = {*SERIES[series].labels, *(["le"] if SERIES[series].kind is Kind.HISTOGRAM else [])}
        assert {label for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(", ")} <= labels
    assert "SELECTOR" not in query
    assert "INTERVAL" not in query


def test_labels_choose_worker_and_cluster_whatever_their_names_hold() -> None:
    settings = DebugSettings(
        prometheus_worker_label="pod", prometheus_cluster_label="cluster", prometheus_rate_interval="1h30m"
    )
    found = list_queries(settings, 'INTERVAL"} or SELECTOR\\', "eu\n")[0].query
    assert found == (
        r'sum(rate(tidemill_messages_consumed_total{pod="INTERVAL\"} or SELECTOR\\",cluster="eu\n"}[1h30m]))'
    )


async def test_the_page_links_to_prometheus_and_to_other_places() -> None:
    debug = {
        "enabled": True,
        "port": 0,
        "prometheus_url": "https://prom.example/base/",
        "prometheus_worker_label": "worker",
        "custom_links": [{"name": SCRIPT, "url": "https://wiki.example/?a=1&b=2"}],
    }
    async with log_in(ScriptedPipeline({"debug": debug})) as client:
        page = (await client.get("/metrics-queries")).text
        found = (await client.get("/api/v1/metrics-queries")).json()

    links = [html.unescape(link) for link in re.findall(r'href="(https://prom[^"]+)"', page)]
    assert links == [query["url"] for query in found]
    asked = urlsplit(links[0])
    assert (asked.netloc, asked.path) == ("prom.example", "/base/graph")
    assert parse_qs(asked.query)["g0.expr"] == [found[0]["query"]]
    assert 'worker="worker-1"' in found[0]["query"]
    assert SCRIPT not in page
    assert 'href="https://wiki.example/?a=1&amp;b=2"' in page


async def test_without_an_address_the_page_says_which_setting_is_missing() -> None:
    async with log_in(ScriptedPipeline()) as client:
        page = (await client.get("/metrics-queries")).text
    assert "Set debug.prometheus_url" in page
    assert "serves no metrics" in page
    assert "tidemill_offset_lag" in page
