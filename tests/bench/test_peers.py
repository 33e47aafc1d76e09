"""The comparison with other libraries: what needs none of them runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.peers import compare

ROOT = Path(__file__).parents[2]


def test_lost_doubled_and_torn_lines_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"one\ntwo\ntwo\nthr\n")
    assert compare(path, [b"one", b"two", b"three", b"four"]) == (2, 1, 1)


def test_a_contestant_is_measured_and_killed() -> None:
    code = "import sys; from bench.peers import compete; compete(sys.executable, 2_000, 1, ('bare',))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    measured, killed, medians = [json.loads(line) for line in run.stdout.splitlines()]
    assert measured["per_second"] > 0
    assert killed["lost"] == 0
    assert medians["who"] == "bare"
