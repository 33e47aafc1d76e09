"""The programs that the page on resident executors uses are installed: without them, its blocks do nothing."""

from __future__ import annotations

import shutil

import pytest
from tests.docs.snippets import ROOT, blocks

PAGE = ROOT / "docs/how-to/keep-programs-alive.md"


@pytest.mark.parametrize("program", ["jq", "sed"])
def test_the_example_of_a_program_is_on_the_page_and_can_be_run_here(program):
    assert [block for block in blocks(PAGE) if block.info == "sh" and f'results("{program}"' in block.code]
    assert shutil.which(program), f"install {program}: without it, its block on the page does nothing"
