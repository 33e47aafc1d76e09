"""The README says what can be installed, and shows a whole pipeline in a few lines."""

from __future__ import annotations

import re
import tomllib

from tests.docs.snippets import ROOT, blocks

README = (ROOT / "README.md").read_text()


def test_the_extras_that_it_names_are_those_of_the_package() -> None:
    install = README.partition("## Install")[2].partition("```")[0]
    named = set(re.findall(r"`(\w+)`", install))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert named == extras.keys() - {"dev"}


def test_its_pipeline_has_at_most_ten_lines_of_python() -> None:
    (pipeline,) = (block.code for block in blocks(ROOT / "README.md") if block.info == "python")
    assert len([line for line in pipeline.splitlines() if line.strip()]) <= 10


def test_every_page_is_linked() -> None:
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    linked = set(re.findall(r"\]\((docs/[\w./-]+\.md)\)", README))
    decisions = {path for path in pages if path.startswith("docs/adr/")}
    assert pages - linked - decisions == {"docs/index.md", "docs/reference/api.md"}, "pages of the site alone"
