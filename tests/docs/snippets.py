"""Reads the documentation as a program: its files, its Python, its commands.

In a fenced block, `python` is run, `yaml` must be a valid configuration, `yaml triggers` a list of triggers that can be
made, `sh` is run by bash, `sh background` is started, must live at the end of the page and end well when it is asked
to; all blocks of a page share one folder. `<!-- file: NAME -->` before a block also writes it to a file. `text`,
`console` and `json` are shown only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]

#: Commands that the whole of CI runs.
RUN_BY_CI = ("scripts/demo", "scripts/test", "scripts/bench")

_FENCE = re.compile(
    r"(?:<!-- file: (?P<file>\S+) -->\n)?^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    info: str
    file: str | None
    code: str

    @property
    def commands_of_ci(self) -> bool:
        return all(line.startswith(RUN_BY_CI) for line in self.code.splitlines() if line.strip())


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["info"].strip(), found["file"], found["code"])
        for found in _FENCE.finditer(text)
    ]
