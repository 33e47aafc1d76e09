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
from tidemill.runtime.process.exitcode import ExitCode

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def ask(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command about the pipeline."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "COLUMNS": "200"}
    return prepared.run_text([*words, str(site.folder / "w1.yaml")], cwd=site.folder, env=env, timeout=60)


def wait_for_story(site: Site, n: int, text: str) -> None:
    """Wait until the story of a message has a text: rows arrive up to a second after the message is done."""
    place = f"{site.topic}:{n % site.partitions}:{n // site.partitions}"
    wait_until(lambda: text in ask(site, "trace", place).stdout, 60, what=text)


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

    # A message that no killed engine had, one that it refuses, and the way back.
    good = site.fed
    site.feed(1)
    bad = site.fed
    site.feed(1, bad=True)
    site.wait_all_committed(60)
    (letter,) = map(decode_letter, read_all(site.bootstrap, f"{site.topic}_dlq"))
    assert (letter.kind, letter.sources[0].partition) == ("transform", bad % site.partitions)
    wait_for_story(site, good, "arrange or transform returned, without tasks for it")
    wait_for_story(site, bad, "no such customer")
    redriven = ask(site, "dlq", "redrive")
    assert redriven.returncode == ExitCode.OK, redriven.stderr
    wait_until(lambda: len(read_all(site.bootstrap, f"{site.topic}_dlq")) == 2, 60, what="it is refused once more")

    pipeline.signal(signal.SIGTERM)
    assert pipeline.wait(60) == ExitCode.OK
    assert pipeline.marked() == {}
