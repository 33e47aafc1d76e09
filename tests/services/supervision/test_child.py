from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.until import until

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.services.supervision.child import Child, Death


def build(code: str, died: list[int]) -> Child:
    async def note_death(death: Death) -> None:
        died.append(death.pid)

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
    with pytest.raises(ConfigError, match="configuration"):
        await build("raise SystemExit(2)", died).run()
    assert len(died) == 1


async def test_one_that_cannot_be_started_is_tried_again(monkeypatch):
    died: list[int] = []
    child = build("raise SystemExit(2)", died)
    create, refused = asyncio.create_subprocess_exec, [OSError(11, "no room for another process")]

    async def create_later(*args, **details):
        if refused:
            raise refused.pop()
        return await create(*args, **details)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_later)
    with pytest.raises(ConfigError):
        await child.run()
    assert len(died) == 1


async def test_a_death_that_cannot_be_stored_is_stored_before_it_is_started_again(monkeypatch):
    monkeypatch.setattr("tidemill.services.supervision.child._STORE_SECONDS", 0.01)
    told: list[int] = []

    async def note_death(death: Death) -> None:
        told.append(death.pid)
        if len(told) < 3:
            raise RemoteError("the disk is full")

    with pytest.raises(ConfigError):
        await Child("worker", ["-c", "raise SystemExit(2)"], os.environ, sys.stderr.fileno(), note_death).run()
    assert len(told) == 3
    assert len(set(told)) == 1


async def test_one_that_is_being_started_is_stopped_in_order(tmp_path):
    ended = tmp_path / "ended"
    died: list[int] = []
    code = f"""
import pathlib, signal, sys
def end(number, frame):
    pathlib.Path({str(ended)!r}).touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
signal.pause()
"""
    child = build(code, died)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # the child keeps it until it can handle it
    try:
        running = asyncio.create_task(child.run())
        await asyncio.sleep(0)  # it is being started
        assert child.pid is None
        await child.stop(30.0)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    assert running.done()
    assert ended.exists()


async def test_what_its_zygote_forked_has_ended_before_its_death_is_noted():
    alive: list[bool] = []
    code = """
import os, subprocess, sys, time
from tidemill.services.zygote.client import build_mark
program = [sys.executable, "-c", "import time; time.sleep(600)"]
env = os.environ | {"TIDEMILL_ENGINE_ID": build_mark(os.environ)}
forked = subprocess.Popen(program, env=env, start_new_session=True)
print(forked.pid, flush=True)
os.kill(forked.pid, 19)
os._exit(3)
"""
    reader, writer = os.pipe()

    async def note_death(death: Death) -> None:
        forked = int(os.read(reader, 100))
        alive.append(is_alive(forked))

    child = Child("worker", ["-c", code], os.environ, writer, note_death)
    running = asyncio.create_task(child.run())
    await until(lambda: alive)
    await child.stop(0.0)
    await running
    os.close(reader)
    os.close(writer)
    assert alive[0] is False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_one_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr("tidemill.services.supervision.child._KILL_SECONDS", 0.1)
    died: list[int] = []
    child = build("import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)", died)
    running = asyncio.create_task(child.run())
    await until(lambda: child.pid is not None)
    await child.stop(0.1)
    await running
    assert len(died) == 1
