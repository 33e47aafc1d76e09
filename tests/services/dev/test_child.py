from __future__ import annotations

import asyncio
import os
import sys

import pytest
from tests.until import until

from tidemill.core.errors import ConfigError
from tidemill.services.dev.child import Child


def build(code: str, died: list[int]) -> Child:
    async def note_death(pid: int) -> None:
        died.append(pid)

    return Child("worker", ["-c", code], os.environ, sys.stderr.fileno(), note_death)


async def test_one_that_dies_is_started_again_after_its_death_is_noted(capfd):
    died: list[int] = []
    child = build("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", died)
    running = asyncio.create_task(child.run())
    await until(lambda: len(died) >= 2)
    await child.stop(0.0)
    await running
    assert len(set(died)) == len(died)


async def test_one_that_cannot_be_run_with_the_configuration_is_not_started_again():
    died: list[int] = []
    with pytest.raises(ConfigError, match="the worker cannot be run with this configuration"):
        await build("raise SystemExit(2)", died).run()
    assert len(died) == 1


async def test_one_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr("tidemill.services.dev.child._KILL_SECONDS", 0.1)
    died: list[int] = []
    child = build("import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)", died)
    running = asyncio.create_task(child.run())
    await until(lambda: child.pid is not None)
    await child.stop(0.1)
    await running
    assert len(died) == 1
