"""Writes the tables of docs/reference/metrics.md from the code: `python -m tests.docs.metrics_page`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.docs.snippets import ROOT

from tidemill.runtime.metrics.definitions import Definition
from tidemill.services.dev import metrics as dag_metrics
from tidemill.services.triggerer.lists.reporting import host_metrics
from tidemill.spark.live import pipeline_metrics

PAGE = ROOT / "docs/reference/metrics.md"
TABLES = {
    "Pipelines": pipeline_metrics.DEFINITIONS,
    "Trigger hosts": host_metrics.DEFINITIONS,
    "DAGs": dag_metrics.DEFINITIONS,
}


def draw_table(definitions: Sequence[Definition]) -> str:
    """Return the rows of a table."""
    rows = ["| metric | kind | labels | |", "| --- | --- | --- | --- |"]
    for definition in definitions:
        labels = ", ".join(f"`{label}`" for label in definition.labels)
        rows.append(f"| `{definition.full_name}` | {definition.kind.value} | {labels} | {definition.help} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the page with the tables of the code."""
    for title, definitions in TABLES.items():
        text = re.sub(
            rf"(?s)(## {title}\n\n)\|.*?(?=\n\n|\n?\Z)", lambda found, it=definitions: found[1] + draw_table(it), text
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()).rstrip("\n") + "\n")
