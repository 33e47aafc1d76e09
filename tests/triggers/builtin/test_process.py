"""The trigger that waits for the end of a process."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
from tests.triggers.builtin.triggers_contract import fired, made_again

from tidemill.triggers.builtin import process as module
from tidemill.triggers.builtin.process import GONE, ProcessExitTrigger

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes that end when their stdin does."""
    started: list[subprocess.Popen[bytes]] = []

    def one() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()


def no_pidfd(pid: int) -> int:
    raise OSError(24, "too many open files")


@pytest.mark.parametrize("tells", ["the system tells", "it is polled"])
async def test_the_end_of_a_process_fires(start, monkeypatch, tells):
    if tells == "it is polled":
        monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    process = start()
    trigger = ProcessExitTrigger(process.pid, poll_seconds=0.02)
    waiting = asyncio.ensure_future(fired(trigger))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    files = len(os.listdir("/proc/self/fd"))
    process.stdin.close()
    (event,) = await waiting  # nobody has collected its exit status
    assert event.payload == {"pid": process.pid, "found": True}
    assert event.identity == f"{process.pid}@{trigger.started}"
    assert len(os.listdir("/proc/self/fd")) <= files


async def test_a_process_that_is_gone_already_fires_at_once(start):
    process = start()
    made_before = ProcessExitTrigger(process.pid)
    process.kill()
    process.wait()
    for trigger in (made_before, ProcessExitTrigger(process.pid)):
        (event,) = await fired(trigger, seconds=30)
        assert event.payload == {"pid": process.pid, "found": False}


async def test_another_process_under_the_same_id_is_not_waited_for(start):
    process = start()
    started = ProcessExitTrigger(process.pid).started
    other_time, other_boot = f"{started}0", f"x{started}"
    for other in (other_time, other_boot, GONE):
        (event,) = await fired(ProcessExitTrigger(process.pid, started=other), seconds=30)
        assert event.payload["found"] is False


async def test_a_process_that_ends_between_the_look_and_the_wait_fires(start, monkeypatch):
    process = start()
    real = os.pidfd_open

    def late(pid: int) -> int:
        process.kill()
        process.wait()
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", late)
    assert len(await fired(ProcessExitTrigger(process.pid), seconds=30)) == 1


async def test_where_processes_cannot_be_inspected_the_id_is_compared(start, monkeypatch):
    monkeypatch.setattr(module, "_PROC", "/no/such/folder")
    process = start()
    trigger = ProcessExitTrigger(process.pid)
    assert trigger.started == str(process.pid)
    waiting = asyncio.ensure_future(fired(trigger))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    process.kill()
    assert len(await waiting) == 1
    process.wait()
    assert ProcessExitTrigger(process.pid).started == GONE


async def test_a_cancelled_wait_leaves_nothing_behind(start):
    process = start()
    files = len(os.listdir("/proc/self/fd"))
    waiting = asyncio.ensure_future(fired(ProcessExitTrigger(process.pid)))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert len(os.listdir("/proc/self/fd")) == files


def test_it_is_created_again_for_the_same_process(start):
    trigger = ProcessExitTrigger(start().pid, poll_seconds=3)
    again = made_again(trigger)
    assert isinstance(again, ProcessExitTrigger)
    assert (again.pid, again.started) == (trigger.pid, trigger.started)


@pytest.mark.parametrize(
    ("pid", "kwargs", "error"),
    [("1", {}, TypeError), (True, {}, TypeError), (0, {}, ValueError), (1, {"poll_seconds": 0}, ValueError)],
)
def test_arguments_that_make_no_sense_are_refused(pid, kwargs, error):
    with pytest.raises(error, match=r"pid|poll_seconds"):
        ProcessExitTrigger(pid, **kwargs)
