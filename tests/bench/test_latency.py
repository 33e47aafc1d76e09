"""The benchmarks of latency and of kills: short, they run to their end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import latency, recovery


def _read_last(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_pipeline_is_compared_with_a_bare_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latency.stable(tmp_path, count=40)
    assert _read_last(capsys)["p50_ratio"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_the_time_after_a_kill_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recovery.measure(tmp_path, kills=1)
    assert _read_last(capsys)["max_seconds"] > 0
