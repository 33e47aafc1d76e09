"""Processes below another are waited for, however their parents end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tidemill.spark.session.process_tree import Descendants

TREE = """
import subprocess, sys
below = subprocess.Popen(["sleep", sys.argv[1]], stdout=subprocess.DEVNULL)
print(below.pid, flush=True)
sys.stdin.read()
"""


def tree(seconds: float) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", TREE, str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_who_outlives_its_parent_is_waited_for() -> None:
    process, _ = tree(1.0)
    began = time.monotonic()
    with Descendants(process.pid) as below:
        process.communicate()
        assert below.wait(60) == []
    assert 0.5 < time.monotonic() - began < 10


def test_who_does_not_end_in_time_is_named() -> None:
    process, sleeper = tree(60.0)
    files = len(os.listdir("/proc/self/fd"))
    with Descendants(os.getpid()) as below:
        assert sleeper in below.wait(0.1)
        os.kill(sleeper, 9)
        process.communicate()
        assert not {sleeper, process.pid} & set(below.wait(0.1))
    assert len(os.listdir("/proc/self/fd")) <= files


def test_nobody_is_not_waited_for() -> None:
    with Descendants(2**30) as below:
        assert below.wait(60) == []
