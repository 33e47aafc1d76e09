"""The fields that the page on operating a pipeline names are those of `tidemill status --json`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.docs.snippets import ROOT

from tidemill.config.settings import Settings
from tidemill.runtime.link.progress import SinkStats
from tidemill.spark.live.status_report import build_report
from tidemill.spark.progress import EngineStatus, PipelineProgress
from tidemill.spark.run_state import RunState

PAGE = (ROOT / "docs/how-to/operate.md").read_text()
ROWS = re.findall(
    r"^\| (`[^|]+) \| ([^|]+) \|$", PAGE.partition("## Watch it")[2].partition("## What to")[0], re.MULTILINE
)
FIELDS = [field for fields, _ in ROWS for field in re.findall(r"`([\w.]+)`", fields)]


def report() -> dict[str, Any]:
    progress = PipelineProgress(sinks={"sinks.kafka.out": SinkStats()}, engines=[EngineStatus(slot=0, state="running")])
    return build_report(Settings(), "worker", RunState(), progress, 0.0)


def test_fields_are_named() -> None:
    assert len(FIELDS) > 10


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_the_page_is_in_the_report(field: str) -> None:
    found: Any = report()
    for name in field.split("."):
        assert name in found
        found = found[name]


def test_what_the_page_names_of_engines_and_sinks_is_in_the_report() -> None:
    named = {place.strip("`"): set(re.findall(r"`(\w+)`", text)) for place, text in ROWS}
    assert named["engines"] <= report()["engines"][0].keys()
    assert named["sinks"] <= report()["sinks"]["sinks.kafka.out"].keys()
    assert named["engines"]
    assert named["sinks"]
