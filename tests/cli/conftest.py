"""What the tests of commands share: running `tidemill` as a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import prepared
from tests.cli.sites import Site

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def tidemill(tmp_path: Path) -> Run:
    """Run the command in a folder of its own, with nothing of this process's TIDEMILL_* variables."""

    def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
        return prepared.run_text(arguments, cwd=tmp_path, env={**clean, "COLUMNS": "200", **(env or {})})

    return run


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Make a folder for triggers; hosts that are left are killed."""
    made = Site(tmp_path)
    yield made
    for process in made.hosts:
        if process.poll() is None:
            process.kill()
            process.wait()
