"""The walks of the architecture page lead over files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text()
WALKS = re.findall(r"^\*\*(An? [^*]+)\*\*\n\n((?:\d+\. .*\n(?:   .*\n)*)+)", PAGE, re.MULTILINE)


def test_there_are_four_walks() -> None:
    assert [name for name, _ in WALKS] == [
        "A Kafka message",
        "A trigger event",
        "An element of a map",
        "A dead letter",
    ]


@pytest.mark.parametrize(("name", "steps"), WALKS, ids=[name for name, _ in WALKS])
def test_a_walk_leads_over_files_that_exist_and_visits_none_twice(name: str, steps: str) -> None:
    files = re.findall(r"^\d+\. `([^`]+)`", steps, re.MULTILINE)
    assert len(files) == len(set(files))
    for file in re.findall(r"`([a-z_/]+\.py)`", steps):
        assert (ROOT / "src/tidemill" / file).is_file(), file
