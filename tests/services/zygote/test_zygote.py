"""The zygote as its own program, and its client; processes are killed, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.until import slack, until, wait_until

from tidemill.runtime.process.table import find_children, find_marked, is_running, read_environment
from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE, marked
from tidemill.services.zygote import client as client_module
from tidemill.services.zygote import link
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.link import ForkedProcess, ZygoteError
from tidemill.services.zygote.messages import Setup, Started, encode

ROOT = Path(__file__).parents[3]
TARGETS = "tests.services.zygote.targets"
SETUP = Setup(preload=(TARGETS,), import_folders=(str(ROOT),))
ENVIRON = {**os.environ, "TIDEMILL_STORE__URL": "postgresql://me:secret@host/db", "_TIDEMILL_LOG_RELAY": "1"}


@pytest.fixture
async def zygote() -> AsyncIterator[ZygoteClient]:
    zygote = ZygoteClient(SETUP, ENVIRON)
    await zygote.start()
    yield zygote
    await zygote.close()


async def fork_and_read(zygote: ZygoteClient, name: str, request: bytes = b"") -> tuple[ForkedProcess, str]:
    """Fork a process and return the first thing that it writes."""
    reader, writer = os.pipe()
    try:
        process = await zygote.fork(f"{TARGETS}:{name}", request, [writer])
    finally:
        os.close(writer)
    text = await asyncio.to_thread(os.read, reader, 65536)
    os.close(reader)
    return process, text.decode()


async def until_gone(pids: str) -> None:
    """Wait until processes have ended, whose ids are separated by spaces."""
    for pid in map(int, pids.split()):
        await until(lambda pid=pid: not is_running(pid), what=f"process {pid} is gone")


def mark_of(pid: int) -> str:
    """Return NAME=VALUE of the mark that a process carries."""
    return next(line for line in read_environment(pid) if line.startswith(ENGINE_ID_VARIABLE))


async def test_a_forked_process_gets_request_and_descriptors_and_leads_a_session(zygote: ZygoteClient) -> None:
    process, text = await fork_and_read(zygote, "answer", b"hello")
    request, leads, names = text.split("\n")
    assert (request, leads) == ("hello", "True")
    assert (await process.ended).status == 3
    # Settings, and the secrets in them, are not for tasks.
    assert [name for name in names.split() if "TIDEMILL" in name] == [ENGINE_ID_VARIABLE]


async def test_a_forked_process_carries_the_mark_as_the_system_sees_it_and_none_of_the_settings(
    zygote: ZygoteClient,
) -> None:
    process, _ = await fork_and_read(zygote, "sleep")
    assert [line for line in read_environment(process.pid) if "TIDEMILL" in line] == [mark_of(zygote.pid or 0)]


async def test_a_forked_process_holds_no_descriptor_of_the_zygote(zygote: ZygoteClient) -> None:
    await fork_and_read(zygote, "sleep")
    _, text = await fork_and_read(zygote, "list_fds")
    assert not [name for name in text.split("\n") if name.startswith("socket:")]
    # Its own copy of what was passed, and its standard output and error, which may be pipes of whoever runs the tests.
    standard = {os.readlink(f"/proc/{zygote.pid}/fd/{number}") for number in (0, 1, 2)}
    assert len([name for name in text.split("\n") if name.startswith("pipe:") and name not in standard]) == 1


async def test_signals_act_in_a_forked_process_as_in_any_other(zygote: ZygoteClient) -> None:
    _, text = await fork_and_read(zygote, "describe_signals")
    assert text == "True True True False"  # SIGINT raises KeyboardInterrupt


@pytest.mark.parametrize(
    ("request_", "status"),
    [(b"", 0), (b"exit", 7), (b"exit text", 1), (b"raise", 1), (b"_exit", 9), (b"kill", -signal.SIGKILL)],
)
async def test_it_is_told_how_a_process_ended(zygote: ZygoteClient, request_: bytes, status: int) -> None:
    process = await zygote.fork(f"{TARGETS}:end_as_told", request_)
    assert (await process.ended).status == status
    assert not zygote.processes


async def test_it_is_told_what_a_process_used(zygote: ZygoteClient) -> None:
    process = await zygote.fork(f"{TARGETS}:use_cpu")
    exited = await process.ended
    assert exited.user_us + exited.system_us >= 40_000
    assert exited.max_rss_kib > 1000


async def test_what_a_process_leaves_behind_ends_with_it(zygote: ZygoteClient) -> None:
    process, text = await fork_and_read(zygote, "start_children")
    assert (await process.ended).status == 0
    await until_gone(text)


async def test_children_of_a_killed_process_end_and_those_of_others_live(zygote: ZygoteClient) -> None:
    killed, text = await fork_and_read(zygote, "start_children", b"stay")
    other, others = await fork_and_read(zygote, "start_children", b"stay")
    zygote.signal(killed, signal.SIGKILL)
    assert (await killed.ended).status == -signal.SIGKILL
    await until_gone(text)
    assert all(is_running(pid) for pid in [other.pid, *map(int, others.split())])


async def test_a_process_that_does_not_start_is_an_end_of_that_process(zygote: ZygoteClient) -> None:
    process = await zygote.fork("tests.services.zygote.targets:nothing")
    assert (await process.ended).status == 1
    _, text = await fork_and_read(zygote, "answer")
    assert text


async def test_a_request_that_is_too_long_is_refused_by_its_size(zygote: ZygoteClient) -> None:
    with pytest.raises(ValueError, match="at most 131072"):
        await zygote.fork(f"{TARGETS}:answer", b"x" * 200_000)


async def test_a_fork_without_room_for_its_descriptors_is_not_waited_for(zygote: ZygoteClient) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="descriptor"):
        await zygote.fork(f"{TARGETS}:answer", b"", [0, 1_000_000])
    assert len(os.listdir("/proc/self/fd")) == before
    assert not zygote.link.is_busy, "it would be taken for stuck, and killed"
    _, text = await fork_and_read(zygote, "answer")
    assert text


async def test_many_processes_are_forked_and_reaped_without_leaving_descriptors(zygote: ZygoteClient) -> None:
    await (await zygote.fork(f"{TARGETS}:end_as_told")).ended

    def count_descriptors() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{zygote.pid}/fd"))

    before = count_descriptors()
    reader, writer = os.pipe()
    processes = await asyncio.gather(*(zygote.fork(f"{TARGETS}:end_as_told", b"", [reader, writer]) for _ in range(50)))
    os.close(reader)
    os.close(writer)
    assert len({process.pid for process in processes}) == 50
    assert [(await process.ended).status for process in processes] == [0] * 50
    await until(lambda: count_descriptors() == before, what=lambda: f"{before} descriptors, not {count_descriptors()},")
    warden = find_children(zygote.pid or 0)
    assert len(warden) == 1


async def test_a_zygote_that_is_killed_takes_its_processes_with_it_and_is_replaced(zygote: ZygoteClient) -> None:
    process, children = await fork_and_read(zygote, "start_children", b"stay")
    old = zygote.pid or 0
    mark = mark_of(old)
    os.kill(old, signal.SIGKILL)
    assert (await process.ended).status == -signal.SIGKILL
    with pytest.raises(ZygoteError):
        await zygote.fork(f"{TARGETS}:answer")
    await until(lambda: zygote.ready.is_set(), what="another zygote is ready")
    _, text = await fork_and_read(zygote, "answer", b"again")
    assert text.startswith("again")
    await until(lambda: not find_marked(mark) and not is_running(old), what="nothing of the old one is left")
    await until_gone(children)


async def test_forks_that_wait_when_the_zygote_dies_fail(zygote: ZygoteClient) -> None:
    os.kill(zygote.pid or 0, signal.SIGSTOP)
    waiting = asyncio.ensure_future(zygote.fork(f"{TARGETS}:answer"))
    await asyncio.sleep(0)
    os.kill(zygote.pid or 0, signal.SIGKILL)
    with pytest.raises(ZygoteError, match="died"):
        await waiting


@pytest.mark.parametrize("asked", ["fork", "kill"])
async def test_a_zygote_that_is_stopped_is_noticed_and_replaced(
    zygote: ZygoteClient, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    process, children = await fork_and_read(zygote, "start_children", b"stay")
    monkeypatch.setattr(link, "LOOK_SECONDS", 0.2)
    os.kill(zygote.pid or 0, signal.SIGSTOP)
    if asked == "fork":
        with pytest.raises(ZygoteError, match="died"):
            await zygote.fork(f"{TARGETS}:answer")
    else:
        zygote.signal(process, signal.SIGKILL, group=True)
    await process.ended
    assert process.lost
    monkeypatch.undo()
    await until(lambda: zygote.ready.is_set(), what="another zygote is ready")
    _, text = await fork_and_read(zygote, "answer", b"again")
    assert text.startswith("again")
    await until_gone(children)


async def test_a_zygote_that_is_slow_to_begin_is_not_taken_for_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    monkeypatch.setattr(link, "LOOK_SECONDS", 0.02)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slow = link.ForkLink(lambda _: gone.append("started"), lambda: gone.append("gone"), lambda: gone.append("stuck"))
    slow.attach(ours, Setup())
    waiting = asyncio.ensure_future(slow.fork(f"{TARGETS}:answer"))
    await asyncio.sleep(0.2)  # many looks
    assert gone == []
    theirs.send(encode(Started()))
    await until(lambda: gone[:2] == ["started", "stuck"])
    slow.lose()
    theirs.close()
    with pytest.raises(ZygoteError):
        await waiting


async def test_a_zygote_that_is_stopped_before_it_has_begun_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "START_SECONDS", 0.05)
    zygote = ZygoteClient(SETUP, ENVIRON)
    starting = asyncio.ensure_future(zygote.start())
    await asyncio.sleep(0)
    stopped = zygote.pid or 0
    os.kill(stopped, signal.SIGSTOP)

    await starting

    assert zygote.pid not in (stopped, None)
    assert not is_running(stopped)
    await zygote.close()


async def test_modules_of_the_user_that_take_long_to_import_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text(f"import os; open({str(tmp_path / 'gate')!r}).close()")
    os.mkfifo(tmp_path / "gate")
    monkeypatch.setattr(client_module, "START_SECONDS", 0.05)
    said: list[str] = []
    monkeypatch.setattr(client_module.log, "warning", lambda text, **_: said.append(text), raising=False)
    zygote = ZygoteClient(Setup(user_preload=("slow_module",), import_folders=(str(tmp_path),)))
    starting = asyncio.ensure_future(zygote.start())
    await until(lambda: said, what="it is named")
    assert "worker.preload: slow_module" in said[0]
    assert not starting.done()
    await asyncio.to_thread(lambda: (tmp_path / "gate").open("w").close())
    await starting
    await zygote.close()


async def test_signals_that_everything_gets_do_not_end_the_zygote(zygote: ZygoteClient) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(zygote.pid or 0, number)
    _, text = await fork_and_read(zygote, "answer", b"still here")
    assert text.startswith("still here")


async def test_a_warden_that_is_killed_is_replaced(zygote: ZygoteClient) -> None:
    (warden,) = find_children(zygote.pid or 0)
    os.kill(warden, signal.SIGKILL)
    await until(lambda: find_children(zygote.pid or 0) - {warden}, what="another warden runs")


async def test_closing_it_ends_what_is_sessions_below_its_processes() -> None:
    zygote = ZygoteClient(SETUP, ENVIRON)
    await zygote.start()
    _, children = await fork_and_read(zygote, "start_grandchildren")
    await zygote.close()
    assert not [pid for pid in children.split() if is_running(int(pid))]


@pytest.mark.parametrize("first", ["process", "warden", "zygote"])
async def test_what_lost_its_parents_and_cleared_its_environment_ends_with_a_killed_zygote(
    zygote: ZygoteClient, first: str
) -> None:
    """At once, so that whoever is below the killed ones has no parent when somebody looks."""
    process, children = await fork_and_read(zygote, "start_children", b"stay")
    assert zygote.pid is not None
    (warden,) = find_children(zygote.pid) - {process.pid}
    pids = {"process": process.pid, "warden": warden, "zygote": zygote.pid}
    for pid in [pids.pop(first), *pids.values()]:
        os.kill(pid, signal.SIGKILL)
    await until_gone(children)


async def test_closing_it_ends_everything() -> None:
    zygote = ZygoteClient(SETUP, ENVIRON)
    await zygote.start()
    process, text = await fork_and_read(zygote, "start_children", b"stay")
    mark = mark_of(zygote.pid or 0)
    pid = zygote.pid or 0
    await zygote.close()
    assert process.ended.done()
    assert not is_running(pid)
    await until_gone(text)
    await until(lambda: not find_marked(mark), what="nothing carries its mark")
    await zygote.close()


async def test_modules_of_the_user_that_do_not_import_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("raise SystemExit('oh')")
    (tmp_path / "threaded_module.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    said: list[str] = []
    monkeypatch.setattr(client_module.log, "warning", said.append, raising=False)
    names = ("broken_module", "threaded_module", "no_such_module")
    zygote = ZygoteClient(Setup(user_preload=names, import_folders=(str(tmp_path),)))
    await zygote.start()
    await zygote.close()
    assert [next(name for name in names if name in problem) for problem in said] == list(names)
    assert "SystemExit: oh" in said[0]
    assert "starts threads" in said[1]


OWNER = """
import asyncio, sys
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Setup

async def main():
    zygote = ZygoteClient(Setup(import_folders=(sys.argv[1],)))
    await zygote.start()
    process = await zygote.fork("tests.services.zygote.targets:sleep")
    print(zygote.pid, process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_nothing_outlives_an_owner_that_is_killed() -> None:
    argv = [sys.executable, "-c", OWNER, str(ROOT)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        mark = mark_of(pids[0])
        owner.kill()
        killed_at = time.monotonic()
    wait_until(lambda: not any(map(is_running, pids)) and not find_marked(mark), what="all of it is gone")
    assert time.monotonic() - killed_at < slack(5)


def test_what_has_ended_and_was_not_reaped_is_not_found_by_its_number() -> None:
    code = "from tidemill.runtime.process.warden import *; carry_number(number_tree('tree-1-a'))"
    code += "; print('carries', flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "carries\n"
        assert marked("tree-1-a") == [process.pid]
        process.stdin.write("\n")
        process.stdin.flush()
        wait_until(lambda: not is_running(process.pid), what="it has ended")
        assert marked("tree-1-a") == []
        process.wait()
