"""Reads JSON lines that another process may be writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[Any]:
    """Return the complete lines of a file, none if it is not there; the last one may be being written."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]
