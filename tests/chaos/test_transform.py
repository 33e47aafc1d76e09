"""`transform` in a live pipeline whose engines are killed: nothing is lost, and what it refused goes back."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from typing import Any

import pytest
from tests import prepared
from tests.chaos.conftest import ROOT, PipelineProcess, Site, read_all
from tests.jsonl import read_lines
from tests.until import wait_until

from tidemill.deadletters.letter import decode_letter
from tidemill.runtime.exitcode import ExitCode

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def ask(site: Site, *words: str) -> str:
    """Run a command about the pipeline and return what it printed."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "COLUMNS": "200"}
    done: subprocess.CompletedProcess[str] = prepared.run_text(
        [*words, str(site.folder / "w1.yaml")], cwd=site.folder, env=env, timeout=60
    )
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    return done.stdout


def start(site: Site) -> PipelineProcess:
    config: dict[str, Any] = {
        "executor": {"commit": "window", "window_size": 50},
        "debug": {"enabled": True, "db_dir": str(site.folder / "recordings")},
        "kafka": {"session_timeout_ms": 6000},
    }
    return site.start(handler="Transform", **config)


def test_killed_engines_lose_nothing_and_what_was_refused_is_found_and_goes_back(site, monkeypatch):
    monkeypatch.setenv("TIDEMILL_DEBUG__ENABLED", "true")
    site.feed(4_000)
    pipeline = start(site)
    pipeline.wait_working(90)
    killed: set[int] = set()
    interrupted = 0
    for _ in range(3):
        site.feed(4_000)
        victim = wait_until(lambda: [pid for pid in pipeline.engines() if pid not in killed], 60)[0]
        killed.add(victim)
        os.kill(victim, signal.SIGKILL)
        interrupted += sum(site.committed().values()) < site.fed
    assert interrupted, "all was done whenever an engine was killed"
    site.wait_all_committed(120)
    assert set(site.seen()) == set(range(site.fed))
    whole = {n for row in read_lines(site.out / "windows.jsonl") for n in row["n"]}
    assert whole == set(range(site.fed)), "a window was committed without what it delivers"
    for partition in range(site.partitions):
        offsets = [row["offset"] for row in site.rows() if row["partition"] == partition]
        assert all(after <= before + 1 for before, after in itertools.pairwise(offsets)), "a message was overtaken"

    # One that it refuses: a letter, its story, and the way back.
    bad = site.fed
    site.feed(1, bad=True)
    site.wait_all_committed(60)
    (letter,) = map(decode_letter, read_all(site.bootstrap, f"{site.topic}_dlq"))
    assert (letter.kind, letter.sources[0].partition) == ("transform", bad % site.partitions)
    place = f"{site.topic}:{letter.sources[0].partition}:{letter.sources[0].offset}"
    wait_until(lambda: "no such customer" in ask(site, "trace", place), 30)
    story = ask(site, "trace", f"{site.topic}:0:0")
    assert "arrange or transform returned, without tasks for it" in story
    ask(site, "dlq", "redrive")
    wait_until(lambda: len(read_all(site.bootstrap, f"{site.topic}_dlq")) == 2, 60, what="it is refused once more")

    pipeline.signal(signal.SIGTERM)
    assert pipeline.wait(60) == ExitCode.OK
    assert pipeline.marked() == {}
