"""The driver with many engines: the bench runs to its end, and says what it has measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_driver_with_a_few_engines_is_measured_from_start_to_drain() -> None:
    code = "from bench import scale; scale.measure(4, 12, steady_seconds=1.0, rounds=2)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [row["bench"] for row in rows] == ["start", "steady", *["answer"] * 9, "kill", *["drain"] * 4]
    assert rows[1]["reported_per_second"] > 0
    assert all(row["last_ms"] > 0 for row in rows[-4:])
    assert [row["work_seconds"] for row in rows[-4:]] == [0.0, 0.5, 0.0, 0.5]
