"""Dashboard and alert rules name only metrics and labels that exist, and sections that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidemill.runtime.metrics.definitions import Kind
from tidemill.services.triggerer.lists.reporting import host_metrics
from tidemill.spark.live import pipeline_metrics

ROOT = Path(__file__).parent.parent.parent
PLACE = ROOT / "deploy" / "monitoring"
DEFINITIONS = [*pipeline_metrics.DEFINITIONS, *host_metrics.DEFINITIONS]
#: What Prometheus adds to each sample, and to the buckets of a histogram.
ADDED = {"job", "instance"}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((PLACE / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def dashboard() -> dict[str, Any]:
    return json.loads((PLACE / "dashboard.json").read_text())


def queries() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    variables = [variable["query"]["query"] for variable in dashboard()["templating"]["list"][1:]]
    return [*[rule["expr"] for rule in rules()], *panels, *variables]


def find_series(query: str) -> set[str]:
    return set(re.findall(r"\btidemill_\w+", query))


def find_labels(query: str) -> set[str]:
    """Return the labels that a query groups by or selects."""
    grouped = [label for labels in re.findall(r"\bby \(([^)]*)\)", query) for label in labels.split(",")]
    return {label.strip() for label in grouped} | set(re.findall(r"(\w+)=~?\"", query))


@pytest.mark.parametrize("query", queries())
def test_a_query_names_only_series_and_labels_that_exist(query: str) -> None:
    assert find_series(query), "it is about a metric of tidemill"
    for series in find_series(query):
        # A metric of pipelines and of trigger hosts may have a label for engines, which only pipelines have.
        known = [one for one in DEFINITIONS if series in one.list_series()]
        assert known, series
        labels = {label for one in known for label in one.labels} | ADDED
        assert find_labels(query) <= labels | ({"le"} if known[0].kind is Kind.HISTOGRAM else set())
    assert [query.count(one) for one in "([{"] == [query.count(one) for one in ")]}"]


def test_rates_are_of_counters_and_only_of_counters() -> None:
    counters = {
        series
        for definition in DEFINITIONS
        for series in definition.list_series()
        if definition.kind in (Kind.COUNTER, Kind.HISTOGRAM)
    }
    for query in queries():
        rated = set(re.findall(r"\b(?:rate|increase)\((tidemill_\w+)", query))
        assert rated <= counters
        assert find_series(query) & counters <= rated


def test_every_metric_but_the_labels_of_workers_is_on_the_dashboard() -> None:
    shown = {series for query in queries() for series in find_series(query)}
    missing = [one.full_name for one in DEFINITIONS if not shown & set(one.list_series())]
    assert missing == []


def test_alerts_lead_to_a_section_that_is_there() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        page, _, anchor = rule["annotations"]["docs"].partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        aggregated = re.search(r"\bby \(([^)]*)\)", rule["expr"])
        known = {label.strip() for label in aggregated[1].split(",")} if aggregated else None
        (series,) = find_series(rule["expr"].partition(" and ")[0])
        definition = next(one for one in DEFINITIONS if series in one.list_series())
        assert labels <= (known or {*definition.labels, *ADDED})
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_what_prometheus_scrapes_is_the_default_address() -> None:
    from tidemill.config.sections.metrics_settings import MetricsSettings

    document = yaml.safe_load((PLACE / "prometheus.yaml").read_text())
    default = MetricsSettings()
    assert document["scrape_configs"][0]["static_configs"] == [{"targets": [f"{default.host}:{default.port}"]}]
    assert document["rule_files"] == ["alerts.yaml"]


def test_panels_do_not_overlap() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard()["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard()["panels"])
