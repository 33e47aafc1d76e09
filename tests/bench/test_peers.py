"""The comparison with other libraries: what needs none of them runs to its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench.peers import Contest, compare


def test_lost_doubled_and_torn_lines_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"one\ntwo\ntwo\nthr\n")
    assert compare(path, [b"one", b"two", b"three", b"four"]) == (2, 1, 1)


@pytest.mark.long
def test_a_contestant_is_measured_and_its_output_compared(tmp_path: Path) -> None:
    # Without the kill: its client's defaults keep the partitions of a killed member for 45 s.
    contest = Contest(tmp_path, sys.executable, 2_000)
    try:
        per_second, cpu_us = contest.measure("bare")
    finally:
        contest.bench.close()
    assert per_second > 0
    assert cpu_us >= 0
