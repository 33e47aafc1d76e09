"""Signals to a trigger host at any moment of its life: nothing runs twice, and a stop is a stop."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.sites import Site

from tidemill.runtime.process.exitcode import ExitCode

pytestmark = pytest.mark.timeout(180)

TRIGGERS = """
import asyncio
from tidemill.triggers.base import BaseTrigger, TriggerEvent

class Ticks(BaseTrigger):
    def serialize(self):
        return "ticking.Ticks", {}
    async def run(self):
        for n in range(5):
            yield TriggerEvent(n)
            await asyncio.sleep(0.1)
        await asyncio.Event().wait()
    async def cleanup(self):
        with open("cleanups", "a") as file:
            print(self.trigger_id, file=file)
        await asyncio.sleep(0.5)
"""


@pytest.fixture
def ticking(site: Site) -> Site:
    (site.folder / "ticking.py").write_text(TRIGGERS)
    site.write(*(f"name: ticks-{n}, classpath: ticking.Ticks" for n in range(3)))
    return site


def hears_hangups(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether a hangup does not simply end the process any more."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigIgn", "SigCgt"))]
    return any(mask & 1 << (signal.SIGHUP - 1) for mask in masks)


def cleanups(site: Site) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted((site.folder / "cleanups").read_text().split())
    return []


NAMES = ["ticks-0", "ticks-1", "ticks-2"]


def test_hangups_from_the_first_moment_on_run_nothing_twice(ticking):
    host = ticking.new_host()
    ticking.until(lambda: hears_hangups(host))

    def read_again() -> bool:
        host.send_signal(signal.SIGHUP)
        return "the list of triggers was reloaded" in ticking.log

    ticking.until(read_again)
    ticking.until(lambda: len(ticking.rows("events", "spec.yaml")) >= 15)
    host.terminate()
    assert host.wait(60) == ExitCode.OK
    rows = ticking.rows("events", "spec.yaml")
    for name in NAMES:
        assert [row["payload"] for row in rows if row["trigger"] == name] == [0, 1, 2, 3, 4]
    assert cleanups(ticking) == NAMES
    assert "Traceback" not in ticking.log


def moments(first: int, end: int) -> list[Any]:
    """Return moments 0.2 s apart, in tenths of a second: each third in the short run, all in the long one."""
    return [n if n % 6 == 0 else pytest.param(n, marks=pytest.mark.long) for n in range(first, end, 2)]


@pytest.mark.parametrize("tenths", moments(0, 24))
def test_a_stop_at_any_moment_of_the_start_ends_the_host_in_good_order(ticking, tenths):
    host = ticking.new_host()
    time.sleep(tenths / 10)  # the moment is what is tested
    host.terminate()
    code = host.wait(60)
    assert code == ExitCode.OK or (code == -signal.SIGTERM and "the trigger host is starting" not in ticking.log)
    assert "Traceback" not in ticking.log
    if (ticking.folder / "cleanups").exists():
        assert cleanups(ticking) == NAMES


@pytest.mark.parametrize("tenths", moments(0, 8))
def test_hangups_during_a_stop_start_nothing(ticking, tenths):
    host = ticking.host()
    ticking.until(lambda: "triggers started" in ticking.log)
    host.terminate()
    time.sleep(tenths / 10)  # the moment is what is tested
    ticking.write(*(f"name: ticks-{n}, classpath: ticking.Ticks" for n in range(9)))
    with contextlib.suppress(ProcessLookupError):
        host.send_signal(signal.SIGHUP)
        host.send_signal(signal.SIGHUP)
    assert host.wait(60) == ExitCode.OK
    assert cleanups(ticking) == NAMES
    assert "Traceback" not in ticking.log


def test_a_stop_right_after_a_hangup_ends_all_of_both_lists(ticking):
    host = ticking.host()
    ticking.until(lambda: "triggers started" in ticking.log)
    ticking.write("name: ticks-0, classpath: ticking.Ticks", "name: new, classpath: ticking.Ticks")
    host.send_signal(signal.SIGHUP)
    host.terminate()
    assert host.wait(60) == ExitCode.OK
    assert [name for name in cleanups(ticking) if name != "new"] == NAMES
    assert "Traceback" not in ticking.log
